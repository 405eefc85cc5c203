//! A Service and the pod behind it, asked in turn and over a long time.

use rstest::rstest;
use underpass_tests::{
    netfilter::kube_proxy::Mode::{self, Iptables, Nftables},
    prelude::*,
};

use crate::kube_proxy::{BY_POD, PORT, SOURCE, Scene};

#[rstest]
fn one_udp_socket_alternates_between_service_and_pod(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    let service = family.service_at(BY_POD);
    let direct = scene.backend.at(family, PORT);
    for first in [service, direct] {
        let mut client = udp::Client::open(scene.client.netns(), family)?;
        client.chat(first, 3)?;
        for _ in 0..10 {
            client.ask(service, 50)?;
            client.ask(direct, 50)?;
        }
        scene.lab.firewall.outlast(family, &["udp"])?;
        for _ in 0..10 {
            client.ask(direct, 50)?;
            client.ask(service, 50)?;
        }
        client.chat(direct, 10)?;
        client.chat(service, 10)?;
    }
    Ok(())
}

#[rstest]
fn one_tcp_port_reaches_service_and_pod_at_once(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    let service = family.service_at(BY_POD);
    let direct = scene.backend.at(family, PORT);
    for (port, targets) in [(SOURCE, [service, direct]), (SOURCE + 1, [direct, service])] {
        let [mut first, mut second] = [
            tcp::Client::connect_from(scene.client.netns(), port, targets[0])?,
            tcp::Client::connect_from(scene.client.netns(), port, targets[1])?,
        ];
        for _ in 0..5 {
            first.chat(2)?;
            second.chat(2)?;
        }
        first.exchange(500_000, 500_000)?;
        second.exchange(500_000, 500_000)?;
    }
    Ok(())
}

#[rstest]
fn a_connection_by_the_service_outlives_its_entry(
    #[values(V4, V6)] family: Family,
    #[values(Iptables, Nftables)] mode: Mode,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family, mode)?;
    let mut client = tcp::Client::connect(scene.client.netns(), family.service_at(BY_POD))?;
    client.chat(5)?;
    // Connection tracking picks the connection up in the middle, which this firewall usually does not take for a beginning.
    let to_backend = format!("ct state new tcp dport {PORT}");
    scene.lab.firewall.accept_forwarded(&to_backend)?;
    scene.lab.firewall.outlast(family, &["tcp"])?;
    client.chat(5)?;
    client.exchange(500_000, 500_000)?;
    Ok(())
}

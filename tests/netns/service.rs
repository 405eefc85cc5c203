//! A Service in front of a pod of the same node, translated by the node's firewall as kube-proxy does.

use anyhow::{Result, ensure};
use rstest::rstest;
use underpass_abi::counter::Counter;
use underpass_tests::{
    Family::{self, V4, V6},
    Lab, Pod,
    counter::Meter,
    needs_root,
    netfilter::Transport,
    traffic::{tcp, udp},
};

const PORT: u16 = 8080;
const SERVICE_PORT: u16 = 80;
const SOURCE: u16 = 45_678;

/// A pod that asks, a pod that answers, and a Service in front of it.
struct Scene {
    _servers: (tcp::Server, udp::Server),
    client: Pod,
    backend: Pod,
    lab: Lab,
}

impl Scene {
    fn set(family: Family) -> Result<Self> {
        let lab = Lab::new()?;
        let (client, backend) = (lab.pod("client")?, lab.pod("backend")?);
        let service = family.service_at(SERVICE_PORT);
        for transport in [Transport::Tcp, Transport::Udp] {
            lab.firewall
                .service(transport, service, backend.at(family, PORT))?;
        }
        lab.firewall
            .count_forwarded("translated", "ct status dnat")?;
        let servers = (
            tcp::Server::start(backend.netns(), family.port(PORT))?,
            udp::Server::start(backend.netns(), family.port(PORT))?,
        );
        Ok(Self {
            _servers: servers,
            client,
            backend,
            lab,
        })
    }
}

#[rstest]
fn tcp_by_the_service_is_left_to_the_stack(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let meter = Meter::start(&scene.lab.node)?;
    let mut client = tcp::Client::connect(scene.client.netns(), family.service_at(SERVICE_PORT))?;
    let seen = client.chat(20)?;
    ensure!(
        seen.ip() == scene.client.ip(family),
        "the backend saw {seen}"
    );
    client.exchange(2_000_000, 2_000_000)?;
    scene.lab.firewall.expect_many("translated", 60)?;
    meter.expect_no_bypass()
}

#[rstest]
fn udp_by_the_service_is_left_to_the_stack(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let meter = Meter::start(&scene.lab.node)?;
    // An answer from another address or port than was asked fails.
    let mut client = udp::Client::open(scene.client.netns(), family)?;
    let seen = client.chat(family.service_at(SERVICE_PORT), 20)?.seen;
    ensure!(
        seen.ip() == scene.client.ip(family),
        "the backend saw {seen}"
    );
    scene.lab.firewall.expect_many("translated", 40)?;
    meter.expect_no_bypass()
}

#[rstest]
fn one_udp_socket_alternates_between_service_and_pod(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let service = family.service_at(SERVICE_PORT);
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
fn one_tcp_port_reaches_service_and_pod_at_once(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let service = family.service_at(SERVICE_PORT);
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
fn a_connection_by_the_service_outlives_its_entry(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let mut client = tcp::Client::connect(scene.client.netns(), family.service_at(SERVICE_PORT))?;
    client.chat(5)?;
    // Connection tracking picks the connection up in the middle, which this firewall usually does not take for a beginning.
    let to_backend = format!("ct state new tcp dport {PORT}");
    scene.lab.firewall.accept_forwarded(&to_backend)?;
    scene.lab.firewall.outlast(family, &["tcp"])?;
    client.chat(5)?;
    client.exchange(500_000, 500_000)?;
    Ok(())
}

#[rstest]
fn a_pod_reaches_itself_by_its_service(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    // As kube-proxy: who asks for itself comes from the node.
    let backend = scene.backend.ip(family);
    let ip = family.nft();
    scene.lab.firewall.load(&format!(
        "add rule inet lab postrouting {ip} saddr {backend} {ip} daddr {backend} masquerade"
    ))?;
    let service = family.service_at(SERVICE_PORT);
    tcp::visit(scene.backend.netns(), service)?;
    udp::Client::open(scene.backend.netns(), family)?.chat(service, 5)?;
    Ok(())
}

#[rstest]
fn direct_flows_beside_a_service_take_the_bypass(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let meter = Meter::start(&scene.lab.node)?;
    let direct = scene.backend.at(family, PORT);
    udp::Client::open(scene.client.netns(), family)?.chat(direct, 20)?;
    meter.expect(Counter::BypassPeer, 34)
}

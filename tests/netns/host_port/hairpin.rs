//! A container that connects to its own host port.

use std::net::SocketAddr;

use rstest::rstest;
use underpass_tests::prelude::*;

use super::{HOST, INSIDE, Scene, both, mapped, misses, node_at, reaches, serve};

#[rstest]
fn a_container_reaches_itself_by_an_address_of_the_host(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = mapped(&lab, &both()).with("bypass", bypass);
    let scene = Scene::in_network(family, lab, &conf)?;
    let pod = scene.server.netns();
    let meter = Meter::start(&scene.lab.node)?;
    for ip in [family.node(), family.pod_gateway()] {
        let at = SocketAddr::new(ip, HOST);
        reaches(pod, at, family.pod_gateway()).with_context(|| format!("by {at}"))?;
        tcp::Client::connect(pod, at)?.exchange(2_000_000, 2_000_000)?;
        let mut connected = udp::Client::open(pod, family)?;
        connected.connect(at)?;
        for len in [0, 1000, 1500 - family.header_len() - 8, 4000] {
            connected.ask(at, len)?;
        }
    }
    meter.expect(Counter::HostPort, 8)?;
    let counted = meter.read()?;
    ensure!(counted.dropped() == 0, "{counted:?}");
    // At its own address it needs nobody.
    reaches(
        pod,
        scene.server.at(family, INSIDE),
        scene.server.ip(family),
    )
}

#[rstest]
fn other_containers_keep_their_address(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let client = scene.lab.pod("client")?;
    for ip in [family.node(), family.pod_gateway()] {
        let at = SocketAddr::new(ip, HOST);
        reaches(scene.server.netns(), at, family.pod_gateway())?;
        reaches(client.netns(), at, client.ip(family))?;
    }
    Ok(())
}

#[rstest]
fn a_closed_port_refuses(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("server", &mapped(&lab, &both()))?;
    for ip in [family.node(), family.pod_gateway()] {
        let at = SocketAddr::new(ip, HOST);
        tcp::is_refused(pod.netns(), at)?;
        udp::Client::open(pod.netns(), family)?.is_refused(at)?;
    }
    Ok(())
}

#[rstest]
fn it_ends_with_the_mapping(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let at = node_at(family, HOST);
    let mut busy = udp::Client::open(scene.server.netns(), family)?;
    let seen = busy.chat(at, 3)?.seen;
    ensure!(seen.ip() == family.pod_gateway(), "{seen}");
    // The port is another's now: what was a hairpin is a way between containers.
    let newer = scene.lab.pod_with("newer", &mapped(&scene.lab, &both()))?;
    let servers = serve(&newer, family)?;
    let seen = busy.chat(at, 3)?.seen;
    ensure!(seen.ip() == scene.server.ip(family), "{seen}");
    drop(servers);
    newer.del()?;
    let seen = busy.chat(at, 3)?.seen;
    ensure!(seen.ip() == family.pod_gateway(), "{seen}");
    misses(scene.lab.pod("client")?.netns(), node_at(family, INSIDE))
}

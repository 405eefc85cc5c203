//! What somebody sends to a host port in another's name keeps that one from nothing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rstest::rstest;
use serde_json::json;
use underpass_abi::flow::state;
use underpass_tests::{
    capture::Capture,
    flow_table::{self, Then},
    netns::Netns,
    prelude::*,
    traffic::{PATIENCE, SILENCE, raw::RawLink},
    world::World,
};

use super::{HOST, INSIDE, Scene, mapped, node_at, reaches};

const PORT: u16 = 42_000;

/// What the world sends to the host port as `src`.
fn forge(lab: &Lab, src: SocketAddr) -> Result<()> {
    forge_to(lab, src, HOST)
}

fn forge_to(lab: &Lab, src: SocketAddr, port: u16) -> Result<()> {
    let ends = lab.ends_from_world(src.ip(), Family::of(src.ip()).node())?;
    send(
        lab,
        &[
            ends.syn(src.port(), port),
            ends.udp(src.port(), port, b"forged"),
        ],
    )
}

/// Has the world send frames, of which the last one's payload is `forged`.
fn send(lab: &Lab, frames: &[Vec<u8>]) -> Result<()> {
    let link = RawLink::open(lab.world.netns(), World::LINK)?;
    // All frames before it were taken when the last one has come.
    let arrived = Capture::start(lab.node.netns(), Node::UPLINK)?;
    frames.iter().try_for_each(|frame| link.send(frame))?;
    let last = arrived.wait_for(PATIENCE, |bytes| bytes.ends_with(b"forged"));
    ensure!(last.is_some(), "it did not arrive");
    Ok(())
}

/// Fails unless who has this address and port has TCP and UDP with the host port.
fn is_served(netns: &Netns, own: SocketAddr) -> Result<(tcp::Client, udp::Client)> {
    let at = node_at(Family::of(own.ip()), HOST);
    let mut stream = tcp::Client::connect_between(netns, own, at)?;
    stream.chat(3)?;
    let mut datagrams = udp::Client::open_bound(netns, own)?;
    datagrams.chat(at, 3)?;
    Ok((stream, datagrams))
}

#[rstest]
fn the_world_cuts_no_pod_off(
    #[values(V4, V6)] family: Family,
    #[values("before", "after")] created: &str,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    scene.lab.firewall.tolerate_invalid();
    let known = (created == "before").then(|| scene.lab.pod("client"));
    let ip = match &known {
        Some(Ok(pod)) => pod.ip(family),
        // The next one that a pod gets.
        _ => following(scene.server.ip(family)),
    };
    let own = SocketAddr::new(ip, PORT);
    forge(&scene.lab, own)?;
    let client = known.unwrap_or_else(|| scene.lab.pod("client"))?;
    ensure!(client.ip(family) == ip, "{}", client.result());
    let (mut stream, mut datagrams) = is_served(client.netns(), own)?;
    // Nor has it a say in the flows.
    let before = states(&scene.lab, family)?;
    let arrived = Capture::start(scene.server.netns(), Pod::IFNAME)?;
    let ends = scene.lab.ends_from_world(ip, family.node())?;
    send(
        &scene.lab,
        &[ends.rst(PORT, HOST), ends.udp(PORT, HOST, b"forged")],
    )?;
    let seen = arrived.wait_for(SILENCE / 4, |bytes| bytes.ends_with(b"forged"));
    let after = states(&scene.lab, family)?;
    ensure!(after == before, "{before:x?} became {after:x?}");
    ensure!(seen.is_none(), "it reached the container");
    forge(&scene.lab, own)?;
    stream.chat(3)?;
    datagrams.chat(node_at(family, HOST), 3)?;
    Ok(())
}

/// Of each flow to a host port, whether it has the bypass, and whether it was reset.
fn states(lab: &Lab, family: Family) -> Result<Vec<u32>> {
    let mut states = Vec::new();
    flow_table::walk(&lab.node, family, |entry| {
        if entry.state & state::PORT != 0 {
            states.push(entry.state & (state::BYPASS | state::RST));
        }
        Then::Stays
    })?;
    states.sort_unstable();
    Ok(states)
}

/// Two flows in its name would look the same to the container, so both ends of the younger one were translated.
#[rstest]
fn the_world_cuts_nobody_off_by_two_ports(
    #[values(V4, V6)] family: Family,
    #[values("pod", "node")] whose: &str,
) -> Result<()> {
    const OTHER: u16 = HOST + 1;
    needs_root!();
    let lab = Lab::new()?;
    let mut mappings = Vec::new();
    for port in [HOST, OTHER] {
        for protocol in ["tcp", "udp"] {
            mappings
                .push(json!({ "hostPort": port, "containerPort": INSIDE, "protocol": protocol }));
        }
    }
    let conf = mapped(&lab, &mappings);
    let scene = Scene::in_network(family, lab, &conf)?;
    scene.lab.firewall.tolerate_invalid();
    let ip = match whose {
        "node" => family.node(),
        _ => following(scene.server.ip(family)),
    };
    let own = SocketAddr::new(ip, PORT);
    for port in [OTHER, HOST] {
        forge_to(&scene.lab, own, port)?;
    }
    if whose == "node" {
        is_served(scene.lab.node.netns(), own)?;
    } else {
        let client = scene.lab.pod("client")?;
        ensure!(client.ip(family) == ip, "{}", client.result());
        is_served(client.netns(), own)?;
    }
    Ok(())
}

fn following(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(ip) => Ipv4Addr::from_bits(ip.to_bits() + 1).into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() + 1).into(),
    }
}

#[rstest]
fn the_world_cuts_no_process_of_the_node_off(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    scene.lab.firewall.tolerate_invalid();
    let own = SocketAddr::new(family.node(), PORT);
    forge(&scene.lab, own)?;
    let host = scene.lab.node.netns();
    let (mut stream, mut datagrams) = is_served(host, own)?;
    forge(&scene.lab, own)?;
    stream.chat(3)?;
    datagrams.chat(node_at(family, HOST), 3)?;
    // Other clients are served as ever.
    reaches(
        scene.lab.world.netns(),
        node_at(family, HOST),
        family.gateway(),
    )
}

/// A pod that may forge has no say in the flow of who has the address.
#[rstest]
fn a_forging_pod_cuts_no_client_of_the_world_off(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    scene.lab.firewall.tolerate_invalid();
    let conf = scene.lab.conf().with("antiSpoof", false);
    let forger = scene.lab.pod_with("forger", &conf)?;
    let own = SocketAddr::new(family.gateway(), PORT);
    let (mut stream, mut datagrams) = is_served(scene.lab.world.netns(), own)?;
    let link = RawLink::open(forger.netns(), Pod::IFNAME)?;
    let ends = forger.ends(family.node())?.from_ip(own.ip());
    for frame in [ends.syn(PORT, HOST), ends.udp(PORT, HOST, b"forged")] {
        link.send(&frame)?;
    }
    stream.chat(3)?;
    datagrams.chat(node_at(family, HOST), 3)?;
    Ok(())
}

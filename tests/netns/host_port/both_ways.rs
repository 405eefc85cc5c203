//! One port of a client, from which it talks to node:hostPort and to container:containerPort.

use std::{net::SocketAddr, thread};

use anyhow::anyhow;
use rstest::rstest;
use underpass_abi::flow::state;
use underpass_tests::{
    flow_table::{self, Then},
    netns::Netns,
    prelude::*,
    traffic::SILENCE,
};

use super::{HOST, INSIDE, SOURCE, Scene, both, mapped, node_at, serve};

/// Ticks that no timeout has.
const LONG_AGO: u32 = 1 << 30;

/// A container with host ports, and another one; the world has a way to both.
fn with_client(family: Family) -> Result<(Scene, Pod)> {
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let conf = mapped(&lab, &both());
    let scene = Scene::in_network(family, lab, &conf)?;
    let pod = scene.lab.pod("client")?;
    Ok((scene, pod))
}

/// The client's network namespace.
fn netns_of<'a>(scene: &'a Scene, pod: &'a Pod, from: &str) -> &'a Netns {
    match from {
        "world" => scene.lab.world.netns(),
        _ => pod.netns(),
    }
}

#[rstest]
fn each_answer_comes_from_whom_was_asked(
    #[values(V4, V6)] family: Family,
    #[values("world", "pod")] from: &str,
    #[values("learned", "off")] bypass: &str,
    #[values("direct", "port")] first: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let conf = mapped(&lab, &both()).with("bypass", bypass);
    let scene = Scene::in_network(family, lab, &conf)?;
    let lab = &scene.lab;
    let pod = lab.pod_with("client", &lab.conf().with("bypass", bypass))?;
    let (client, ip) = match from {
        "world" => (lab.world.netns(), family.gateway()),
        _ => (pod.netns(), pod.ip(family)),
    };
    let mut ways = [scene.server.at(family, INSIDE), node_at(family, HOST)];
    if first == "port" {
        ways.reverse();
    }

    let mut socket = udp::Client::open_at(client, family, SOURCE)?;
    for round in 0..3 {
        for to in ways {
            let seen = socket.chat(to, 3).context(format!("round {round}"))?.seen;
            ensure!(seen.ip() == ip, "the container saw {seen}");
        }
    }
    if from == "pod" && bypass == "off" {
        // Nobody remembers a flow between containers that the stack carries, so a connection to a host
        // port can't step aside for it.
        ways = [node_at(family, HOST), scene.server.at(family, INSIDE)];
    }
    let mut streams = Vec::new();
    for to in ways {
        streams.push(tcp::Client::connect_from(client, SOURCE, to)?);
    }
    for _ in 0..3 {
        for stream in &mut streams {
            let seen = stream.chat(3)?;
            ensure!(seen.ip() == ip, "the container saw {seen}");
            stream.exchange(500_000, 500_000)?;
        }
    }
    Ok(())
}

/// Both flows are in one entry of the container's: when they have expired, none of it is left for the one that begins anew.
#[rstest]
fn each_answer_comes_from_whom_was_asked_after_a_while(
    #[values(V4, V6)] family: Family,
    #[values("world", "pod")] from: &str,
    #[values("direct", "port")] again: &str,
) -> Result<()> {
    needs_root!();
    let (scene, pod) = with_client(family)?;
    let (lab, client) = (&scene.lab, netns_of(&scene, &pod, from));
    let [direct, port] = [scene.server.at(family, INSIDE), node_at(family, HOST)];
    let mut socket = udp::Client::open_at(client, family, SOURCE)?;
    for to in [port, direct, port, direct] {
        socket.chat(to, 3)?;
    }
    flow_table::walk(&lab.node, family, |entry| {
        Then::ExpiresAt(entry.expires.wrapping_sub(LONG_AGO))
    })?;
    let ways = match again {
        "direct" => [direct, port],
        _ => [port, direct],
    };
    for to in ways.repeat(2) {
        socket.chat(to, 3).context(format!("again, to {to}"))?;
    }
    Ok(())
}

/// The direct flow has expired and the other one lives: it is in the way again, from the first packet on.
#[rstest]
fn a_direct_flow_that_expired_steps_aside_again(
    #[values(V4, V6)] family: Family,
    #[values("world", "pod")] from: &str,
) -> Result<()> {
    /// The entry under what the client asks for.
    const ASKED: u32 = state::OUTER | state::PORT;
    needs_root!();
    let (scene, pod) = with_client(family)?;
    let (lab, client) = (&scene.lab, netns_of(&scene, &pod, from));
    let [direct, port] = [scene.server.at(family, INSIDE), node_at(family, HOST)];
    let mut socket = udp::Client::open_at(client, family, SOURCE)?;
    for to in [port, direct] {
        socket.chat(to, 3)?;
    }
    for _ in 0..2 {
        flow_table::walk(&lab.node, family, |entry| match entry.state & ASKED {
            ASKED => Then::Stays,
            _ => Then::ExpiresAt(entry.expires.wrapping_sub(LONG_AGO)),
        })?;
        for to in [direct, port, direct] {
            socket.chat(to, 3).context(format!("again, to {to}"))?;
        }
    }
    Ok(())
}

/// What the client does with its direct connection says nothing of the one to the port, which is in the same entry.
#[rstest]
fn a_direct_connection_that_is_reset_suspends_no_other(
    #[values(V4, V6)] family: Family,
    #[values("world", "pod")] from: &str,
) -> Result<()> {
    needs_root!();
    let (scene, pod) = with_client(family)?;
    let (lab, client) = (&scene.lab, netns_of(&scene, &pod, from));
    let direct = scene.server.at(family, INSIDE);
    let mut mapped = tcp::Client::connect_from(client, SOURCE, node_at(family, HOST))?;
    mapped.chat(5)?;
    let of_port = || -> Result<Vec<u32>> {
        let mut states = Vec::new();
        flow_table::walk(&lab.node, family, |entry| {
            if entry.state & state::PORT != 0 {
                states.push(entry.state & (state::BYPASS | state::ASSURED));
            }
            Then::Stays
        })?;
        Ok(states)
    };
    let before = of_port()?;
    ensure!(before == [state::BYPASS | state::ASSURED; 2], "{before:x?}");
    for _ in 0..3 {
        let mut aside = tcp::Client::connect_from(client, SOURCE, direct)?;
        aside.chat(3)?;
        aside.reset()?;
        thread::sleep(SILENCE / 8);
        let after = of_port()?;
        ensure!(after == before, "{after:x?}");
        mapped.chat(3)?;
    }
    Ok(())
}

/// A client that has closed its socket refuses what still comes; the container is to hear of that.
#[rstest]
fn a_refusal_reaches_the_container(
    #[values(V4, V6)] family: Family,
    #[values("world", "pod")] from: &str,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let network = lab.conf().with("bypass", bypass);
    let server = lab.pod_with("server", &mapped(&lab, &both()).with("bypass", bypass))?;
    let pod = lab.pod_with("client", &network)?;
    let (client, ip) = match from {
        "world" => (lab.world.netns(), family.gateway()),
        _ => (pod.netns(), pod.ip(family)),
    };
    {
        let _servers = serve(&server, family)?;
        udp::Client::open_at(client, family, SOURCE)?.chat(node_at(family, HOST), 5)?;
    }
    udp::Client::open_at(server.netns(), family, INSIDE)?.is_refused(SocketAddr::new(ip, SOURCE))
}

#[rstest]
fn one_socket_asks_two_addresses_of_the_node(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = mapped(&lab, &both()).with("bypass", bypass);
    let scene = Scene::in_network(family, lab, &conf)?;
    let lab = &scene.lab;
    let pod = lab.pod_with("client", &lab.conf().with("bypass", bypass))?;
    let ways = [family.node(), family.pod_gateway()].map(|ip| SocketAddr::new(ip, HOST));
    let mut socket = udp::Client::open_at(pod.netns(), family, SOURCE)?;
    for _ in 0..3 {
        for to in ways {
            let seen = socket.chat(to, 3)?.seen;
            ensure!(seen.ip() == pod.ip(family), "the container saw {seen}");
        }
    }
    let [mut one, mut other] = ways.map(|to| tcp::Client::connect_from(pod.netns(), SOURCE, to));
    for _ in 0..3 {
        for stream in [&mut one, &mut other] {
            let stream = stream.as_mut().map_err(|error| anyhow!("{error:#}"))?;
            let seen = stream.chat(3)?;
            ensure!(seen.ip() == pod.ip(family), "the container saw {seen}");
        }
    }
    Ok(())
}

/// The refusal comes from a container that the client does not know.
#[rstest]
fn a_closed_port_of_another_container_refuses(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _mapped = lab.pod_with("mapped", &mapped(&lab, &both()))?;
    let client = lab.pod("client")?;
    for (from, ip) in [
        (lab.world.netns(), family.node()),
        (client.netns(), family.node()),
        (client.netns(), family.pod_gateway()),
    ] {
        let at = SocketAddr::new(ip, HOST);
        tcp::is_refused(from, at)?;
        udp::Client::open(from, family)?.is_refused(at)?;
    }
    Ok(())
}

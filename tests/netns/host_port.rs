//! Host ports: the world, and other containers of the node, reach a container at a port of the node's address.

mod both_ways;
mod conflict;
mod forged;
mod hairpin;
mod led_on;
mod lifecycle;
mod local;
mod loopback;
mod many;
mod one_way;
mod quota;
mod refusals;
mod scope;

use std::net::SocketAddr;

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{netns::Netns, prelude::*, runtime::Conf, traffic};

/// The port of the node.
const HOST: u16 = 8080;
/// The port of the container.
const INSIDE: u16 = 80;
const SOURCE: u16 = 45_678;

/// The default network with these port mappings.
fn mapped(lab: &Lab, mappings: &[Value]) -> Conf {
    lab.conf()
        .with("runtimeConfig", json!({ "portMappings": mappings }))
}

/// [`HOST`] to [`INSIDE`] by TCP and UDP, at every address of the node.
fn both() -> [Value; 2] {
    ["tcp", "udp"]
        .map(|protocol| json!({ "hostPort": HOST, "containerPort": INSIDE, "protocol": protocol }))
}

/// A container with [`both`], and servers in it.
struct Scene {
    _servers: (tcp::Server, udp::Server),
    server: Pod,
    lab: Lab,
}

impl Scene {
    fn set(family: Family) -> Result<Self> {
        Self::with_mtu(family, 1500)
    }

    fn with_mtu(family: Family, mtu: u32) -> Result<Self> {
        let lab = Lab::with_mtu(mtu)?;
        let conf = mapped(&lab, &both());
        Self::in_network(family, lab, &conf)
    }

    fn in_network(family: Family, lab: Lab, conf: &Conf) -> Result<Self> {
        let server = lab.pod_with("server", conf)?;
        let servers = serve(&server, family)?;
        Ok(Self {
            _servers: servers,
            server,
            lab,
        })
    }
}

fn serve(pod: &Pod, family: Family) -> Result<(tcp::Server, udp::Server)> {
    traffic::serve(pod.netns(), family.port(INSIDE))
}

fn node_at(family: Family, port: u16) -> SocketAddr {
    SocketAddr::new(family.node(), port)
}

/// Fails unless a client reaches the server at `to` by TCP and UDP, and the server sees the client as `expected`.
fn reaches(client: &Netns, to: SocketAddr, expected: std::net::IpAddr) -> Result<()> {
    let seen = tcp::visit(client, to)?;
    ensure!(seen == expected, "by TCP the server saw {seen}");
    // An answer from another address or port than was asked fails.
    let seen = udp::Client::open(client, Family::of(to.ip()))?.chat(to, 3)?;
    ensure!(seen.seen.ip() == expected, "by UDP the server saw {seen:?}");
    Ok(())
}

/// Fails if a client reaches anything at `to` by TCP or UDP.
fn misses(client: &Netns, to: SocketAddr) -> Result<()> {
    tcp::refuses(client, to)?;
    udp::Client::open(client, Family::of(to.ip()))?.hears_nothing(to)
}

#[rstest]
fn a_pod_reaches_another_by_the_nodes_address(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let client = scene.lab.pod("client")?;
    let asked = node_at(family, HOST);
    let seen = tcp::Client::connect(client.netns(), asked)?
        .exchange(5_000_000, 5_000_000)?
        .seen;
    ensure!(seen.ip() == client.ip(family), "the container saw {seen}");
    reaches(client.netns(), asked, client.ip(family))?;
    // At its own address, at its own port, it is reached as ever.
    let direct = scene.server.at(family, INSIDE);
    reaches(client.netns(), direct, client.ip(family))?;
    reaches(client.netns(), asked, client.ip(family))
}

#[rstest]
fn masquerade_leaves_host_ports_alone(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set(family)?;
    let client = scene.lab.pod("client")?;
    let remote = family.remote_at(443);
    let _tcp = tcp::Server::start(scene.lab.world.netns(), remote)?;
    let _udp = udp::Server::start(scene.lab.world.netns(), remote)?;
    let meter = Meter::start(&scene.lab.node)?;
    let by_tcp = tcp::Client::connect_from(client.netns(), HOST, remote)?.chat(3)?;
    let by_udp = udp::Client::open_at(client.netns(), family, HOST)?
        .chat(remote, 3)?
        .seen;
    for seen in [by_tcp, by_udp] {
        ensure!(seen.ip() == family.node(), "the world saw {seen}");
        ensure!(seen.port() != HOST, "the world saw {seen}");
    }
    meter.expect(Counter::PortChanged, 2)
}

#[rstest]
fn a_hundred_ports_of_one_container(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let ports: Vec<Value> = (0..100)
        .map(|at| json!({ "hostPort": 20_000 + at, "containerPort": 30_000 + at }))
        .collect();
    let pod = lab.pod_with("a", &mapped(&lab, &ports))?;
    for at in [0, 1, 57, 99] {
        let _server = tcp::Server::start(pod.netns(), family.port(30_000 + at))?;
        let seen = tcp::visit(lab.world.netns(), node_at(family, 20_000 + at))?;
        ensure!(seen == family.gateway(), "port {at}: {seen}");
    }
    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    pod.del()?;
    for at in [0, 57, 99] {
        tcp::refuses(lab.world.netns(), node_at(family, 20_000 + at))?;
    }
    Ok(())
}

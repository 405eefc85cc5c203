//! Processes of the node itself and pods.

use std::net::SocketAddr;

use rstest::rstest;
use underpass_tests::prelude::*;

const PORT: u16 = 8080;

#[rstest]
fn the_host_reaches_a_pod(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let server = pod.at(family, PORT);
    let _tcp = tcp::Server::start(pod.netns(), family.port(PORT))?;
    let _udp = udp::Server::start(pod.netns(), family.port(PORT))?;
    let host = lab.node.netns();
    tcp::Client::connect(host, server)?.exchange(5_000_000, 5_000_000)?;
    udp::Client::open(host, family)?.chat(server, 10)?;
    ping::ping(host, pod.ip(family))
}

#[rstest]
fn a_pod_reaches_the_host(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let server = SocketAddr::new(family.node(), PORT);
    let _tcp = tcp::Server::start(lab.node.netns(), server)?;
    let _udp = udp::Server::start(lab.node.netns(), server)?;
    let mut client = tcp::Client::connect(pod.netns(), server)?;
    let seen = client.exchange(5_000_000, 5_000_000)?.seen;
    ensure!(seen.ip() == pod.ip(family), "the host saw {seen}");
    let seen = udp::Client::open(pod.netns(), family)?
        .chat(server, 10)?
        .seen;
    ensure!(seen.ip() == pod.ip(family), "the host saw {seen}");
    ping::ping(pod.netns(), family.node())
}

#[rstest]
fn a_pod_reaches_itself(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let _tcp = tcp::Server::start(pod.netns(), family.port(PORT))?;
    let seen = tcp::visit(pod.netns(), pod.at(family, PORT))?;
    ensure!(seen == pod.ip(family), "it saw {seen}");
    ping::ping(pod.netns(), pod.ip(family))
}

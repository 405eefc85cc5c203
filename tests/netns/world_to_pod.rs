//! The world reaches pods at their own addresses, where it has routes to them.

use std::time::Instant;

use anyhow::{Result, ensure};
use rstest::rstest;
use underpass_abi::counter::Counter;
use underpass_tests::{
    Family::{self, V4, V6},
    Lab,
    counter::Meter,
    needs_root,
    traffic::{ping, tcp, udp},
};

const PORT: u16 = 8080;

#[rstest]
fn a_client_in_the_world_reaches_a_pod(
    #[values(V4, V6)] family: Family,
    #[values(1500, 9000)] mtu: u32,
) -> Result<()> {
    needs_root!();
    let lab = Lab::with_mtu(mtu)?;
    lab.world.route_pods()?;
    let pod = lab.pod("a")?;
    let server = pod.at(family, PORT);
    let _tcp = tcp::Server::start(pod.netns(), family.port(PORT))?;
    let _udp = udp::Server::start(pod.netns(), family.port(PORT))?;
    let mut client = tcp::Client::connect(lab.world.netns(), server)?;
    let seen = client.exchange(5_000_000, 5_000_000)?.seen;
    ensure!(seen.ip() == family.gateway(), "the pod saw {seen}");
    // An answer from another address or port than was asked fails.
    let seen = udp::Client::open(lab.world.netns(), family)?
        .chat(server, 10)?
        .seen;
    ensure!(seen.ip() == family.gateway(), "the pod saw {seen}");
    ping::ping(lab.world.netns(), pod.ip(family))
}

#[rstest]
fn such_a_flow_takes_the_bypass(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let pod = lab.pod("a")?;
    let server = pod.at(family, PORT);
    let _tcp = tcp::Server::start(pod.netns(), family.port(PORT))?;
    let _udp = udp::Server::start(pod.netns(), family.port(PORT))?;
    let firewall = &lab.firewall;
    for transport in ["tcp", "udp"] {
        firewall.count_forwarded(transport, &format!("{transport} dport {PORT}"))?;
        firewall.count_forwarded(transport, &format!("{transport} sport {PORT}"))?;
    }
    let meter = Meter::start(&lab.node)?;
    let start = Instant::now();
    tcp::Client::connect(lab.world.netns(), server)?.chat(50)?;
    udp::Client::open(lab.world.netns(), family)?.chat(server, 50)?;
    firewall.expect_opening("tcp")?;
    firewall.expect_fed("udp", start)?;
    meter.expect(Counter::BypassPeer, 96)?;
    meter.expect(Counter::BypassWire, 96)?;
    meter.expect_none(Counter::Masqueraded)
}

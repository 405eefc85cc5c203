//! The node's firewall has the last word on every flow.

use anyhow::Result;
use rstest::rstest;
use underpass_tests::{
    Family::{self, V4, V6},
    Lab,
    counter::Meter,
    needs_root,
    traffic::{ping, tcp, udp},
};

const FORBIDDEN: u16 = 8081;
const ALLOWED: u16 = 8080;

#[rstest]
fn a_drop_rule_is_honoured_between_pods(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let mut servers = Vec::new();
    let mut listeners = Vec::new();
    for port in [FORBIDDEN, ALLOWED] {
        listeners.push(tcp::Server::start(b.netns(), family.port(port))?);
        servers.push(udp::Server::start(b.netns(), family.port(port))?);
    }
    let firewall = &lab.firewall;
    firewall.drop_forwarded(&format!("th dport {FORBIDDEN}"))?;
    firewall.drop_forwarded("icmp type echo-request")?;
    firewall.drop_forwarded("icmpv6 type echo-request")?;
    let meter = Meter::start(&lab.node)?;
    for _ in 0..2 {
        tcp::refuses(a.netns(), b.at(family, FORBIDDEN))?;
        udp::Client::open(a.netns(), family)?.hears_nothing(b.at(family, FORBIDDEN))?;
    }
    let mut ping = ping::Ping::new(a.netns(), b.ip(family))?;
    ping.hears_nothing()?;
    ping.hears_nothing()?;
    meter.expect_no_bypass()?;
    tcp::visit(a.netns(), b.at(family, ALLOWED))?;
    udp::Client::open(a.netns(), family)?.chat(b.at(family, ALLOWED), 5)?;
    Ok(())
}

#[rstest]
fn a_drop_rule_is_honoured_towards_the_world(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let server = family.remote_at(FORBIDDEN);
    let _tcp = tcp::Server::start(lab.world.netns(), server)?;
    let _udp = udp::Server::start(lab.world.netns(), server)?;
    let firewall = &lab.firewall;
    firewall.drop_forwarded(&format!("th dport {FORBIDDEN}"))?;
    let meter = Meter::start(&lab.node)?;
    for _ in 0..2 {
        tcp::refuses(pod.netns(), server)?;
        udp::Client::open(pod.netns(), family)?.hears_nothing(server)?;
    }
    meter.expect_no_bypass()
}

#[rstest]
fn a_drop_rule_is_honoured_from_the_world(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let pod = lab.pod("a")?;
    let _tcp = tcp::Server::start(pod.netns(), family.port(FORBIDDEN))?;
    let _udp = udp::Server::start(pod.netns(), family.port(FORBIDDEN))?;
    lab.firewall
        .drop_forwarded(&format!("th dport {FORBIDDEN}"))?;
    let meter = Meter::start(&lab.node)?;
    let server = pod.at(family, FORBIDDEN);
    for _ in 0..2 {
        tcp::refuses(lab.world.netns(), server)?;
        udp::Client::open(lab.world.netns(), family)?.hears_nothing(server)?;
    }
    meter.expect_no_bypass()
}

//! `"bypass": "off"`: translation only, the stack forwards everything.

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
fn pods_talk_by_the_stack(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("bypass", "off");
    let (a, b) = (lab.pod_with("a", &conf)?, lab.pod_with("b", &conf)?);
    let _tcp = tcp::Server::start(b.netns(), family.port(PORT))?;
    let _udp = udp::Server::start(b.netns(), family.port(PORT))?;
    let firewall = &lab.firewall;
    firewall.count_forwarded("tcp", &format!("tcp dport {PORT}"))?;
    firewall.count_forwarded("udp", &format!("udp dport {PORT}"))?;
    let meter = Meter::start(&lab.node)?;
    let mut client = tcp::Client::connect(a.netns(), b.at(family, PORT))?;
    client.chat(20)?;
    client.exchange(2_000_000, 2_000_000)?;
    udp::Client::open(a.netns(), family)?.chat(b.at(family, PORT), 20)?;
    ping::ping(a.netns(), b.ip(family))?;
    firewall.expect_many("tcp", 20)?;
    firewall.expect_many("udp", 20)?;
    meter.expect_no_bypass()?;
    meter.expect_none(Counter::Learned)
}

#[rstest]
fn the_world_is_masqueraded_by_the_stack(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &lab.conf().with("bypass", "off"))?;
    let server = family.remote_at(PORT);
    let _tcp = tcp::Server::start(lab.world.netns(), server)?;
    let _udp = udp::Server::start(lab.world.netns(), server)?;
    let firewall = &lab.firewall;
    firewall.count_forwarded("tcp", &format!("tcp dport {PORT}"))?;
    let meter = Meter::start(&lab.node)?;
    let mut client = tcp::Client::connect(pod.netns(), server)?;
    let seen = client.chat(20)?;
    ensure!(seen.ip() == family.node(), "the world saw {seen}");
    client.exchange(2_000_000, 2_000_000)?;
    udp::Client::open(pod.netns(), family)?.chat(server, 20)?;
    ping::ping(pod.netns(), family.remote())?;
    firewall.expect_many("tcp", 20)?;
    meter.expect_no_bypass()
}

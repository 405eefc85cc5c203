//! `"bypass": "eager"`: under the stack from the first packet on.

use anyhow::{Result, ensure};
use rstest::rstest;
use underpass_abi::counter::Counter;
use underpass_tests::{
    Family::{self, V4, V6},
    Lab,
    counter::Meter,
    needs_root,
    netfilter::Netfilter,
    traffic::{ping, tcp, udp},
};

const PORT: u16 = 8080;

#[rstest]
fn pods_never_meet_the_stack(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("bypass", "eager");
    let (a, b) = (lab.pod_with("a", &conf)?, lab.pod_with("b", &conf)?);
    let _tcp = tcp::Server::start(b.netns(), family.port(PORT))?;
    let _udp = udp::Server::start(b.netns(), family.port(PORT))?;
    let firewall = Netfilter::new(&lab.node)?;
    firewall.count_forwarded("flows", &format!("th dport {PORT}"))?;
    firewall.count_forwarded("answers", &format!("th sport {PORT}"))?;
    let meter = Meter::start(&lab.node)?;
    let mut client = tcp::Client::connect(a.netns(), b.at(family, PORT))?;
    client.chat(20)?;
    client.exchange(5_000_000, 5_000_000)?;
    udp::Client::open(a.netns(), family)?.chat(b.at(family, PORT), 20)?;
    ping::ping(a.netns(), b.ip(family))?;
    for name in ["flows", "answers"] {
        let seen = firewall.counted(name)?;
        ensure!(seen == 0, "the firewall saw {seen} packets of {name}");
    }
    meter.expect(Counter::BypassPeer, 100)
}

#[rstest]
fn the_world_is_reached_and_masqueraded(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &lab.conf().with("bypass", "eager"))?;
    let server = family.remote_at(PORT);
    let _tcp = tcp::Server::start(lab.world.netns(), server)?;
    let _udp = udp::Server::start(lab.world.netns(), server)?;
    // Whom a neighbour is known of, the stack is not needed for.
    ping::ping(lab.node.netns(), family.gateway())?;
    let firewall = Netfilter::new(&lab.node)?;
    firewall.count_forwarded("flows", &format!("th dport {PORT}"))?;
    let meter = Meter::start(&lab.node)?;
    let mut client = tcp::Client::connect(pod.netns(), server)?;
    let seen = client.chat(20)?;
    ensure!(seen.ip() == family.node(), "the world saw {seen}");
    client.exchange(5_000_000, 5_000_000)?;
    udp::Client::open(pod.netns(), family)?.chat(server, 20)?;
    ping::ping(pod.netns(), family.remote())?;
    let seen = firewall.counted("flows")?;
    ensure!(seen <= 2, "the firewall saw {seen} packets of two flows");
    meter.expect(Counter::BypassWire, 50)
}

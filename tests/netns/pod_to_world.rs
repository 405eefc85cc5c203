//! A pod and a server in the world: masqueraded, and under the stack from the second packet on.

use std::time::Instant;

use anyhow::{Result, ensure};
use rstest::rstest;
use underpass_abi::counter::Counter;
use underpass_tests::{
    Family::{self, V4, V6},
    Lab,
    counter::Meter,
    needs_root,
    rtnl::Route,
    traffic::{ping, tcp, udp},
};

const PORT: u16 = 443;

#[rstest]
fn tcp_carries_whatever_is_sent(
    #[values(V4, V6)] family: Family,
    #[values(1500, 9000)] mtu: u32,
) -> Result<()> {
    needs_root!();
    let lab = Lab::with_mtu(mtu)?;
    let pod = lab.pod("a")?;
    let server = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), server)?;
    let mut client = tcp::Client::connect(pod.netns(), server)?;
    for len in [1, 1_448, 8_948, 65_536, 12_000_000] {
        let seen = client.exchange(len, len)?.seen;
        ensure!(seen.ip() == family.node(), "the world saw {seen}");
    }
    Ok(())
}

#[rstest]
fn udp_carries_whole_packets_of_every_size(
    #[values(V4, V6)] family: Family,
    #[values(1500, 9000)] mtu: u32,
) -> Result<()> {
    needs_root!();
    let lab = Lab::with_mtu(mtu)?;
    let pod = lab.pod("a")?;
    let server = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), server)?;
    let mut unconnected = udp::Client::open(pod.netns(), family)?;
    let mut connected = udp::Client::open(pod.netns(), family)?;
    connected.connect(server)?;
    // The answer is longer than the request by the asker's address.
    let whole = mtu as usize - family.header_len() - 8;
    for len in [0, 1, 1000, whole - 60] {
        for client in [&mut unconnected, &mut connected] {
            let seen = client.ask(server, len)?.seen;
            ensure!(seen.ip() == family.node(), "the world saw {seen}");
        }
    }
    Ok(())
}

#[rstest]
fn ping_is_answered(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    ping::ping(pod.netns(), family.remote())?;
    ping::ping(pod.netns(), family.gateway())
}

#[rstest]
fn tcp_takes_the_bypass_after_its_first_packets(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let server = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), server)?;
    let firewall = &lab.firewall;
    firewall.count_forwarded("flow", &format!("tcp dport {PORT}"))?;
    firewall.count_forwarded("flow", &format!("tcp sport {PORT}"))?;
    let meter = Meter::start(&lab.node)?;
    let mut client = tcp::Client::connect(pod.netns(), server)?;
    client.chat(50)?;
    client.exchange(5_000_000, 5_000_000)?;
    firewall.expect_opening("flow")?;
    meter.expect(Counter::BypassWire, 75)?;
    meter.expect(Counter::BypassPeer, 75)?;
    meter.expect(Counter::Masqueraded, 1)
}

#[rstest]
fn udp_takes_the_bypass_after_its_first_packets(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let server = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), server)?;
    let firewall = &lab.firewall;
    firewall.count_forwarded("flow", &format!("udp dport {PORT}"))?;
    firewall.count_forwarded("flow", &format!("udp sport {PORT}"))?;
    let meter = Meter::start(&lab.node)?;
    let start = Instant::now();
    udp::Client::open(pod.netns(), family)?.chat(server, 100)?;
    firewall.expect_fed("flow", start)?;
    meter.expect(Counter::BypassWire, 96)?;
    meter.expect(Counter::BypassPeer, 96)
}

#[rstest]
fn ping_takes_the_bypass_after_its_first_packets(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let firewall = &lab.firewall;
    firewall.count_forwarded("echo", "meta l4proto { icmp, icmpv6 }")?;
    let meter = Meter::start(&lab.node)?;
    let start = Instant::now();
    ping::Ping::new(pod.netns(), family.remote())?.series(50)?;
    firewall.expect_fed("echo", start)?;
    meter.expect(Counter::BypassWire, 46)?;
    meter.expect(Counter::BypassPeer, 46)
}

#[rstest]
fn a_learned_flow_follows_a_change_of_route(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let server = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), server)?;
    let mut client = udp::Client::open(pod.netns(), family)?;
    client.chat(server, 5)?;
    let to = format!("{}/{}", family.remote(), family.host_bits());
    let nowhere = Route::to(&to).blackhole();
    lab.node.netns().rtnl(|node| node.add_route(nowhere))?;
    // A flow is checked again about once a second.
    std::thread::sleep(std::time::Duration::from_millis(2500));
    client.hears_nothing(server)
}

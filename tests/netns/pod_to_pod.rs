//! Two pods of one node: the first packet of each goes by the stack, the rest under it.

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
fn tcp_carries_whatever_is_sent(
    #[values(V4, V6)] family: Family,
    #[values(1500, 9000)] mtu: u32,
) -> Result<()> {
    needs_root!();
    let lab = Lab::with_mtu(mtu)?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let _server = tcp::Server::start(b.netns(), family.port(PORT))?;
    let mut client = tcp::Client::connect(a.netns(), b.at(family, PORT))?;
    for len in [1, 1_448, 8_948, 65_536, 12_000_000] {
        let seen = client.exchange(len, len)?.seen;
        ensure!(
            seen == client_of(a.ip(family), &client)?,
            "the server saw {seen}"
        );
    }
    Ok(())
}

#[rstest]
fn udp_carries_every_size(
    #[values(V4, V6)] family: Family,
    #[values(1500, 9000)] mtu: u32,
) -> Result<()> {
    needs_root!();
    let lab = Lab::with_mtu(mtu)?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let _server = udp::Server::start(b.netns(), family.port(PORT))?;
    let server = b.at(family, PORT);
    let mut unconnected = udp::Client::open(a.netns(), family)?;
    let mut connected = udp::Client::open(a.netns(), family)?;
    connected.connect(server)?;
    // Whole packets, then fragments; the answer is longer than the request by the asker's address.
    let whole = mtu as usize - family.header_len() - 8;
    for len in [0, 1, 1000, whole - 60, whole, whole + 1, 30_000] {
        for client in [&mut unconnected, &mut connected] {
            let seen = client.ask(server, len)?.seen;
            ensure!(seen.ip() == a.ip(family), "the server saw {seen}");
        }
    }
    Ok(())
}

#[rstest]
fn ping_is_answered(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    ping::ping(a.netns(), b.ip(family))?;
    ping::ping(b.netns(), a.ip(family))?;
    ping::Ping::new(a.netns(), b.ip(family))?.echo(4000)?;
    Ok(())
}

#[rstest]
fn pods_get_the_mtu_of_the_uplink(#[values(1400, 9000)] mtu: u32) -> Result<()> {
    needs_root!();
    let lab = Lab::with_mtu(mtu)?;
    let pod = lab.pod("a")?;
    for interface in [0, 1] {
        let told = &pod.result()["interfaces"][interface]["mtu"];
        ensure!(*told == mtu, "the result says {told}");
    }
    let link = pod.netns().ip_json(&["link", "show", "dev", "eth0"])?;
    ensure!(link[0]["mtu"] == mtu, "{link}");
    Ok(())
}

#[rstest]
fn tcp_takes_the_bypass_after_its_first_packets(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let _server = tcp::Server::start(b.netns(), family.port(PORT))?;
    let firewall = &lab.firewall;
    firewall.count_forwarded("flow", &format!("tcp dport {PORT}"))?;
    firewall.count_forwarded("flow", &format!("tcp sport {PORT}"))?;
    let meter = Meter::start(&lab.node)?;
    let mut client = tcp::Client::connect(a.netns(), b.at(family, PORT))?;
    client.chat(50)?;
    client.exchange(5_000_000, 5_000_000)?;
    firewall.expect_opening("flow")?;
    meter.expect(Counter::BypassPeer, 150)?;
    meter.expect(Counter::Learned, 1)
}

#[rstest]
fn udp_takes_the_bypass_after_its_first_packets(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let _server = udp::Server::start(b.netns(), family.port(PORT))?;
    let firewall = &lab.firewall;
    firewall.count_forwarded("flow", &format!("udp dport {PORT}"))?;
    firewall.count_forwarded("flow", &format!("udp sport {PORT}"))?;
    let meter = Meter::start(&lab.node)?;
    let start = Instant::now();
    udp::Client::open(a.netns(), family)?.chat(b.at(family, PORT), 100)?;
    firewall.expect_fed("flow", start)?;
    meter.expect(Counter::BypassPeer, 192)
}

#[rstest]
fn ping_takes_the_bypass_after_its_first_packets(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let firewall = &lab.firewall;
    firewall.count_forwarded("echo", "meta l4proto { icmp, icmpv6 }")?;
    let meter = Meter::start(&lab.node)?;
    let start = Instant::now();
    ping::Ping::new(a.netns(), b.ip(family))?.series(50)?;
    firewall.expect_fed("echo", start)?;
    meter.expect(Counter::BypassPeer, 92)
}

#[rstest]
fn a_flow_outlives_what_connection_tracking_knows(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let _server = tcp::Server::start(b.netns(), family.port(PORT))?;
    let mut client = tcp::Client::connect(a.netns(), b.at(family, PORT))?;
    client.exchange(500_000, 500_000)?;
    lab.firewall.outlast(family, &["tcp"])?;
    client.exchange(500_000, 500_000)?;
    Ok(())
}

#[rstest]
fn an_address_that_changes_hands_serves_its_new_owner(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    // One address is left for the second pod, the one that the first pod gave back.
    let conf = lab.conf().with_ipam(
        "ranges",
        serde_json::json!([
            [{ "subnet": "10.88.1.0/24", "rangeStart": "10.88.1.9", "rangeEnd": "10.88.1.9" }],
            [{ "subnet": "fd00:88:1::/64", "rangeStart": "fd00:88:1::9", "rangeEnd": "fd00:88:1::9" }]
        ]),
    );
    let conf = conf.with("name", "tight");
    let a = lab.pod("a")?;
    let mut client = udp::Client::open(a.netns(), family)?;
    let mut address = None;
    for name in ["first", "second"] {
        let pod = lab.pod_with(name, &conf)?;
        let _server = udp::Server::start(pod.netns(), family.port(PORT))?;
        client.chat(pod.at(family, PORT), 5)?;
        ensure!(
            address
                .replace(pod.ip(family))
                .is_none_or(|ip| ip == pod.ip(family))
        );
        pod.del()?;
    }
    Ok(())
}

fn client_of(ip: std::net::IpAddr, client: &tcp::Client) -> Result<std::net::SocketAddr> {
    Ok(std::net::SocketAddr::new(ip, client.local()?.port()))
}

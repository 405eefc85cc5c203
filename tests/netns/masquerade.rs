//! What the world sees of pods: the node's address, and their own source port wherever it is free.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::Context as _;
use rstest::rstest;
use serde_json::json;
use underpass_tests::{
    capture::Capture,
    frame,
    prelude::*,
    rtnl::Route,
    runtime::Call,
    traffic::{PATIENCE, SILENCE, raw::RawLink},
    wire::Wire,
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;

/// Where a frame with UDP over IPv4 without options has the UDP checksum.
const CHECKSUM_OF_UDP4: std::ops::Range<usize> = 40..42;

#[rstest]
fn a_free_source_port_is_kept(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let server = family.remote_at(PORT);
    let _tcp = tcp::Server::start(lab.world.netns(), server)?;
    let _udp = udp::Server::start(lab.world.netns(), server)?;
    let kept = SocketAddr::new(family.node(), SOURCE);
    let seen = tcp::Client::connect_from(pod.netns(), SOURCE, server)?.chat(3)?;
    ensure!(seen == kept, "TCP came from {seen}");
    let seen = udp::Client::open_at(pod.netns(), family, SOURCE)?
        .chat(server, 3)?
        .seen;
    ensure!(seen == kept, "UDP came from {seen}");
    Ok(())
}

#[rstest]
fn a_source_port_in_use_is_changed(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let server = family.remote_at(PORT);
    let _tcp = tcp::Server::start(lab.world.netns(), server)?;
    let _udp = udp::Server::start(lab.world.netns(), server)?;
    let meter = Meter::start(&lab.node)?;

    let mut first = tcp::Client::connect_from(a.netns(), SOURCE, server)?;
    let mut second = tcp::Client::connect_from(b.netns(), SOURCE, server)?;
    distinct(family, first.chat(3)?, second.chat(3)?)?;
    first.exchange(300_000, 300_000)?;
    second.exchange(300_000, 300_000)?;

    let mut first = udp::Client::open_at(a.netns(), family, SOURCE)?;
    let mut second = udp::Client::open_at(b.netns(), family, SOURCE)?;
    distinct(
        family,
        first.chat(server, 3)?.seen,
        second.chat(server, 3)?.seen,
    )?;
    first.chat(server, 3)?;
    meter.expect(Counter::PortChanged, 2)
}

fn distinct(family: Family, first: SocketAddr, second: SocketAddr) -> Result<()> {
    ensure!(
        first == SocketAddr::new(family.node(), SOURCE),
        "first: {first}"
    );
    ensure!(second.ip() == family.node(), "second: {second}");
    ensure!(second.port() != SOURCE, "second: {second}");
    Ok(())
}

#[rstest]
fn a_port_is_shared_by_flows_to_different_servers(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let servers = [family.remote(), family.other_remote()].map(|ip| SocketAddr::new(ip, PORT));
    let _servers = [
        udp::Server::start(lab.world.netns(), servers[0])?,
        udp::Server::start(lab.world.netns(), servers[1])?,
    ];
    for (pod, server) in [(&a, servers[0]), (&b, servers[1])] {
        let seen = udp::Client::open_at(pod.netns(), family, SOURCE)?
            .chat(server, 3)?
            .seen;
        ensure!(
            seen == SocketAddr::new(family.node(), SOURCE),
            "{server} saw {seen}"
        );
    }
    Ok(())
}

#[rstest]
fn a_connection_of_the_host_keeps_its_port(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let server = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), server)?;
    let mut host = tcp::Client::connect_from(lab.node.netns(), SOURCE, server)?;
    let mut inside = tcp::Client::connect_from(pod.netns(), SOURCE, server)?;
    distinct(family, host.chat(3)?, inside.chat(3)?)?;
    host.chat(3)?;
    Ok(())
}

#[rstest]
fn a_later_connection_of_the_host_gets_another_port(
    #[values(V4, V6)] family: Family,
    #[values(Wire::Ethernet, Wire::Bridge)] wire: Wire,
) -> Result<()> {
    needs_root!();
    if wire.is_missing()? {
        return Ok(());
    }
    let lab = Lab::over(wire, 1500)?;
    let pod = lab.pod("a")?;
    let server = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), server)?;
    let meter = Meter::start(&lab.node)?;
    let mut inside = tcp::Client::connect_from(pod.netns(), SOURCE, server)?;
    inside.chat(3)?;
    let mut host = tcp::Client::connect_from(lab.node.netns(), SOURCE, server)?;
    distinct(family, inside.chat(3)?, host.chat(3)?)?;
    inside.exchange(300_000, 300_000)?;
    host.exchange(300_000, 300_000)?;
    meter.expect(Counter::HostTupleMoved, 1)
}

#[rstest]
fn pings_of_two_pods_are_told_apart(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let mut pings = [
        ping::Ping::new(a.netns(), family.remote())?,
        ping::Ping::new(b.netns(), family.remote())?,
        ping::Ping::new(lab.node.netns(), family.remote())?,
    ];
    for _ in 0..5 {
        for ping in &mut pings {
            ping.echo(56)?;
        }
    }
    Ok(())
}

#[rstest]
fn excluded_destinations_see_the_pod(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let conf = lab.conf().with(
        "nonMasqueradeCIDRs",
        json!([
            "10.88.0.0/24",
            "fd00:88::/64",
            format!("{}/{}", family.remote(), family.host_bits())
        ]),
    );
    let pod = lab.pod_with("a", &conf)?;
    for (ip, expected) in [
        (family.remote(), pod.ip(family)),
        (family.other_remote(), family.node()),
    ] {
        let server = SocketAddr::new(ip, PORT);
        let _server = tcp::Server::start(lab.world.netns(), server)?;
        let seen = tcp::visit(pod.netns(), server)?;
        ensure!(seen == expected, "{ip} saw {seen}");
    }
    Ok(())
}

#[rstest]
fn all_of_one_family_is_none_of_the_other(#[values(V4, V6)] excluded: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let all = json!([excluded.everywhere()]);
    let pod = lab.pod_with("a", &lab.conf().with("nonMasqueradeCIDRs", all))?;
    for family in [V4, V6] {
        let expected = if family == excluded {
            pod.ip(family)
        } else {
            family.node()
        };
        let server = family.remote_at(PORT);
        let _server = tcp::Server::start(lab.world.netns(), server)?;
        let seen = tcp::visit(pod.netns(), server)?;
        ensure!(seen == expected, "{server} saw {seen}");
    }
    Ok(())
}

/// Nobody has such an address, but the packet goes where the default route leads.
#[test]
fn a_mapped_address_is_not_excluded_as_the_one_in_it() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let IpAddr::V4(excluded) = V4.unused_pod() else {
        anyhow::bail!("{} is of IPv4", V4.unused_pod());
    };
    let world = Capture::start(lab.world.netns(), "eth0")?;
    let ends = pod.ends(IpAddr::V6(excluded.to_ipv6_mapped()))?;
    let link = RawLink::open(pod.netns(), "eth0")?;
    link.send(&ends.udp(SOURCE, PORT, b"mapped"))?;
    let from_here = |bytes: &[u8]| {
        frame::read(bytes).is_some_and(|packet| packet.ports.is_some_and(|(_, to)| to == PORT))
    };
    let seen = world.wait_for(PATIENCE, from_here);
    let seen = seen
        .and_then(|bytes| frame::read(&bytes))
        .context("nothing has left")?;
    ensure!(seen.src == V6.node(), "{} has left", seen.src);
    Ok(())
}

#[rstest]
fn without_ipmasq_the_world_sees_the_pod(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let pod = lab.pod_with("a", &lab.conf().with("ipMasq", false))?;
    let server = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), server)?;
    let mut client = tcp::Client::connect(pod.netns(), server)?;
    let seen = client.exchange(500_000, 500_000)?.seen;
    ensure!(seen.ip() == pod.ip(family), "the world saw {seen}");
    Ok(())
}

#[rstest]
fn a_pod_sees_the_router_that_its_packets_die_at(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let (mut ping, seen) = (
        ping::Ping::new(pod.netns(), family.remote())?,
        Capture::start(pod.netns(), "eth0")?,
    );
    ping.series(3)?;
    // The first router on the way is the node itself.
    ping.set_hop_limit(1)?;
    ping.hears_nothing()?;
    let exceeded = seen.wait_for(PATIENCE, frame::is_time_exceeded);
    ensure!(
        exceeded.is_some(),
        "the node tells that the hop limit is used up"
    );
    Ok(())
}

#[rstest]
fn rewritten_checksums_are_right(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pods = [lab.pod("a")?, lab.pod("b")?];
    let server = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), server)?;
    // Frames by hand have whole checksums, which no device completes later. The second pod's port has to change.
    for pod in &pods {
        let capture = Capture::start(pod.netns(), "eth0")?;
        let link = RawLink::open(pod.netns(), "eth0")?;
        let ends = pod.ends(family.remote())?;
        for round in 0..3 {
            for payload in [&b"even"[..], b"odd", b"", &[0xff; 999]] {
                link.send(&ends.udp(SOURCE, PORT, payload))?;
            }
            let due = 4 * (round + 1);
            let answers = |_: &[u8]| {
                let of_server = |bytes: &Vec<u8>| {
                    frame::read(bytes).is_some_and(|packet| packet.ports == Some((PORT, SOURCE)))
                };
                capture
                    .frames()
                    .iter()
                    .filter(|bytes| of_server(bytes))
                    .count()
                    >= due
            };
            ensure!(
                capture.wait_for(PATIENCE, answers).is_some(),
                "{} got fewer than {due} answers",
                pod.name()
            );
        }
    }
    Ok(())
}

#[test]
fn a_datagram_without_checksum_stays_without() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let server = V4.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), server)?;
    let world = Capture::start(lab.world.netns(), "eth0")?;
    let link = RawLink::open(pod.netns(), "eth0")?;
    let mut datagram = pod.ends(V4.remote())?.udp(SOURCE, PORT, b"no checksum");
    datagram[CHECKSUM_OF_UDP4].fill(0);
    for _ in 0..3 {
        link.send(&datagram)?;
        std::thread::sleep(SILENCE / 10);
    }
    let arrived: Vec<_> = world
        .frames()
        .into_iter()
        .filter(|bytes| frame::read(bytes).is_some_and(|packet| packet.ports.is_some()))
        .collect();
    ensure!(arrived.len() == 3, "{} of 3 arrived", arrived.len());
    for bytes in arrived {
        ensure!(bytes[CHECKSUM_OF_UDP4] == [0, 0], "{bytes:02x?}");
    }
    Ok(())
}

#[rstest]
fn a_configured_address_is_the_one_that_the_world_sees(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let own = [V4, V6].map(second_address);
    for ip in own {
        let family = Family::of(ip);
        let bits = family.host_bits();
        lab.node
            .netns()
            .rtnl(|node| node.add_address("lo", ip, bits))?;
        let route = format!("{ip}/{bits}");
        let route = Route::to(&route).via(family.node());
        lab.world.netns().rtnl(|world| world.add_route(route))?;
    }
    let addresses = own.map(|ip| ip.to_string());
    let conf = lab.conf().with("masqueradeAddress", json!(addresses));
    let (a, b) = (lab.pod_with("a", &conf)?, lab.pod("b")?);
    let server = family.remote_at(PORT);
    let _tcp = tcp::Server::start(lab.world.netns(), server)?;
    let _udp = udp::Server::start(lab.world.netns(), server)?;
    for (pod, expected) in [(&a, second_address(family)), (&b, family.node())] {
        let seen = tcp::Client::connect(pod.netns(), server)?
            .exchange(300_000, 300_000)?
            .seen;
        ensure!(seen.ip() == expected, "TCP came from {seen}");
        let seen = udp::Client::open(pod.netns(), family)?
            .chat(server, 5)?
            .seen;
        ensure!(seen.ip() == expected, "UDP came from {seen}");
        ping::ping(pod.netns(), family.remote())?;
    }
    Ok(())
}

/// An address of the node that no uplink has.
fn second_address(family: Family) -> IpAddr {
    match family {
        V4 => Ipv4Addr::new(203, 0, 113, 99).into(),
        V6 => Ipv6Addr::new(0x2001, 0xdb8, 0x99, 0, 0, 0, 0, 1).into(),
    }
}

#[test]
fn an_address_that_the_node_does_not_have_is_refused() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    for family in Family::BOTH {
        let absent = second_address(family).to_string();
        let conf = lab.conf().with("masqueradeAddress", absent.as_str());
        let netns = lab.node.netns().sibling(&format!("refused-{family:?}"))?;
        let error = Call::new("ADD")
            .attachment("refused", &netns.path().display().to_string(), "eth0")
            .conf(&conf)
            .run(&lab.node)?
            .error()?;
        ensure!(error.code == 7, "{error:?}");
        for part in ["masqueradeAddress", &absent] {
            ensure!(error.msg.contains(part), "{error:?}");
        }
    }
    Ok(())
}

#[rstest]
fn a_flood_of_one_pod_leaves_the_others_alone(
    #[values(V4, V6)] family: Family,
    #[values("closed", "open")] ports: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("maxHalfOpenFlows", 500);
    let (flood, quiet) = (lab.pod_with("a", &conf)?, lab.pod_with("b", &conf)?);
    let server = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), server)?;
    let _udp = udp::Server::start(lab.world.netns(), server)?;
    let mut established = tcp::Client::connect_from(quiet.netns(), SOURCE, server)?;
    established.chat(3)?;
    let meter = Meter::start(&lab.node)?;
    let link = RawLink::open(flood.netns(), "eth0")?;
    let (near, far) = (
        flood.ends(family.remote())?,
        flood.ends(family.other_remote())?,
    );
    for round in 0..4u16 {
        for port in 0..1500 {
            // A port that is open offers a connection, which nobody takes up.
            let at = if ports == "open" {
                PORT
            } else {
                PORT + 1 + port % 7
            };
            link.send(&near.syn(2000 + round * 1500 + port, at))?;
            link.send(&far.udp(2000 + port, 1000 + round * 1500 + port, b"flood"))?;
        }
        established.chat(3)?;
        tcp::visit(quiet.netns(), server)?;
        udp::Client::open(quiet.netns(), family)?.chat(server, 2)?;
    }
    meter.expect(Counter::DropFlowQuota, 1000)?;
    established.exchange(300_000, 300_000)?;
    meter.expect_none(Counter::DropNoPort)
}

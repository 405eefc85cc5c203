//! Packets that have the tuple of a flow and are not its own: from another pod, by another uplink, in nobody's window.

use std::{thread, time::Duration};

use rstest::rstest;
use underpass_abi::{
    counter::Counter,
    flow::{protocol, state},
};
use underpass_tests::{
    capture::Capture,
    flow_table::{self, Then},
    frame::{self, Ends},
    netfilter::LONGEST,
    patience,
    prelude::*,
    second::{Kind, Second},
    traffic::{PATIENCE, SILENCE, raw::RawLink},
    wire::Wire,
    world::World,
};

pub(crate) mod forged;
mod quotes;

use quotes::{unreachable, unusual};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;

/// Between two packets of a kind.
const PAUSE: Duration = Duration::from_millis(50);

/// Echo with identifier 0 has the same tuple whoever asks: who may only answer can't ask.
#[rstest]
fn who_may_answer_pings_may_not_ping(
    #[values(V4, V6)] family: Family,
    #[values(0, 7)] identifier: u8,
) -> Result<()> {
    const ROUNDS: u8 = 10;
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let (request, reply, name) = match family {
        V4 => (8, 0, "icmp type echo-request"),
        V6 => (128, 129, "icmpv6 type echo-request"),
    };
    let (ip, from) = (family.nft(), b.ip(family));
    lab.firewall
        .drop_forwarded(&format!("{ip} saddr {from} {name}"))?;
    let at_a = Capture::start(a.netns(), Pod::IFNAME)?;
    let heard = |kind: u8| {
        let is_it = |bytes: &Vec<u8>| {
            frame::read(bytes)
                .is_some_and(|seen| seen.src == from && [1, 58].contains(&seen.protocol))
                && bytes.get(14 + family.header_len()) == Some(&kind)
        };
        at_a.frames().iter().filter(|bytes| is_it(bytes)).count()
    };
    let ways = [
        (
            RawLink::open(a.netns(), Pod::IFNAME)?,
            a.ends(b.ip(family))?,
        ),
        (
            RawLink::open(b.netns(), Pod::IFNAME)?,
            b.ends(a.ip(family))?,
        ),
    ];
    for round in 0..ROUNDS {
        for (link, ends) in &ways {
            // The bypass is learned from the first, and connection tracking is not asked again at once.
            for number in 0..3 {
                let rest = [0, identifier, round, number];
                link.send(&ends.icmp(request, 0, rest, b"anybody?"))?;
                thread::sleep(PAUSE / 10);
            }
        }
        thread::sleep(PAUSE);
    }
    thread::sleep(SILENCE / 2);
    let (passed, answers) = (heard(request), heard(reply));
    ensure!(passed == 0, "{passed} requests passed");
    ensure!(answers == 3 * usize::from(ROUNDS), "{answers} answers");
    Ok(())
}

/// For each TCP entry, the state and when it expires; and the tick in which the newest entry of all was made.
fn lives(node: &Node, family: Family) -> Result<(Vec<(u32, u32)>, u32)> {
    let (mut of_tcp, mut newest) = (Vec::new(), None);
    flow_table::walk(node, family, |entry| {
        newest = newest.max(Some(entry.since));
        if entry.protocol == protocol::TCP {
            of_tcp.push((entry.state, entry.expires));
        }
        Then::Stays
    })?;
    Ok((of_tcp, newest.context("no entry")?))
}

/// Its receiver ignores it, so the connection is not forgotten soon after.
#[rstest]
fn a_stray_reset_costs_no_life(#[values(V4, V6)] family: Family) -> Result<()> {
    /// More than a connection that ended is remembered, and less than one that opens, in ticks.
    const LONG: u32 = 100;
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _servers = underpass_tests::traffic::serve(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect(pod.netns(), remote)?;
    let seen = client.chat(5)?;
    // What is acknowledged late shows that the connection goes on.
    thread::sleep(SILENCE / 2);
    let link = RawLink::open(lab.world.netns(), World::LINK)?;
    let ends = lab.ends_from_world(remote.ip(), family.node())?;
    link.send(&ends.rst(PORT, seen.port()))?;
    thread::sleep(SILENCE / 2);
    // It has a new entry made.
    udp::Client::open(pod.netns(), family)?.ask(remote, 100)?;
    let (entries, now) = lives(&lab.node, family)?;
    let left: Vec<i32> = entries
        .iter()
        .map(|(_, expires)| expires.wrapping_sub(now).cast_signed())
        .collect();
    ensure!(
        entries.iter().any(|(bits, _)| bits & state::RST != 0),
        "no entry was reset: {entries:x?}"
    );
    ensure!(
        left.iter().all(|&left| left > LONG.cast_signed()),
        "ticks that are left: {left:?}"
    );
    client.chat(5)?;
    Ok(())
}

/// A container that may forge has others' packets in its name, and no say in their flows.
#[rstest]
fn a_forged_packet_ends_no_flow(
    #[values(V4, V6)] family: Family,
    #[values(Towards::World, Towards::Pod)] towards: Towards,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let conf = lab.conf().with("ipMasq", false);
    let (pod, other) = (lab.pod_with("a", &conf)?, lab.pod_with("b", &conf)?);
    let may_forge = conf.with("antiSpoof", false).with("bypass", bypass);
    let forger = lab.pod_with("c", &may_forge)?;
    let (netns, link, remote) = match towards {
        Towards::World => (lab.world.netns(), World::LINK, family.remote_at(PORT)),
        Towards::Pod => (other.netns(), Pod::IFNAME, other.at(family, PORT)),
    };
    let _server = udp::Server::start(netns, remote)?;
    let mut client = udp::Client::open_at(pod.netns(), family, SOURCE)?;
    client.chat(remote, 10)?;
    let ends = [pod.at(family, SOURCE), remote];
    let bypassed = || -> Result<u64> {
        let found = lab.node.flows(ends)?;
        ensure!(found.len() == 1, "{found:#?}");
        let directions = found[0]["directions"].as_array();
        let packets = directions.into_iter().flatten();
        Ok(packets.filter_map(|way| way["packets"].as_u64()).sum())
    };
    let before = bypassed()?;
    ensure!(before >= 10, "{before} packets took the bypass");
    let arrived = Capture::start(netns, link)?;
    let link = RawLink::open(forger.netns(), Pod::IFNAME)?;
    let forged = forger.ends(remote.ip())?.from_ip(pod.ip(family));
    link.send(&forged.udp(SOURCE, PORT, b"forged"))?;
    let is_forged = |bytes: &[u8]| bytes.ends_with(b"forged");
    ensure!(
        arrived.wait_for(PATIENCE, is_forged).is_some(),
        "it did not arrive"
    );
    let meanwhile = bypassed()?;
    ensure!(meanwhile >= before, "{meanwhile} after {before}");
    client.chat(remote, 10)?;
    let after = bypassed()?;
    ensure!(after >= meanwhile + 16, "{after} after {meanwhile}");
    Ok(())
}

/// Where a flow leads.
#[derive(Clone, Copy, Debug)]
enum Towards {
    World,
    Pod,
}

/// Nor do the flags of one end a connection.
#[rstest]
fn a_forged_end_ends_no_connection(
    #[values(V4, V6)] family: Family,
    #[values(true, false)] masquerade: bool,
) -> Result<()> {
    needs_root!();
    // Connection tracking would drop the forged packet, unless it is liberal.
    let lab = Lab::open()?;
    lab.firewall.set_liberal(true)?;
    lab.world.route_pods()?;
    let conf = lab.conf().with("ipMasq", masquerade);
    let pod = lab.pod_with("a", &conf)?;
    let forger = lab.pod_with("c", &conf.with("antiSpoof", false))?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect_from(pod.netns(), SOURCE, remote)?;
    client.chat(10)?;
    let link = RawLink::open(forger.netns(), Pod::IFNAME)?;
    let ends = forger.ends(remote.ip())?.from_ip(pod.ip(family));
    let arrived = Capture::start(lab.world.netns(), World::LINK)?;
    let before = arrived.frames().len();
    // The server, out of whose window it is, ignores it.
    link.send(&ends.segment((SOURCE, PORT), "FA", (1, 1), &[]))?;
    thread::sleep(PAUSE);
    ensure!(arrived.frames().len() > before, "it did not arrive");
    let meter = Meter::start(&lab.node)?;
    client.chat(20)?;
    meter.expect(Counter::BypassWire, 15)?;
    meter.expect(Counter::BypassPeer, 15)
}

/// Nor when the connection was silent for so long that its own end would go past connection tracking.
#[rstest]
fn a_forged_end_after_a_silence(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    for (key, value) in [
        ("be_liberal", 1),
        ("timeout_established", LONGEST.as_secs()),
    ] {
        let key = format!("net/netfilter/nf_conntrack_tcp_{key}");
        lab.node.netns().set_sysctl(&key, &value.to_string())?;
    }
    let (pod, forger) = (lab.pod("a")?, lab.pod("c")?);
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect_from(pod.netns(), SOURCE, remote)?;
    client.chat(10)?;
    thread::sleep(patience::here(LONGEST * 13 / 10));
    let link = RawLink::open(forger.netns(), Pod::IFNAME)?;
    let ends = forger.ends(remote.ip())?.from_ip(pod.ip(family));
    let meter = Meter::start(&lab.node)?;
    link.send(&ends.rst(SOURCE, PORT))?;
    meter.expect(Counter::DropSourceAddress, 1)?;
    // All that the node did with it is done.
    let mut states = Vec::new();
    flow_table::walk(&lab.node, family, |entry| {
        states.push(entry.state);
        Then::Stays
    })?;
    ensure!(!states.is_empty(), "the flow is gone");
    ensure!(
        states.iter().all(|bits| bits & state::RST == 0),
        "it was reset: {states:x?}"
    );
    Ok(())
}

/// Who looks at the way that a packet's source would be reached by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Filter {
    Nobody,
    /// The sysctl, which IPv4 alone has.
    Sysctl,
    /// A rule of the firewall.
    Rule,
}

/// Where reverse paths are filtered, an answer that comes by another uplink than the flow's is for the stack to judge.
#[rstest]
#[case(V4, Filter::Nobody)]
#[case(V4, Filter::Sysctl)]
#[case(V4, Filter::Rule)]
#[case(V6, Filter::Nobody)]
#[case(V6, Filter::Rule)]
fn an_answer_by_another_uplink_is_filtered(
    #[case] family: Family,
    #[case] filter: Filter,
    #[values(true, false)] masquerade: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let _second = Second::connect(&lab, Kind::Wire(Wire::Ethernet))?;
    let strict = if filter == Filter::Sysctl { "1" } else { "0" };
    for device in ["all", Node::UPLINK, Second::LINK] {
        let key = format!("net/ipv4/conf/{device}/rp_filter");
        lab.node.netns().set_sysctl(&key, strict)?;
    }
    if filter == Filter::Rule {
        lab.node.netns().nft(
            "table inet reverse {
                chain prerouting {
                    type filter hook prerouting priority raw;
                    fib saddr . iif oif missing drop
                }
            }",
        )?;
    }
    let pod = lab.pod_with("a", &lab.conf().with("ipMasq", masquerade))?;
    let remote = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), remote)?;
    let mut client = udp::Client::open_at(pod.netns(), family, SOURCE)?;
    client.chat(remote, 10)?;
    let arrived = Capture::start(pod.netns(), Pod::IFNAME)?;
    let to = if masquerade {
        family.node()
    } else {
        pod.ip(family)
    };
    let ways = [
        (World::LINK, "by the first"),
        (Second::LINK, "by the second"),
    ];
    for (device, payload) in ways {
        let ends = Ends {
            src_mac: lab.world.netns().mac(device)?,
            dst_mac: lab.node.netns().mac(device)?,
            src: remote.ip(),
            dst: to,
        };
        let link = RawLink::open(lab.world.netns(), device)?;
        for _ in 0..5 {
            link.send(&ends.udp(PORT, SOURCE, payload.as_bytes()))?;
        }
    }
    let has_come = |payload: &'static str| move |bytes: &[u8]| bytes.ends_with(payload.as_bytes());
    let by_first = arrived.wait_for(PATIENCE, has_come("by the first"));
    ensure!(by_first.is_some(), "nothing arrives");
    let by_second = arrived.wait_for(SILENCE, has_come("by the second"));
    ensure!(
        by_second.is_some() == (filter == Filter::Nobody),
        "by the second uplink: {by_second:02x?}"
    );
    client.chat(remote, 3)?;
    Ok(())
}

/// A pod tells the world of a flow that it has with a neighbour, and which is not masqueraded: the error would show its address.
#[rstest]
fn an_error_about_a_neighbour_stays_at_home(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    // A firewall that drops what is INVALID would drop it as well.
    let lab = Lab::open()?;
    let (pod, neighbour) = (lab.pod("a")?, lab.pod("b")?);
    let at = pod.at(family, PORT);
    let _server = udp::Server::start(pod.netns(), at)?;
    udp::Client::open_at(neighbour.netns(), family, SOURCE)?.chat(at, 10)?;
    let capture = Capture::start(lab.world.netns(), "eth0")?;
    let meter = Meter::start(&lab.node)?;
    let ends = pod.ends(family.remote())?;
    let quoted = neighbour.ends(pod.ip(family))?;
    RawLink::open(pod.netns(), Pod::IFNAME)?.send(&unreachable(&ends, &quoted, SOURCE, PORT))?;
    meter.expect(Counter::DropUntranslated, 1)?;
    thread::sleep(SILENCE / 4);
    let seen = capture.addresses();
    ensure!(!seen.contains(&pod.ip(family)), "{seen:?}");
    Ok(())
}

/// Whom a neighbour talks with hears nothing of it from a pod that guesses the ports; from the neighbour it does.
#[rstest]
fn an_error_about_a_neighbours_flow_is_the_neighbours(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (pod, neighbour) = (lab.pod("a")?, lab.pod("b")?);
    let at = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), at)?;
    let mut client = udp::Client::open_at(neighbour.netns(), family, SOURCE)?;
    let seen = client.chat(at, 10)?.seen;
    ensure!(seen.ip() == family.node(), "{seen}");
    let capture = Capture::start(lab.world.netns(), "eth0")?;
    let is_error = |frame: &[u8]| {
        frame::read(frame).is_some_and(|seen| {
            seen.src == family.node()
                && [protocol::ICMP, protocol::ICMPV6].contains(&seen.protocol)
                && frame
                    .get(14 + family.header_len())
                    .is_some_and(|kind| [1, 3].contains(kind))
        })
    };
    let quoted = Ends {
        src: at.ip(),
        dst: neighbour.ip(family),
        ..neighbour.ends(at.ip())?
    };
    let meter = Meter::start(&lab.node)?;
    let forged = unreachable(&pod.ends(at.ip())?, &quoted, PORT, SOURCE);
    RawLink::open(pod.netns(), Pod::IFNAME)?.send(&forged)?;
    meter.expect(Counter::DropNoFlow, 1)?;
    thread::sleep(SILENCE / 4);
    ensure!(!capture.frames().iter().any(|frame| is_error(frame)));
    let own = unreachable(&neighbour.ends(at.ip())?, &quoted, PORT, SOURCE);
    RawLink::open(neighbour.netns(), Pod::IFNAME)?.send(&own)?;
    let heard = capture.wait_for(SILENCE, is_error);
    ensure!(heard.is_some(), "the world hears nothing from its partner");
    Ok(())
}

/// Nobody asks netfilter who says that a packet did not arrive, only to whom.
#[rstest]
fn an_error_about_what_neighbours_say_is_theirs(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("bypass", bypass);
    let [a, b, c] = ["a", "b", "c"].map(|name| lab.pod_with(name, &conf));
    let (forger, asks, answers) = (a?, b?, c?);
    let at = answers.at(family, PORT);
    let _server = udp::Server::start(answers.netns(), at)?;
    udp::Client::open_at(asks.netns(), family, SOURCE)?.chat(at, 10)?;
    let heard = Capture::start(asks.netns(), Pod::IFNAME)?;
    let quoted = asks.ends(at.ip())?;
    let from = |pod: &Pod| {
        let error = unreachable(&pod.ends(asks.ip(family))?, &quoted, SOURCE, PORT);
        RawLink::open(pod.netns(), Pod::IFNAME)?.send(&error)
    };
    let is_from = |bytes: &[u8], pod: &Pod| {
        frame::read(bytes).is_some_and(|seen| {
            seen.src == pod.ip(family) && [protocol::ICMP, 58].contains(&seen.protocol)
        })
    };
    let meter = Meter::start(&lab.node)?;
    from(&forger)?;
    meter.expect(Counter::DropNoFlow, 1)?;
    let link = RawLink::open(forger.netns(), Pod::IFNAME)?;
    let shapes = unusual(&forger.ends(asks.ip(family))?, &quoted);
    for (before, frames) in (1..).zip(&shapes) {
        for frame in frames {
            link.send(frame)?;
        }
        meter.expect(Counter::DropNoFlow, before + 1)?;
    }
    from(&answers)?;
    let own = heard.wait_for(SILENCE, |bytes| is_from(bytes, &answers));
    ensure!(own.is_some(), "it does not hear from whom it asked");
    let frames = heard.frames();
    ensure!(!frames.iter().any(|bytes| is_from(bytes, &forger)));
    Ok(())
}

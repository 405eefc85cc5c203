//! What reviewers found: sequences that once broke connections, let packets pass a firewall, or took places from others.

use std::{
    net::SocketAddr,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{HashMap, Map};
use etherparse::PacketBuilder;
use rstest::rstest;
use serde_json::{Value, json};
use underpass_abi::{
    addr::{self, Addr4, Addr6},
    counter::Counter,
    flow::{Flow, Key, protocol, state},
    map,
};
use underpass_tests::{
    Family::{self, V4, V6},
    Lab, Node, Pod,
    capture::Capture,
    counter::{Meter, open},
    frame::{self, Ends, HOPS},
    needs_root,
    netns::Netns,
    patience,
    traffic::{PATIENCE, SILENCE, raw::RawLink, tcp, udp},
    world::World,
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;
const INSIDE: u16 = 80;
/// A port of the node that leads to [`INSIDE`].
const HOST: u16 = 8080;

/// Whether connection tracking takes TCP whose windows it does not know.
const LIBERAL: &str = "net/netfilter/nf_conntrack_tcp_be_liberal";

/// Between two packets of a kind.
const PAUSE: Duration = Duration::from_millis(50);

/// The entries that `underpass flows` shows for these two ends, in whatever order.
fn flows(node: &Node, ends: [SocketAddr; 2]) -> Result<Vec<Value>> {
    let said = node.underpass(&["flows", "--json"])?;
    let lines: Vec<Value> = serde_json::from_str(&said).context("read the JSON of flows")?;
    let wanted = ends.map(|end| Value::from(end.to_string()));
    let is_between = |line: &Value| {
        let shown = line["ends"].as_array();
        shown.is_some_and(|shown| wanted.iter().all(|end| shown.contains(end)))
    };
    Ok(lines.into_iter().filter(is_between).collect())
}

/// Loads rules into a namespace.
fn rules(netns: &Netns, text: &str) -> Result<()> {
    let mut nft = Command::new("nft");
    netns.expect(nft.args(["-f", "-"]), text.as_bytes())?;
    Ok(())
}

/// What is sent to a container's port by UDP gets no answer, not even that nobody is there.
fn swallow(pod: &Pod) -> Result<()> {
    rules(
        pod.netns(),
        &format!(
            "table inet silence {{
                chain input {{ type filter hook input priority 0; udp dport {INSIDE} drop; }}
            }}"
        ),
    )
}

/// A liberal connection tracking sees the whole opening of what is translated: else it waits for the third packet, and soon forgets. How
/// the addresses of both sides compare makes no difference.
#[rstest]
fn an_opening_is_seen_as_a_whole(
    #[values(V4, V6)] family: Family,
    #[values("masqueraded", "host port")] how: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.node.netns().set_sysctl(LIBERAL, "1")?;
    let conf = lab.conf();
    let ranges = ["10.88.0.200", "fd00:88::c8"].map(|start| json!({ "rangeStart": start }));
    let ranges: Vec<Value> = Family::BOTH
        .iter()
        .zip(ranges)
        .map(|(family, mut range)| {
            range["subnet"] = family.pods().into();
            json!([range])
        })
        .collect();
    let high = conf.clone().with_ipam("ranges", ranges);
    let pods = [
        (lab.pod_with("a", &conf.with_host_port(HOST, INSIDE))?, HOST),
        (
            lab.pod_with("b", &high.with_host_port(HOST + 1, INSIDE))?,
            HOST + 1,
        ),
    ];
    for peer in [family.gateway(), family.remote()] {
        let peer = SocketAddr::new(peer, PORT);
        let _server = tcp::Server::start(lab.world.netns(), peer)?;
        for (pod, port) in &pods {
            let _inside = tcp::Server::start(pod.netns(), family.port(INSIDE))?;
            let mut client = if how == "masqueraded" {
                tcp::Client::connect(pod.netns(), peer)?
            } else {
                let from = SocketAddr::new(peer.ip(), 0);
                let served = SocketAddr::new(family.node(), *port);
                tcp::Client::connect_between(lab.world.netns(), from, served)?
            };
            client.exchange(1, 1)?;
            let source = format!("sport={}", client.local()?.port());
            let found = lab.firewall.entries(family, &["tcp", &source])?;
            ensure!(
                found.len() == 1 && found[0].contains(" ESTABLISHED "),
                "after an exchange: {found:#?}"
            );
        }
    }
    Ok(())
}

/// A connection that says all it has to say at once, and is silent then, is known to be one.
#[rstest]
fn an_exchange_right_after_the_opening_is_noted(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let at = b.at(family, INSIDE);
    let _server = tcp::Server::start(b.netns(), family.port(INSIDE))?;
    for _ in 0..3 {
        let mut client = tcp::Client::connect(a.netns(), at)?;
        client.exchange(1, 1)?;
        let found = flows(&lab.node, [client.local()?, at])?;
        ensure!(found.len() == 1, "{found:#?}");
        for word in ["answered", "assured"] {
            let states = found[0]["state"].as_array();
            ensure!(
                states.is_some_and(|states| states.contains(&word.into())),
                "not {word}: {found:#?}"
            );
        }
    }
    Ok(())
}

/// Connection tracking is fed as often as it needs to see that datagrams are a stream, however long its timers are.
#[rstest]
fn a_stream_of_datagrams_is_assured(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::open()?;
    // The kernel's own timers, and somebody who asks for connection tracking.
    rules(
        lab.node.netns(),
        "table inet asks {
            chain forward { type filter hook forward priority 0; ct state invalid drop; }
        }",
    )?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let at = b.at(family, INSIDE);
    let _server = udp::Server::start(b.netns(), family.port(INSIDE))?;
    let mut client = udp::Client::open_at(a.netns(), family, SOURCE)?;
    for _ in 0..6 {
        client.ask(at, 100)?;
        thread::sleep(Duration::from_secs(1));
    }
    let source = format!("sport={SOURCE}");
    let found = lab.firewall.entries(family, &["udp", &source])?;
    ensure!(
        found.len() == 1 && found[0].contains("[ASSURED]"),
        "{found:#?}"
    );
    Ok(())
}

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
fn lives<A: addr::Family>(node: &Node, name: &str) -> Result<(Vec<(u32, u32)>, u32)> {
    let flows: HashMap<_, Key<A>, Flow<A>> = Map::HashMap(open(node, name)?).try_into()?;
    let entries = flows.iter().collect::<Result<Vec<_>, _>>()?;
    let newest = entries.iter().map(|(_, flow)| flow.since).max();
    let of_tcp = entries
        .iter()
        .filter(|(key, _)| key.0.protocol == protocol::TCP)
        .map(|(_, flow)| (flow.state, flow.expires));
    Ok((of_tcp.collect(), newest.context("no entry")?))
}

/// A reset in nobody's window.
fn stray_reset(ends: &Ends, sport: u16, dport: u16) -> Result<Vec<u8>> {
    let ethernet = PacketBuilder::ethernet2(ends.src_mac, ends.dst_mac);
    let ip = match (ends.src, ends.dst) {
        (std::net::IpAddr::V4(src), std::net::IpAddr::V4(dst)) => {
            ethernet.ipv4(src.octets(), dst.octets(), HOPS)
        }
        (std::net::IpAddr::V6(src), std::net::IpAddr::V6(dst)) => {
            ethernet.ipv6(src.octets(), dst.octets(), HOPS)
        }
        _ => anyhow::bail!("{ends:?} are of different families"),
    };
    let mut frame = Vec::new();
    ip.tcp(sport, dport, 1, 0).rst().write(&mut frame, &[])?;
    Ok(frame)
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
    link.send(&stray_reset(&ends, PORT, seen.port())?)?;
    thread::sleep(SILENCE / 2);
    // It has a new entry made.
    udp::Client::open(pod.netns(), family)?.ask(remote, 100)?;
    let (entries, now) = match family {
        V4 => lives::<Addr4>(&lab.node, map::FLOWS4)?,
        V6 => lives::<Addr6>(&lab.node, map::FLOWS6)?,
    };
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

/// What connection tracking could not follow while it was liberal stays on the bypass once it is strict.
#[rstest]
fn connections_outlive_a_stricter_connection_tracking(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.node.netns().set_sysctl(LIBERAL, "1")?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let _server = tcp::Server::start(b.netns(), family.port(INSIDE))?;
    let mut client = tcp::Client::connect(a.netns(), b.at(family, INSIDE))?;
    for _ in 0..3 {
        client.exchange(5_000_000, 5_000_000)?;
        thread::sleep(Duration::from_secs(1));
    }
    lab.node.netns().set_sysctl(LIBERAL, "0")?;
    let _another = lab.pod("c")?;
    let start = Instant::now();
    while start.elapsed() < patience::here(Duration::from_secs(4)) {
        let elapsed = client.exchange(100_000, 100_000)?.elapsed;
        ensure!(
            elapsed < patience::here(SILENCE / 2),
            "an exchange took {elapsed:?}, {:?} after the change",
            start.elapsed()
        );
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// The node answers for a server, so sequence numbers change on the way.
#[rstest]
fn connections_through_a_syn_proxy(
    #[values(V4, V6)] family: Family,
    #[values("0", "1")] liberal: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::open()?;
    lab.world.route_pods()?;
    let node = lab.node.netns();
    let to = format!("tcp dport {INSIDE}");
    let proxy = format!(
        "table inet proxy {{
            chain prerouting {{
                type filter hook prerouting priority raw;
                {to} tcp flags syn notrack;
            }}
            chain forward {{
                type filter hook forward priority 0;
                {to} ct state invalid,untracked synproxy mss 1400 wscale 7 timestamp sack-perm;
                ct state invalid drop;
            }}
        }}"
    );
    if let Err(error) = rules(node, &proxy) {
        anstream::eprintln!("not on this kernel: {error:#}");
        return Ok(());
    }
    for (key, value) in [
        ("net/netfilter/nf_conntrack_tcp_loose", "0"),
        ("net/ipv4/tcp_syncookies", "1"),
        ("net/ipv4/tcp_timestamps", "1"),
        (LIBERAL, liberal),
    ] {
        node.set_sysctl(key, value)?;
    }
    let pod = lab.pod_with("a", &lab.conf().with("ipMasq", false))?;
    let _server = tcp::Server::start(pod.netns(), family.port(INSIDE))?;
    for _ in 0..3 {
        let at = pod.at(family, INSIDE);
        let mut client = tcp::Client::connect(lab.world.netns(), at)?;
        for _ in 0..8 {
            client.exchange(1000, 1000)?;
            thread::sleep(PAUSE);
        }
    }
    Ok(())
}

/// A lab with the smallest tables: a container may have 32 flows that nobody answered.
fn small() -> Result<Lab> {
    let lab = Lab::unloaded()?;
    lab.node.underpass(&["load", "--flows", "1024"])?;
    Ok(lab)
}

/// Datagrams to the node's port, each from another source port.
fn flood(link: &RawLink, ends: &Ends) -> Result<()> {
    for sport in 10_000..12_500 {
        link.send(&ends.udp(sport, HOST, b"flood"))?;
    }
    Ok(())
}

#[rstest]
fn who_floods_a_host_port_has_a_quota(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = small()?;
    let (a, c) = (lab.pod("a")?, lab.pod("c")?);
    let served = lab.pod_with("b", &lab.conf().with_host_port(HOST, INSIDE))?;
    swallow(&served)?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let meter = Meter::start(&lab.node)?;
    let link = RawLink::open(a.netns(), Pod::IFNAME)?;
    flood(&link, &a.ends(family.node())?)?;
    for _ in 0..10 {
        let seen = tcp::visit(c.netns(), remote)?;
        ensure!(seen == family.node(), "{seen}");
    }
    meter.expect(Counter::DropFlowQuota, 1000)
}

#[rstest]
fn the_world_takes_no_quota(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = small()?;
    let pod = lab.pod_with("b", &lab.conf().with_host_port(HOST, INSIDE))?;
    swallow(&pod)?;
    let remote = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), remote)?;
    let meter = Meter::start(&lab.node)?;
    let link = RawLink::open(lab.world.netns(), World::LINK)?;
    flood(
        &link,
        &lab.ends_from_world(family.gateway(), family.node())?,
    )?;
    for _ in 0..20 {
        let answer = udp::Client::open(pod.netns(), family)?.ask(remote, 100);
        answer.with_context(|| format!("counted: {:?}", meter.read()))?;
    }
    meter.expect_none(Counter::DropFlowQuota)
}

/// A container that may forge has others' packets in its name, and no say in their flows.
#[rstest]
fn a_forged_packet_ends_no_flow(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let conf = lab.conf().with("ipMasq", false);
    let pod = lab.pod_with("a", &conf)?;
    let forger = lab.pod_with("c", &conf.with("antiSpoof", false))?;
    let remote = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), remote)?;
    let mut client = udp::Client::open_at(pod.netns(), family, SOURCE)?;
    client.chat(remote, 10)?;
    let ends = [pod.at(family, SOURCE), remote];
    let bypassed = || -> Result<u64> {
        let found = flows(&lab.node, ends)?;
        ensure!(found.len() == 1, "{found:#?}");
        let directions = found[0]["directions"].as_array();
        let packets = directions.into_iter().flatten();
        Ok(packets.filter_map(|way| way["packets"].as_u64()).sum())
    };
    let before = bypassed()?;
    ensure!(before >= 10, "{before} packets took the bypass");
    let link = RawLink::open(forger.netns(), Pod::IFNAME)?;
    let forged = forger.ends(remote.ip())?.from_ip(pod.ip(family));
    let arrived = Capture::start(lab.world.netns(), World::LINK)?;
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

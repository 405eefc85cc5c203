//! A full flow table, and who has to leave: never a conversation, whoever it is that wants a place.

use std::{net::SocketAddr, thread, time::Duration};

use rstest::rstest;
use underpass_abi::flow::{protocol, state};
use underpass_tests::{
    capture::Capture,
    flow_table::{self, Then},
    frame::Ends,
    netns::Netns,
    patience,
    prelude::*,
    traffic::{SILENCE, raw::RawLink},
    world::World,
};

mod answered;
mod ended;
mod halves;
mod memory;
mod under_way;

const PORT: u16 = 443;
const INSIDE: u16 = 80;
/// A port of the node that leads to [`INSIDE`].
const HOST: u16 = 8080;
/// Entries of the smallest table.
pub(crate) const FLOWS: u16 = 1024;

/// A lab with the smallest tables: a container may have 32 flows that nobody answered.
pub(crate) fn small() -> Result<Lab> {
    let lab = Lab::unloaded()?;
    lab.node
        .underpass(&["load", "--flows", &FLOWS.to_string()])?;
    Ok(lab)
}

/// Rules by which a container neither answers these ports nor says that nobody is there.
pub(crate) fn ignore(pod: &Pod, ports: &str) -> Result<()> {
    pod.netns().nft(&format!(
        "table inet indifference {{
            chain input {{ type filter hook input priority 0; udp dport {ports} drop; }}
        }}"
    ))
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
    ignore(&served, &INSIDE.to_string())?;
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
    ignore(&pod, &INSIDE.to_string())?;
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

/// What the world opens counts while it waits for an answer: however much was answered, there is room for more.
#[rstest]
fn answers_give_the_worlds_quota_back(
    #[values(V4, V6)] family: Family,
    #[values("direct", "mapped")] way: &str,
    #[values(true, false)] masquerades: bool,
) -> Result<()> {
    const LIMIT: u16 = 8;
    needs_root!();
    let lab = Lab::new()?;
    lab.world.route_pods()?;
    let conf = lab.conf().with_host_port(HOST, INSIDE);
    let conf = conf.with("ipMasq", masquerades);
    let pod = lab.pod_with("a", &conf.with("maxHalfOpenFlows", LIMIT))?;
    let server = udp::Server::start(pod.netns(), family.port(INSIDE))?;
    let to = match way {
        "direct" => pod.at(family, INSIDE),
        _ => SocketAddr::new(family.node(), HOST),
    };
    let meter = Meter::start(&lab.node)?;
    for _ in 0..3 * LIMIT {
        udp::Client::open(lab.world.netns(), family)?.chat(to, 2)?;
    }
    meter.expect_none(Counter::OverQuota)?;
    drop(server);
    ignore(&pod, &INSIDE.to_string())?;
    let surplus = |number: u16| -> Result<usize> {
        for _ in 0..number {
            udp::Client::open(lab.world.netns(), family)?.send(to, b"unanswered")?;
        }
        thread::sleep(SILENCE / 8);
        let mut surplus = 0;
        flow_table::walk(&lab.node, family, |entry| {
            surplus += usize::from(entry.state & state::SURPLUS != 0);
            Then::Stays
        })?;
        Ok(surplus)
    };
    ensure!(surplus(LIMIT / 2)? == 0, "{:?}", meter.read()?);
    let is_remembered = way == "mapped" || masquerades;
    ensure!(
        (surplus(2 * LIMIT)? > 0) == is_remembered,
        "{:?}",
        meter.read()?
    );
    Ok(())
}

/// Ten times as many answered flows as the table has entries, two entries each, while connections of the same pod and of another say
/// nothing.
#[rstest]
fn idle_connections_outlive_ten_tables(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = small()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    ignore(&a, &answered::ports())?;
    let remote = family.remote_at(PORT);
    let _world = underpass_tests::traffic::serve(lab.world.netns(), remote)?;
    let _inside = tcp::Server::start(b.netns(), family.port(INSIDE))?;
    let mut idle = [
        tcp::Client::connect(a.netns(), remote)?,
        tcp::Client::connect(b.netns(), remote)?,
        tcp::Client::connect(a.netns(), b.at(family, INSIDE))?,
    ];
    for client in &mut idle {
        client.chat(5)?;
    }
    let meter = Meter::start(&lab.node)?;
    let line = Capture::start(a.netns(), Pod::IFNAME)?;
    let (link, ends) = (RawLink::open(a.netns(), Pod::IFNAME)?, a.ends(remote.ip())?);
    let ask = |from| link.send(&ends.udp(from, PORT, b"question"));
    answered::ask_from_all(&line, PORT, ask)
        .with_context(|| format!("counted: {:?}", meter.read()))?;
    answered::is_turned_over(&meter)?;
    for (number, client) in idle.iter_mut().enumerate() {
        client
            .chat(5)
            .with_context(|| format!("idle connection {number}; counted: {:?}", meter.read()))?;
    }
    Ok(())
}

/// Where all have a conversation, who comes last finds no place; the node itself has places of its own.
#[rstest]
fn conversations_do_not_make_room(#[values(V4, V6)] family: Family) -> Result<()> {
    /// Conversations at first: of two entries each, so most places are theirs.
    const FIRST: usize = 300;
    /// Then so many at a time, until one finds no place.
    const MORE: usize = 40;
    const ROUNDS: usize = 6;
    /// After which a datagram makes a conversation of a question and its answer.
    const STREAM: Duration = Duration::from_secs(3);
    needs_root!();
    let lab = small()?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _world = underpass_tests::traffic::serve(lab.world.netns(), remote)?;
    let meter = Meter::start(&lab.node)?;
    let refused = || -> Result<u64> { Ok(meter.read()?.get(Counter::TableFull)) };
    let open = || udp::Client::open(pod.netns(), family);
    let mut first = (0..FIRST).map(|_| open()).collect::<Result<Vec<_>>>()?;
    for _ in 0..2 {
        for client in &mut first {
            client.ask(remote, 100)?;
        }
        thread::sleep(STREAM);
    }
    ensure!(refused()? == 0, "there was room for {FIRST}");
    let mut later = Vec::new();
    for _ in 0..ROUNDS {
        for _ in 0..MORE {
            let client = open()?;
            client.send(remote, b"first")?;
            later.push(client);
            // Whom nobody answered yet is held to a quota.
            thread::sleep(Duration::from_millis(2));
        }
        if refused()? > 0 {
            break;
        }
        thread::sleep(STREAM);
        for client in &later {
            client.send(remote, b"again")?;
        }
    }
    let counted = meter.read()?;
    ensure!(
        counted.get(Counter::TableFull) > 0 && counted.get(Counter::DropMapFull) > 0,
        "{} found room: {counted:?}",
        FIRST + later.len()
    );
    for (number, client) in first.iter_mut().enumerate() {
        client
            .ask(remote, 100)
            .with_context(|| format!("conversation {number}; counted: {counted:?}"))?;
    }
    tcp::visit(lab.node.netns(), remote).context("from the node itself")?;
    Ok(())
}

/// Connections, one after the other, until more than so many flows have made room for them.
pub(crate) fn turn_over(meter: &Meter<'_>, flows: u16, from: &Netns, to: SocketAddr) -> Result<()> {
    let made = || -> Result<u64> { Ok(meter.read()?.get(Counter::MadeRoom)) };
    for _ in 0..4 * FLOWS {
        tcp::visit(from, to)?;
        if made()? > u64::from(flows) {
            return Ok(());
        }
    }
    anyhow::bail!("{:?}", meter.read()?)
}

/// A server may take its time: until it has answered, what has a place that others look for are connections that are over.
#[rstest]
fn a_handshake_outlives_connections_that_ended(
    #[values(V4, V6)] family: Family,
    #[values("masqueraded", "mapped")] way: &str,
) -> Result<()> {
    /// A port of the one who does not answer.
    const SLOW: u16 = 444;
    /// Ticks, of which one is about a second.
    const LONG: u32 = 3_600;
    needs_root!();
    let lab = small()?;
    let pod = lab.pod_with("a", &lab.conf().with_host_port(HOST, INSIDE))?;
    let (from, to) = match way {
        "masqueraded" => (pod.netns(), family.remote_at(PORT)),
        _ => (lab.world.netns(), SocketAddr::new(family.node(), HOST)),
    };
    let _servers = [
        tcp::Server::start(lab.world.netns(), family.remote_at(PORT))?,
        tcp::Server::start(pod.netns(), family.port(INSIDE))?,
    ];
    lab.world.netns().nft(&format!(
        "table inet indifference {{
            chain input {{ type filter hook input priority 0; tcp dport {SLOW} drop; }}
        }}"
    ))?;
    let ends = pod.ends(family.remote())?;
    RawLink::open(pod.netns(), Pod::IFNAME)?.send(&ends.syn(SLOW, SLOW))?;
    let is_open = |entry: flow_table::Entry| {
        entry.protocol == protocol::TCP
            && entry.state & state::ANSWERED != state::ANSWERED
            && entry.state & (state::RST | state::FINISHED) == 0
    };
    let opening = || -> Result<Vec<u32>> {
        let mut ticks = Vec::new();
        flow_table::walk(&lab.node, family, |entry| {
            if is_open(entry) {
                ticks.push(entry.since);
            }
            Then::Stays
        })?;
        Ok(ticks)
    };
    eventually("the handshake is known", || {
        let before = opening()?;
        ensure!(before.len() == 2, "{before:?}");
        Ok(())
    })?;
    let before = opening()?;
    // A slow machine takes longer for what follows than a handshake lives.
    flow_table::walk(&lab.node, family, |entry| {
        if is_open(entry) {
            Then::ExpiresAt(entry.expires.wrapping_add(LONG))
        } else {
            Then::Stays
        }
    })?;
    let meter = Meter::start(&lab.node)?;
    turn_over(&meter, FLOWS, from, to)?;
    ensure!(opening()? == before, "it had to go");
    meter.expect_none(Counter::TableFull)
}

/// What is over leaves at once: connections at all times, five times as many as there is room for.
#[rstest]
fn connections_that_ended_leave_their_places(#[values(V4, V6)] family: Family) -> Result<()> {
    /// At a time.
    const CLIENTS: u32 = 4;
    needs_root!();
    let lab = small()?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let meter = Meter::start(&lab.node)?;
    // Each takes two entries.
    let each = 5 * u32::from(FLOWS) / 2 / CLIENTS / patience::factor();
    let visit = |round: u32| -> Result<()> {
        let seen = tcp::Client::connect(pod.netns(), remote)
            .and_then(|mut client| client.chat(1))
            .with_context(|| format!("round {round}; counted: {:?}", meter.read()))?;
        ensure!(seen.ip() == family.node(), "{seen}");
        Ok(())
    };
    thread::scope(|scope| {
        let clients = [(); CLIENTS as usize];
        let clients = clients.map(|()| scope.spawn(|| (0..each).try_for_each(visit)));
        clients
            .into_iter()
            .try_for_each(|client| client.join().expect("a client does not panic"))
    })?;
    let made = u64::from(each * CLIENTS);
    let counted = meter.read()?;
    // Of each at least a question and its answer took the bypass.
    ensure!(
        counted.get(Counter::Masqueraded) >= made
            && counted.get(Counter::BypassWire) >= made
            && counted.get(Counter::BypassPeer) >= made
            && counted.dropped() == 0,
        "{made} connections: {counted:?}"
    );
    meter.expect_none(Counter::TableFull)
}

/// Connections of a container, until several in a row have found no place.
fn fill(pod: &Pod, remote: SocketAddr) -> Result<Vec<tcp::Client>> {
    const ENOUGH: usize = 8;
    let (mut open, mut refused) = (Vec::new(), 0);
    while refused < ENOUGH {
        ensure!(open.len() < FLOWS.into(), "all find room");
        match tcp::Client::try_connect(pod.netns(), remote, SILENCE / 4) {
            Ok(client) => {
                open.push(client);
                refused = 0;
            }
            Err(_) => refused += 1,
        }
    }
    Ok(open)
}

/// Who asks a host port from within the node is told why it gets no answer: a port was free, a place was not.
#[rstest]
fn no_room_is_told_from_no_port(
    #[values(V4, V6)] family: Family,
    #[values("process", "container")] who: &str,
) -> Result<()> {
    needs_root!();
    let lab = small()?;
    let conf = lab.conf().with_host_port(HOST, INSIDE);
    let (pod, served) = (lab.pod("a")?, lab.pod_with("b", &conf)?);
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let _open = fill(&pod, remote)?;
    let netns = if who == "process" {
        lab.node.netns()
    } else {
        served.netns()
    };
    let meter = Meter::start(&lab.node)?;
    for _ in 0..20 {
        let client = udp::Client::open(netns, family)?;
        client.send(SocketAddr::new(family.node(), HOST), b"question")?;
    }
    meter.expect(Counter::DropMapFull, 1)?;
    meter.expect_none(Counter::DropNoPort)
}

/// What is kept for the node's own flows is there for an entry that comes back, too.
#[rstest]
fn an_entry_of_the_node_comes_back(#[values(V4, V6)] family: Family) -> Result<()> {
    const SOURCE: u16 = 45_678;
    /// More than a tick.
    const APART: Duration = Duration::from_millis(2500);
    needs_root!();
    let lab = small()?;
    // Connections without a place come to an end as they can, and these two are idle meanwhile.
    lab.firewall.tolerate_invalid();
    let established = "net/netfilter/nf_conntrack_tcp_timeout_established";
    lab.node.netns().set_sysctl(established, "600")?;
    let (pod, another) = (lab.pod("a")?, lab.pod("b")?);
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut inside = tcp::Client::connect_from(pod.netns(), SOURCE, remote)?;
    inside.chat(3)?;
    thread::sleep(APART);
    let mut host = tcp::Client::connect_from(lab.node.netns(), SOURCE, remote)?;
    let seen = host.chat(3)?;
    ensure!(seen.port() != SOURCE, "{seen}");
    thread::sleep(APART);
    let _open = fill(&another, remote)?;
    let is_outer = |entry: flow_table::Entry| entry.protocol == protocol::TCP && entry.is_outer();
    let mut made = Vec::new();
    flow_table::walk(&lab.node, family, |entry| {
        if is_outer(entry) {
            made.push(entry.since);
        }
        Then::Stays
    })?;
    made.sort_unstable();
    flow_table::walk(&lab.node, family, |entry| {
        if is_outer(entry) && entry.since == made[1] {
            Then::Goes
        } else {
            Then::Stays
        }
    })?;
    ensure!(made[0] < made[1] && made[1] < made[2], "{made:?}");
    let meter = Meter::start(&lab.node)?;
    let now = host.chat(3)?;
    ensure!(now == seen, "it was {seen} and is {now}");
    // At its first packet: with those that are sent again it would find a place of others some day.
    meter.expect_none(Counter::TableFull)?;
    inside.chat(3)?;
    Ok(())
}

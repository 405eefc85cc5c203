//! The two entries of a translated flow, of which one was removed: the other brings it back as it was.

use std::{net::SocketAddr, thread, time::Duration};

use rstest::rstest;
use underpass_abi::{
    counter::Counter,
    flow::{protocol, state},
};
use underpass_tests::{
    capture::Capture,
    flow_table::{self, Entry, Then},
    frame,
    prelude::*,
    traffic::{PATIENCE, SILENCE, raw::RawLink},
    world::World,
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;

/// What is known of TCP and UDP, after the removal of what `goes` fits.
fn entries(node: &Node, family: Family, goes: impl Fn(Entry) -> bool) -> Result<Vec<Entry>> {
    let mut left = Vec::new();
    flow_table::walk(node, family, |entry| {
        if ![protocol::TCP, protocol::UDP].contains(&entry.protocol) {
            return Then::Stays;
        }
        if goes(entry) {
            return Then::Goes;
        }
        left.push(entry);
        Then::Stays
    })?;
    Ok(left)
}

/// A SYN that nobody answers is sent again, and meanwhile its outer entry was removed: it is no answer to itself.
#[rstest]
fn a_question_does_not_answer_itself(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.netns().nft(&format!(
        "table inet silence {{
            chain input {{ type filter hook input priority 0; tcp dport {PORT} drop; }}
        }}"
    ))?;
    let pod = lab.pod("a")?;
    let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
    let arrived = Capture::start(lab.world.netns(), World::LINK)?;
    let syn = pod.ends(family.remote())?.syn(SOURCE, PORT);
    let has_come = |count: usize| {
        let is_it = |bytes: &Vec<u8>| {
            frame::read(bytes).is_some_and(|seen| seen.ports == Some((SOURCE, PORT)))
        };
        arrived
            .wait_for(PATIENCE, |_| {
                arrived.frames().iter().filter(|bytes| is_it(bytes)).count() >= count
            })
            .context("a SYN did not arrive")
    };
    link.send(&syn)?;
    has_come(1)?;
    for count in 2..4 {
        let left = entries(&lab.node, family, Entry::is_outer)?;
        ensure!(left.len() == 1, "{left:x?}");
        link.send(&syn)?;
        has_come(count)?;
    }
    let left = entries(&lab.node, family, |_| false)?;
    ensure!(left.len() == 2, "{left:x?}");
    for entry in left {
        let is_none =
            entry.state & state::ANSWERED != state::ANSWERED && entry.state & state::ASSURED == 0;
        ensure!(is_none, "a SYN was taken for a conversation: {entry:x?}");
    }
    Ok(())
}

/// The pod's next packet brings it back with all that is known, and none goes astray.
#[rstest]
fn a_connection_outlives_its_outer_entry(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect_from(pod.netns(), SOURCE, remote)?;
    let seen = client.chat(5)?;
    let shared = state::ASSURED | state::BYPASS | state::STICKY;
    for _ in 0..3 {
        let left = entries(&lab.node, family, Entry::is_outer)?;
        ensure!(left.len() == 1, "{left:x?}");
        let meter = Meter::start(&lab.node)?;
        let now = client.chat(5)?;
        ensure!(now == seen, "it was {seen} and is {now}");
        let both = entries(&lab.node, family, |_| false)?;
        ensure!(
            both.len() == 2 && both.iter().all(|entry| entry.state & shared == shared),
            "{both:x?}"
        );
        meter.expect(Counter::BypassWire, 3)?;
        meter.expect(Counter::BypassPeer, 3)?;
    }
    Ok(())
}

/// Whose outer entry became another's is given another port with its next packet.
#[rstest]
fn a_flow_whose_port_is_anothers_gets_a_new_one(#[values(V4, V6)] family: Family) -> Result<()> {
    /// Longer than a flow goes unchecked.
    const TICKS: Duration = Duration::from_millis(2500);
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let remote = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), remote)?;
    let open = |pod: &Pod| udp::Client::open_at(pod.netns(), family, SOURCE);
    let (mut first, mut second) = (open(&a)?, open(&b)?);
    let kept = SocketAddr::new(family.node(), SOURCE);
    let seen = first.chat(remote, 5)?.seen;
    ensure!(seen == kept, "the first was {seen}");
    entries(&lab.node, family, Entry::is_outer)?;
    let seen = second.chat(remote, 5)?.seen;
    ensure!(seen == kept, "the second was {seen}");
    thread::sleep(TICKS);
    let seen = first.chat(remote, 5)?.seen;
    ensure!(
        seen.ip() == family.node() && seen.port() != SOURCE,
        "the first is {seen}"
    );
    let seen = second.chat(remote, 5)?.seen;
    ensure!(seen == kept, "the second is {seen}");
    Ok(())
}

/// Nor does a new connection of a pod free a port that became another's.
#[rstest]
fn a_new_connection_takes_no_port_from_another(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut first = tcp::Client::connect_from(a.netns(), SOURCE, remote)?;
    first.chat(3)?;
    first.reset()?;
    thread::sleep(SILENCE / 4);
    entries(&lab.node, family, Entry::is_outer)?;
    let mut second = tcp::Client::connect_from(b.netns(), SOURCE, remote)?;
    let seen = second.chat(3)?;
    ensure!(seen == SocketAddr::new(family.node(), SOURCE), "{seen}");
    let mut first = tcp::Client::connect_from(a.netns(), SOURCE, remote)?;
    let other = first.chat(3)?;
    ensure!(other.port() != SOURCE, "{other}");
    let now = second.chat(3)?;
    ensure!(now == seen, "it was {seen} and is {now}");
    Ok(())
}

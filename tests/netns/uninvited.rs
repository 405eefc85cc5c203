//! A server that a masqueraded pod once asked opens a connection to the pod, by the port that the pod had then: nobody has asked for that.

use std::{net::SocketAddr, thread};

use rstest::rstest;
use underpass_abi::flow::protocol;
use underpass_tests::{
    capture::Capture,
    flow_table::{self, Then},
    frame::{self, as_fragment},
    prelude::*,
    traffic::{PATIENCE, SILENCE, raw::RawLink},
    world::World,
};

const PORT: u16 = 443;
const SOURCE: u16 = 21_000;

/// Whether a frame is one from the server to the pod's port.
fn is_from_server(bytes: &[u8]) -> bool {
    frame::read(bytes).is_some_and(|seen| seen.ports == Some((PORT, SOURCE)))
}

/// A SYN of the server.
fn ask(lab: &Lab, family: Family) -> Result<()> {
    let ends = lab.ends_from_world(family.remote(), family.node())?;
    RawLink::open(lab.world.netns(), World::LINK)?.send(&ends.syn(PORT, SOURCE))
}

/// The node itself is asked, as where nobody had asked before.
#[rstest]
fn a_server_opens_no_connection_into_a_pod(
    #[values(V4, V6)] family: Family,
    #[values("closed", "reset")] end: &str,
) -> Result<()> {
    needs_root!();
    // A firewall that drops what is new would drop it as well.
    let lab = Lab::open()?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let seen = {
        let _server = tcp::Server::start(lab.world.netns(), remote)?;
        let mut client = tcp::Client::connect_from(pod.netns(), SOURCE, remote)?;
        let seen = client.chat(3)?;
        if end == "reset" {
            client.reset()?;
        }
        seen
    };
    ensure!(seen == SocketAddr::new(family.node(), SOURCE), "{seen}");
    thread::sleep(SILENCE / 4);
    let meter = Meter::start(&lab.node)?;
    {
        let _listener = tcp::Server::start(pod.netns(), family.port(SOURCE))?;
        tcp::is_refused_at(lab.world.netns(), Some(remote), seen)?;
    }
    // The node's refusal is no flow of its own that would have to make way for the pod's.
    meter.expect_none(Counter::HostTupleMoved)?;
    let mut entries = 0;
    flow_table::walk(&lab.node, family, |entry| {
        entries += u32::from(entry.protocol == protocol::TCP);
        Then::Stays
    })?;
    ensure!(entries == 2, "{entries} entries");
    // The pod may ask again.
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    tcp::Client::connect_from(pod.netns(), SOURCE, remote)?.chat(3)?;
    Ok(())
}

#[rstest]
fn a_connection_is_not_opened_twice(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::open()?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect_from(pod.netns(), SOURCE, remote)?;
    client.chat(3)?;
    thread::sleep(SILENCE / 4);
    let arrived = Capture::start(pod.netns(), Pod::IFNAME)?;
    ask(&lab, family)?;
    let seen = arrived.wait_for(SILENCE / 2, is_from_server);
    ensure!(seen.is_none(), "it was asked: {seen:02x?}");
    client.chat(3)?;
    Ok(())
}

/// Both may open one at the same time.
#[rstest]
fn a_question_that_crosses_the_pods_own_arrives(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.world.netns().nft(&format!(
        "table inet silence {{
            chain input {{ type filter hook input priority 0; tcp dport {PORT} drop; }}
        }}"
    ))?;
    let pod = lab.pod("a")?;
    let asked = Capture::start(lab.world.netns(), World::LINK)?;
    let own = pod.ends(family.remote())?.syn(SOURCE, PORT);
    RawLink::open(pod.netns(), Pod::IFNAME)?.send(&own)?;
    let is_own =
        |bytes: &[u8]| frame::read(bytes).is_some_and(|seen| seen.ports == Some((SOURCE, PORT)));
    ensure!(asked.wait_for(PATIENCE, is_own).is_some(), "nobody asks");
    let arrived = Capture::start(pod.netns(), Pod::IFNAME)?;
    ask(&lab, family)?;
    let seen = arrived.wait_for(PATIENCE, is_from_server);
    ensure!(seen.is_some(), "it did not arrive");
    Ok(())
}

/// With an answer that nobody asked for a pod does not get the questions of whom it sends that to: they are for the node.
#[rstest]
fn an_echo_reply_takes_no_pings_from_the_node(
    #[values(V4, V6)] family: Family,
    #[values("whole", "in pieces")] how: &str,
) -> Result<()> {
    const IDENTIFIER: [u8; 4] = [0x12, 0x34, 0, 1];
    needs_root!();
    // A firewall that drops what is INVALID would drop the answer as well.
    let lab = Lab::open()?;
    let pod = lab.pod("a")?;
    let (request, reply) = match family {
        V4 => (8, 0),
        V6 => (128, 129),
    };
    let meter = Meter::start(&lab.node)?;
    let answer = pod
        .ends(family.remote())?
        .icmp(reply, 0, IDENTIFIER, b"answered");
    let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
    if how == "whole" {
        link.send(&answer)?;
    } else {
        link.send(&as_fragment(&answer, 0, true))?;
        link.send(&as_fragment(&answer, 2, false))?;
    }
    eventually("the answer is dropped", || {
        meter.expect(Counter::DropNoFlow, 1)?;
        match how {
            "whole" => Ok(()),
            _ => meter.expect(Counter::DropFragment, 1),
        }
    })?;
    let inside = Capture::start(pod.netns(), Pod::IFNAME)?;
    let line = Capture::start(lab.world.netns(), World::LINK)?;
    let ends = lab.ends_from_world(family.remote(), family.node())?;
    RawLink::open(lab.world.netns(), World::LINK)?.send(&ends.icmp(
        request,
        0,
        IDENTIFIER,
        b"question",
    ))?;
    let has_come = |bytes: &[u8]| bytes.ends_with(b"question");
    let answered = line.wait_for(PATIENCE, |bytes| {
        has_come(bytes) && frame::read(bytes).is_some_and(|seen| seen.src == family.node())
    });
    ensure!(answered.is_some(), "the node does not answer");
    let stray = inside.frames().into_iter().any(|bytes| has_come(&bytes));
    ensure!(!stray, "the pod was asked");
    Ok(())
}

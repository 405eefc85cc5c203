//! A flow has to go, as any may that is no conversation, while a packet of it is in the stack: it was translated, and is no flow from the
//! world to the address that it has now.

use std::{net::SocketAddr, process::Command, thread};

use rstest::rstest;
use underpass_tests::{
    capture::Capture,
    flow_table::{self, Then},
    frame,
    prelude::*,
    traffic::{PATIENCE, SILENCE},
    world::World,
};

use super::{HOST, INSIDE, PORT};

const SOURCE: u16 = 25_678;

/// A pod whose MAC the node has forgotten, and can't find out: what is for it waits in the stack.
struct Held<'a> {
    lab: &'a Lab,
    pod: &'a Pod,
    neighbour: String,
}

impl<'a> Held<'a> {
    fn hold(lab: &'a Lab, pod: &'a Pod, family: Family) -> Result<Self> {
        /// Drops (2) whatever arrives.
        const DROP: &str = "1,6 0 0 2";
        let tc = |words: &[&str]| pod.netns().expect(Command::new("tc").args(words), &[]);
        let device = pod.host_veth();
        tc(&["qdisc", "add", "dev", Pod::IFNAME, "clsact"])?;
        let bpf = ["bpf", "direct-action", "bytecode", DROP];
        tc(&[&["filter", "add", "dev", Pod::IFNAME, "ingress"], &bpf[..]].concat())?;
        let folder = match family {
            V4 => "net/ipv4/neigh",
            V6 => "net/ipv6/neigh",
        };
        // So that it does not give up.
        lab.node
            .netns()
            .set_sysctl(&format!("{folder}/{device}/mcast_solicit"), "1000")?;
        let mac = frame::mac_text(pod.mac()?);
        let held = Self {
            lab,
            pod,
            neighbour: format!("{} dev {device} lladdr {mac}", pod.ip(family)),
        };
        held.neighbour("replace")?;
        held.neighbour("delete")?;
        Ok(held)
    }

    fn neighbour(&self, verb: &str) -> Result<()> {
        let line = format!("neighbour {verb} {}", self.neighbour);
        self.lab.node.netns().ip(&[line])
    }

    /// Has all that waits arrive.
    fn release(self) -> Result<()> {
        let mut tc = Command::new("tc");
        tc.args(["qdisc", "delete", "dev", Pod::IFNAME, "clsact"]);
        self.pod.netns().expect(&mut tc, &[])?;
        self.neighbour("replace")
    }
}

/// Has all flows of UDP make room.
fn make_room(node: &Node, family: Family) -> Result<()> {
    let mut entries = 0;
    flow_table::walk(node, family, |_| {
        entries += 1;
        Then::Goes
    })?;
    ensure!(entries == 2, "{entries} entries");
    Ok(())
}

/// Fails if anything arrived with the address of a pod.
fn shows_no_pod(line: &Capture, pod: &Pod, family: Family) -> Result<()> {
    thread::sleep(SILENCE);
    let own = pod.ip(family);
    let frames = line.frames();
    let seen: Vec<_> = frames
        .iter()
        .filter_map(|bytes| frame::read(bytes))
        .filter(|seen| seen.src == own && seen.ports.is_some())
        .collect();
    ensure!(seen.is_empty(), "with the pod's own address: {seen:?}");
    Ok(())
}

/// An answer to a masqueraded question. The pod goes on from the same port.
#[rstest]
fn an_answer_that_was_under_way_makes_no_flow_from_the_world(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), remote)?;
    let mut client = udp::Client::open_at(pod.netns(), family, SOURCE)?;
    let line = Capture::start(lab.world.netns(), World::LINK)?;
    let inside = Capture::start(pod.netns(), Pod::IFNAME)?;
    let is_answer =
        |bytes: &[u8]| frame::read(bytes).is_some_and(|seen| seen.ports == Some((PORT, SOURCE)));
    let held = Held::hold(&lab, &pod, family)?;
    client.send(remote, b"question")?;
    let early = inside.wait_for(SILENCE, is_answer);
    ensure!(early.is_none(), "the answer is there already");
    make_room(&lab.node, family)?;
    held.release()?;
    let late = inside.wait_for(PATIENCE, is_answer);
    ensure!(late.is_some(), "the answer does not come");
    let seen = client.ask_once(remote, 100)?.map(|answer| answer.seen.ip());
    shows_no_pod(&line, &pod, family)?;
    ensure!(seen == Some(family.node()), "it is {seen:?}");
    Ok(())
}

/// A question to a port of the node. What the pod says to it is of no flow that is known, as from any port of its own.
#[rstest]
fn a_question_that_was_under_way_shows_no_address(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &lab.conf().with_host_port(HOST, INSIDE))?;
    let _server = udp::Server::start(pod.netns(), pod.at(family, INSIDE))?;
    let client = udp::Client::open_at(lab.world.netns(), family, SOURCE)?;
    let line = Capture::start(lab.world.netns(), World::LINK)?;
    let inside = Capture::start(pod.netns(), Pod::IFNAME)?;
    let is_question =
        |bytes: &[u8]| frame::read(bytes).is_some_and(|seen| seen.ports == Some((SOURCE, INSIDE)));
    let held = Held::hold(&lab, &pod, family)?;
    client.send(SocketAddr::new(family.node(), HOST), b"question")?;
    let early = inside.wait_for(SILENCE, is_question);
    ensure!(early.is_none(), "the question is there already");
    make_room(&lab.node, family)?;
    held.release()?;
    let late = inside.wait_for(PATIENCE, is_question);
    ensure!(late.is_some(), "the question does not come");
    shows_no_pod(&line, &pod, family)
}

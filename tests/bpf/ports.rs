//! Ports of masquerade under load: tens of thousands of flows to one server, and pods that want more than their share.

use std::{
    collections::HashSet,
    sync::Mutex,
    time::{Duration, Instant},
};

use rstest::rstest;
use underpass_abi::{counter::Counter, map};
use underpass_tests::{
    counter::Counters,
    flow_table::{self, Then},
    frame,
    prelude::*,
    test_run::{Bench, SHOT, UNSPEC},
};

const PORT: u16 = 443;
/// A quota of half-open flows.
const LIMIT: u16 = 100;
/// How many flows of one node to one address and port there must be room for.
const MANY: usize = 60_000;
/// Entries of the largest table. Each flow has two, and there is one for each port from 1024 on.
const FLOWS: &str = "1048576";

/// How old a flow may be before time stands still for it: less than what makes a port free for others.
const YOUNG: Duration = Duration::from_secs(12);

/// The node's uplink as datagrams of pods leave by it, and answers come back.
struct Uplink<'a> {
    node: &'a Node,
    family: Family,
    out: Bench<'a>,
    back: Bench<'a>,
    answers: frame::Ends,
    renewed: Mutex<Instant>,
}

impl<'a> Uplink<'a> {
    fn of(lab: &'a Lab, family: Family) -> Result<Self> {
        Ok(Self {
            node: &lab.node,
            family,
            out: Bench::open(&lab.node, map::TO_WIRE, Node::UPLINK)?,
            back: Bench::open(&lab.node, map::FROM_WIRE, Node::UPLINK)?,
            answers: lab.ends_from_world(family.remote(), family.node())?,
            renewed: Mutex::new(Instant::now()),
        })
    }

    /// All flows stay as young as the last one, however slow the machine is that makes so many.
    fn keep_young(&self) -> Result<()> {
        let mut renewed = self.renewed.lock().expect("nobody panics with it");
        if renewed.elapsed() < YOUNG {
            return Ok(());
        }
        let mut newest = None;
        flow_table::walk(self.node, self.family, |entry| {
            newest = newest.max(Some(entry.expires));
            Then::Stays
        })?;
        flow_table::walk(self.node, self.family, |_| {
            newest.map_or(Then::Stays, Then::ExpiresAt)
        })?;
        *renewed = Instant::now();
        Ok(())
    }

    /// Sends a pod's datagram; the source port that the world sees, `None` if it was dropped.
    fn send(&self, ends: &frame::Ends, source: u16) -> Result<Option<u16>> {
        let verdict = self.out.run_here(&ends.udp(source, PORT, b"x"))?;
        if verdict.action == SHOT {
            return Ok(None);
        }
        ensure!(verdict.action == UNSPEC, "{verdict:?}");
        let packet = frame::read(&verdict.frame).context("no packet came out")?;
        ensure!(packet.src == self.answers.dst, "{packet:?}");
        Ok(packet.ports.map(|(source, _)| source))
    }

    /// Has a pod take all ports, and answers each.
    fn fill(&self, ends: &frame::Ends) -> Result<()> {
        for source in 1024..=u16::MAX {
            let port = self.send(ends, source)?.context("a free port is kept")?;
            self.answer(port)?;
            self.keep_young()?;
        }
        Ok(())
    }

    /// Answers to a port that the world sees; the port of the pod that the answer goes to.
    fn answer(&self, port: u16) -> Result<Option<u16>> {
        let verdict = self.back.run_here(&self.answers.udp(PORT, port, b"y"))?;
        let packet = frame::read(&verdict.frame).context("no packet came back")?;
        let is_known = packet.dst != self.answers.dst;
        Ok(packet.ports.map(|(_, port)| port).filter(|_| is_known))
    }
}

/// A lab whose tables hold every flow of these tests six times over.
///
/// Who inserts looks for room at random, and takes that of a flow which is no conversation yet after some looks in vain: half full, a
/// table gives up one in some hundred thousand of them, and its port to somebody else.
fn roomy() -> Result<Lab> {
    let lab = Lab::unloaded()?;
    lab.node.underpass(&["load", "--flows", FLOWS])?;
    Ok(lab)
}

#[rstest]
fn sixty_thousand_flows_to_one_server_have_ports_of_their_own(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = roomy()?;
    let pods = [lab.pod("a")?, lab.pod("b")?];
    let uplink = Uplink::of(&lab, family)?;
    let ends: Vec<_> = pods
        .iter()
        .map(|pod| pod.ends(family.remote()))
        .collect::<Result<_>>()?;
    let before = Counters::read(&lab.node)?;
    let mut seen = HashSet::new();
    let mut lost = 0;
    // The second pod wants the ports that the first has: every one of its flows needs another.
    lab.node.netns().run(|| {
        let wanted = (1024..=u16::MAX).take(MANY / 2);
        for (source, ends) in wanted.flat_map(|source| ends.iter().map(move |ends| (source, ends)))
        {
            let Some(port) = uplink.send(ends, source)? else {
                lost += 1;
                continue;
            };
            ensure!(seen.insert(port), "port {port} was given twice");
            ensure!(
                uplink.answer(port)? == Some(source),
                "the answer to {port} went astray"
            );
            uplink.keep_young()?;
        }
        Ok(())
    })?;
    let counted = Counters::read(&lab.node)?.since(&before);
    ensure!(
        seen.len() == MANY && lost == 0,
        "{} flows, {lost} lost: {counted:?}",
        seen.len()
    );
    ensure!(counted.dropped() == 0, "{counted:?}");
    Ok(())
}

#[rstest]
fn running_out_of_ports_is_a_counted_drop_and_nothing_else(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = roomy()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let uplink = Uplink::of(&lab, family)?;
    let before = Counters::read(&lab.node)?;
    lab.node.netns().run(|| {
        let ends = a.ends(family.remote())?;
        uplink.fill(&ends)?;
        let ends = b.ends(family.remote())?;
        for source in [1024, 5000, u16::MAX] {
            ensure!(uplink.send(&ends, source)?.is_none(), "all ports are taken");
        }
        // Ports below 1024 are kept, other servers have all ports, and the flows that there are go on.
        ensure!(uplink.send(&ends, 500)? == Some(500));
        let other = b.ends(family.other_remote())?;
        ensure!(uplink.send(&other, 5000)? == Some(5000));
        let ends = a.ends(family.remote())?;
        ensure!(uplink.send(&ends, 5000)? == Some(5000));
        ensure!(uplink.answer(5000)? == Some(5000));
        anyhow::Ok(())
    })?;
    let counted = Counters::read(&lab.node)?.since(&before);
    ensure!(
        counted.get(Counter::DropNoPort) == 3 && counted.dropped() == 3,
        "{counted:?}"
    );
    Ok(())
}

/// Where all ports are taken, those of questions that were answered half a minute ago are given to others, and no conversation's.
#[rstest]
fn ports_of_silent_flows_are_given_away_at_last(#[values(V4, V6)] family: Family) -> Result<()> {
    /// A port of a conversation.
    const BUSY: u16 = 5000;
    /// Until a datagram makes a conversation of a question and its answer.
    const STREAM: Duration = Duration::from_secs(3);
    needs_root!();
    let lab = roomy()?;
    let (a, b) = (lab.pod("a")?, lab.pod("b")?);
    let uplink = Uplink::of(&lab, family)?;
    let meter = Meter::start(&lab.node)?;
    let (ends, others) = (a.ends(family.remote())?, b.ends(family.remote())?);
    let send = |ends, source| lab.node.netns().run(|| uplink.send(ends, source));
    let answer = |port| lab.node.netns().run(|| uplink.answer(port));
    lab.node.netns().run(|| uplink.fill(&ends))?;
    std::thread::sleep(STREAM);
    ensure!(send(&ends, BUSY)? == Some(BUSY) && answer(BUSY)? == Some(BUSY));
    ensure!(send(&others, BUSY)?.is_none(), "all ports are taken");
    meter.expect(Counter::DropNoPort, 1)?;

    // A tick is a second, more or less.
    flow_table::walk(&lab.node, family, |entry| {
        Then::ExpiresAt(entry.expires.wrapping_sub(45))
    })?;
    for source in 2000..2100 {
        let port = send(&others, source)?.context("a port that nobody uses")?;
        ensure!(port != BUSY, "it is a conversation's");
        ensure!(
            answer(port)? == Some(source),
            "the answer to {port} went astray"
        );
    }
    ensure!(send(&ends, BUSY)? == Some(BUSY) && answer(BUSY)? == Some(BUSY));
    meter.expect_none(Counter::Expired)?;
    meter.expect(Counter::MadeRoom, 100)?;
    let counted = meter.read()?;
    ensure!(counted.dropped() == 1, "{counted:?}");
    Ok(())
}

#[rstest]
fn a_pod_that_floods_fills_its_own_quota(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("maxHalfOpenFlows", LIMIT);
    let (flood, other) = (lab.pod_with("a", &conf)?, lab.pod_with("b", &conf)?);
    let uplink = Uplink::of(&lab, family)?;
    let meter = Meter::start(&lab.node)?;
    let ports = |pod: &Pod, sources: std::ops::Range<u16>, answered: bool| -> Result<usize> {
        let ends = pod.ends(family.remote())?;
        lab.node.netns().run(|| {
            let mut count = 0;
            for source in sources {
                if let Some(port) = uplink.send(&ends, source)? {
                    count += 1;
                    if answered {
                        ensure!(uplink.answer(port)? == Some(source), "no answer to {port}");
                    }
                }
            }
            Ok(count)
        })
    };
    // The quota comes back by and by: what is a second of it may be gone by the end.
    let unanswered = ports(&flood, 2000..4000, false)?;
    let limit = usize::from(LIMIT);
    ensure!(
        (limit..limit + 20).contains(&unanswered),
        "{unanswered} flows"
    );
    meter.expect(Counter::DropFlowQuota, 1900 - 20)?;
    // Answered flows do not count, and nobody else is concerned.
    ensure!(ports(&other, 2000..4000, true)? == 2000);
    let more = ports(&flood, 2000..2050, false)?;
    ensure!(more == 50, "flows that there are go on: {more}");
    meter.expect_none(Counter::DropNoPort)
}

//! Ten tables full of questions, each of them a flow of its own that was answered, and who outlives them.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    ops::Range,
    thread,
    time::Duration,
};

use rstest::rstest;
use underpass_tests::{
    capture::Capture,
    frame,
    prelude::*,
    traffic::{self, SILENCE, raw::RawLink},
    world::World,
};

use super::{FLOWS, HOST, INSIDE, PORT, small};

/// Where the questions are asked from: ten times as many ports as the table has entries.
const PORTS: Range<u16> = 10_000..10_000 + 10 * FLOWS;

/// The same as the rules of a firewall have it.
pub(super) fn ports() -> String {
    format!("{}-{}", PORTS.start, PORTS.end - 1)
}

/// Asks once from each of [`PORTS`], and again from those where no answer came, until each was answered: by frames from `asked` that arrive
/// on a line.
pub(super) fn ask_from_all(
    line: &Capture,
    asked: u16,
    ask: impl Fn(u16) -> Result<()>,
) -> Result<()> {
    // Whom nobody answered yet is held to a quota of 32: how many questions become flows depends on how soon they are answered.
    const ROUNDS: usize = 50;
    /// Questions in a row.
    const ROW: usize = 16;
    let mut left: Vec<u16> = PORTS.collect();
    for _ in 0..ROUNDS {
        for row in left.chunks(ROW) {
            row.iter().try_for_each(|&port| ask(port))?;
            thread::sleep(Duration::from_micros(500));
        }
        thread::sleep(SILENCE / 8);
        let frames = line.frames();
        let ports = frames
            .iter()
            .filter_map(|bytes| frame::read(bytes)?.ports)
            .filter(|(from, _)| *from == asked);
        let answered: BTreeSet<u16> = ports.map(|(_, to)| to).collect();
        left.retain(|port| !answered.contains(port));
        if left.is_empty() {
            return Ok(());
        }
    }
    anyhow::bail!("{} of {} were not answered", left.len(), PORTS.len())
}

/// Fails unless nearly all of these flows have given their places to those that came after them.
pub(super) fn is_turned_over(meter: &Meter<'_>) -> Result<()> {
    let counted = meter.read()?;
    let made = counted.get(Counter::MadeRoom) + counted.get(Counter::Expired);
    ensure!(
        made > 9 * u64::from(FLOWS),
        "{made} places were given to others: {counted:?}"
    );
    Ok(())
}

/// A stranger's address.
fn stranger(family: Family, number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    match family {
        V4 => [203, 0, high, low].into(),
        V6 => [0x2001, 0xdb8, 0x99, 0, 0, 0, 0, number].into(),
    }
}

/// A pod answers whoever asks the port of the node that leads to it, and each question has another source, which nobody needs to be at. The
/// connections of other pods say nothing meanwhile, and who comes afterwards finds a place.
#[rstest]
fn strangers_that_a_host_port_answers_push_nobody_out(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = small()?;
    let attacked = lab.pod_with("a", &lab.conf().with_host_port(HOST, INSIDE))?;
    let mapped = lab.pod_with("b", &lab.conf().with_host_port(HOST + 1, INSIDE))?;
    let other = lab.pod("c")?;
    let remote = family.remote_at(PORT);
    let _world = traffic::serve(lab.world.netns(), remote)?;
    // It would say of answers to strangers that there is no way, when nobody knows their flows any more.
    lab.world.netns().nft(
        "table inet quiet {
            chain output {
                type filter hook output priority 0;
                meta l4proto { icmp, icmpv6 } th sport { 0x0100-0x01ff, 0x0300-0x03ff } drop;
            }
        }",
    )?;
    let _answering = traffic::serve(attacked.netns(), family.port(INSIDE))?;
    let _serving = tcp::Server::start(mapped.netns(), family.port(INSIDE))?;
    let connect = |from, to| tcp::Client::connect(from, to);
    let at = |port| SocketAddr::new(family.node(), port);
    let mut idle = [
        connect(other.netns(), remote)?,
        connect(other.netns(), mapped.at(family, INSIDE))?,
        connect(lab.world.netns(), at(HOST + 1))?,
        connect(attacked.netns(), remote)?,
    ];
    for client in &mut idle {
        client.chat(5)?;
    }
    let meter = Meter::start(&lab.node)?;
    let line = Capture::start(lab.world.netns(), World::LINK)?;
    let link = RawLink::open(lab.world.netns(), World::LINK)?;
    let from_world = lab.ends_from_world(family.gateway(), family.node())?;
    ask_from_all(&line, HOST, |from| {
        let ends = from_world.from_ip(stranger(family, from));
        link.send(&ends.udp(from, HOST, b"question"))
    })
    .with_context(|| format!("counted: {:?}", meter.read()))?;
    is_turned_over(&meter)?;
    for (number, client) in idle.iter_mut().enumerate() {
        client
            .chat(5)
            .with_context(|| format!("idle connection {number}; counted: {:?}", meter.read()))?;
    }
    for (from, to) in [
        (other.netns(), remote),
        (lab.world.netns(), at(HOST + 1)),
        (lab.world.netns(), at(HOST)),
    ] {
        tcp::visit(from, to).with_context(|| format!("afterwards; counted: {:?}", meter.read()))?;
    }
    meter.expect_none(Counter::TableFull)
}

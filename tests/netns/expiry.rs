//! Flows that were idle for longer than their timeout: gone for all that comes after, whether anybody removed them or not.

use std::{net::SocketAddr, sync::Arc, thread};

use rstest::rstest;
use underpass_abi::{counter::Counter, flow::protocol};
use underpass_tests::{
    capture::Capture,
    flow_table::{self, Entry, Then},
    frame,
    prelude::*,
    traffic::{PATIENCE, SILENCE, raw::RawLink},
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;

/// Ticks that no timeout has, and half of the numbers that a tick can be.
const LONG_AGO: u32 = 1 << 30;

/// Which of the two entries of a masqueraded flow have expired.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Entries {
    Both,
    Inner,
    Outer,
}

impl Entries {
    fn has(self, entry: Entry) -> bool {
        match self {
            Self::Both => true,
            Self::Inner => !entry.is_outer(),
            Self::Outer => entry.is_outer(),
        }
    }
}

/// Has the UDP flows of a node be as if they were idle since long ago.
fn expire(node: &Node, family: Family, entries: Entries) -> Result<()> {
    let mut changed = 0;
    flow_table::walk(node, family, |entry| {
        if entry.protocol != protocol::UDP || !entries.has(entry) {
            return Then::Stays;
        }
        changed += 1;
        Then::ExpiresAt(entry.expires.wrapping_sub(LONG_AGO))
    })?;
    let expected = if entries == Entries::Both { 2 } else { 1 };
    ensure!(changed == expected, "{changed} entries of {entries:?}");
    Ok(())
}

/// A container that talks to a server in the world past the stack.
struct Scene {
    _server: udp::Server,
    client: udp::Client,
    pod: Pod,
    lab: Lab,
    remote: SocketAddr,
}

impl Scene {
    fn set(family: Family) -> Result<Self> {
        let lab = Lab::new()?;
        let pod = lab.pod("a")?;
        let remote = family.remote_at(PORT);
        let mut scene = Self {
            _server: udp::Server::start(lab.world.netns(), remote)?,
            client: udp::Client::open_at(pod.netns(), family, SOURCE)?,
            pod,
            lab,
            remote,
        };
        scene.chat(SOURCE)?;
        Ok(scene)
    }

    /// The flow goes past the stack, and the world sees that port.
    fn chat(&mut self, port: u16) -> Result<()> {
        let meter = Meter::start(&self.lab.node)?;
        let seen = self.client.chat(self.remote, 5)?.seen;
        let family = Family::of(self.remote.ip());
        ensure!(seen == SocketAddr::new(family.node(), port), "seen {seen}");
        meter.expect(Counter::BypassWire, 3)?;
        meter.expect(Counter::BypassPeer, 3)
    }
}

#[rstest]
fn an_expired_flow_begins_anew(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let mut scene = Scene::set(family)?;
    let node = Arc::clone(&scene.lab.node);
    let meter = Meter::start(&node)?;
    scene.chat(SOURCE)?;
    meter.expect_none(Counter::Expired)?;
    meter.expect_none(Counter::Masqueraded)?;
    expire(&node, family, Entries::Both)?;
    scene.chat(SOURCE)?;
    meter.expect(Counter::Expired, 1)?;
    meter.expect(Counter::Masqueraded, 1)?;
    let counted = meter.read()?;
    ensure!(
        counted.get(Counter::Masqueraded) == 1 && counted.dropped() == 0,
        "{counted:?}"
    );
    Ok(())
}

/// A long download without acknowledgements prolongs one entry alone.
#[rstest]
fn one_entry_keeps_the_other_alive(
    #[values(V4, V6)] family: Family,
    #[values(Entries::Inner, Entries::Outer)] entries: Entries,
) -> Result<()> {
    needs_root!();
    let mut scene = Scene::set(family)?;
    let node = Arc::clone(&scene.lab.node);
    let meter = Meter::start(&node)?;
    expire(&node, family, entries)?;
    scene.chat(SOURCE)?;
    meter.expect_none(Counter::Expired)?;
    meter.expect_none(Counter::Masqueraded)
}

#[rstest]
fn what_comes_too_late_does_not_reach_the_pod(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let mut scene = Scene::set(family)?;
    let node = Arc::clone(&scene.lab.node);
    let capture = Capture::start(scene.pod.netns(), Pod::IFNAME)?;
    let ends = scene.lab.ends_from_world(family.remote(), family.node())?;
    let world = RawLink::open(scene.lab.world.netns(), "eth0")?;
    let late = || world.send(&ends.udp(PORT, SOURCE, b"late"));
    let has_come = |bytes: &[u8]| {
        frame::read(bytes).is_some_and(|packet| packet.ports == Some((PORT, SOURCE)))
    };
    late()?;
    let came = capture.wait_for(PATIENCE, has_come);
    ensure!(came.is_some(), "a flow that lives is answered");
    let before = capture.frames().len();
    let meter = Meter::start(&node)?;
    expire(&node, family, Entries::Both)?;
    late()?;
    meter.expect(Counter::Expired, 1)?;
    thread::sleep(SILENCE / 4);
    let later = capture.frames().split_off(before);
    ensure!(!later.iter().any(|bytes| has_come(bytes)), "{later:02x?}");
    scene.chat(SOURCE)
}

#[rstest]
fn the_port_of_an_expired_flow_is_free(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let mut scene = Scene::set(family)?;
    let node = Arc::clone(&scene.lab.node);
    let another = scene.lab.pod("b")?;
    expire(&node, family, Entries::Both)?;
    let meter = Meter::start(&node)?;
    let mut client = udp::Client::open_at(another.netns(), family, SOURCE)?;
    let seen = client.chat(scene.remote, 3)?.seen;
    ensure!(
        seen == SocketAddr::new(family.node(), SOURCE),
        "seen {seen}"
    );
    meter.expect(Counter::Expired, 1)?;
    meter.expect_none(Counter::PortChanged)?;
    // Who was idle for too long is the second now.
    let seen = scene.client.chat(scene.remote, 3)?.seen;
    ensure!(
        seen.ip() == family.node() && seen.port() != SOURCE,
        "seen {seen}"
    );
    scene.chat(seen.port())?;
    let seen = client.chat(scene.remote, 3)?.seen;
    ensure!(
        seen == SocketAddr::new(family.node(), SOURCE),
        "seen {seen}"
    );
    meter.expect_none(Counter::DropNoPort)
}

/// Who vanishes does not answer the FIN, and no RST comes: what is left is no conversation for a day.
#[rstest]
fn a_connection_that_one_end_has_closed_does_not_stay(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    /// Ticks, of about a second: more than the four minutes that a handshake or an end may take, with what the test takes.
    const SHORT: u32 = 600;
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let mut client = tcp::Client::connect(pod.netns(), remote)?;
    client.chat(20)?;
    let lives = || flow_table::lives(&lab.node, family, protocol::TCP);
    let before = lives()?;
    ensure!(
        before.len() == 2 && before.iter().all(|ticks| *ticks > SHORT),
        "{before:?}"
    );
    lab.world.netns().ip(&["link set eth0 down".to_owned()])?;
    drop(client);
    eventually("it ends", || {
        let left = lives()?;
        ensure!(left.iter().all(|ticks| *ticks < SHORT), "{left:?}");
        Ok(())
    })
}

/// A pod's quota counts questions that nobody answers for as long as they are remembered. Who asks again and again has no more of them for that.
#[rstest]
fn what_nobody_answers_is_not_kept_by_asking_again(#[values(V4, V6)] family: Family) -> Result<()> {
    /// Ticks: more than the quota goes by, and less than one that is asked again would live otherwise.
    const AGO: u32 = 140;
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let client = udp::Client::open_at(pod.netns(), family, SOURCE)?;
    // Nobody is there.
    let remote = family.remote_at(PORT);
    let meter = Meter::start(&lab.node)?;
    let ask = || client.send(remote, b"anybody?");
    ask()?;
    meter.expect(Counter::Masqueraded, 1)?;
    ask()?;
    flow_table::walk(&lab.node, family, |entry| {
        Then::MadeAt(entry.since.wrapping_sub(AGO))
    })?;
    eventually("it is charged for again", || {
        ask()?;
        let counted = meter.read()?;
        ensure!(counted.get(Counter::Masqueraded) > 1, "{counted:?}");
        Ok(())
    })?;
    // Who is answered is asked on.
    let _server = udp::Server::start(lab.world.netns(), remote)?;
    let mut client = udp::Client::open(pod.netns(), family)?;
    client.chat(remote, 3)?;
    let before = meter.read()?.get(Counter::Masqueraded);
    flow_table::walk(&lab.node, family, |entry| {
        Then::MadeAt(entry.since.wrapping_sub(AGO))
    })?;
    client.chat(remote, 10)?;
    let after = meter.read()?.get(Counter::Masqueraded);
    ensure!(after == before, "{after} after {before}");
    Ok(())
}

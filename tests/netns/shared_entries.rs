//! Two flows in one entry: a pod's, and one of the host that was given another port because the pod's has its tuple. Whatever becomes of
//! the first, the second goes on.

use std::{net::SocketAddr, thread};

use rstest::rstest;
use underpass_abi::flow::{protocol, state};
use underpass_tests::{
    flow_table::{self, Then},
    prelude::*,
    traffic::{SILENCE, raw::RawLink},
    world::World,
};

use crate::full_table::{FLOWS, small, turn_over};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;

/// A pod and its node that have connected to one server from the same port.
struct Scene {
    _server: tcp::Server,
    host: tcp::Client,
    /// As whom the server sees the host.
    seen: SocketAddr,
    pod: Pod,
    lab: Lab,
}

impl Scene {
    /// With the pod's connection.
    fn set(family: Family) -> Result<(Self, tcp::Client)> {
        Self::set_in(Lab::new()?, family)
    }

    fn set_in(lab: Lab, family: Family) -> Result<(Self, tcp::Client)> {
        let pod = lab.pod("a")?;
        let remote = family.remote_at(PORT);
        let server = tcp::Server::start(lab.world.netns(), remote)?;
        let meter = Meter::start(&lab.node)?;
        let mut inside = tcp::Client::connect_from(pod.netns(), SOURCE, remote)?;
        let seen = inside.chat(3)?;
        ensure!(seen == SocketAddr::new(family.node(), SOURCE), "{seen}");
        let mut host = tcp::Client::connect_from(lab.node.netns(), SOURCE, remote)?;
        let seen = host.chat(3)?;
        ensure!(seen.port() != SOURCE, "{seen}");
        meter.expect(Counter::HostTupleMoved, 1)?;
        let scene = Self {
            _server: server,
            host,
            seen,
            pod,
            lab,
        };
        Ok((scene, inside))
    }

    fn host_goes_on(&mut self) -> Result<()> {
        let seen = self.host.chat(3).context("the node's own connection")?;
        ensure!(seen == self.seen, "it was {} and is {seen}", self.seen);
        Ok(())
    }
}

/// Each of the two is a conversation, with the timeout of one.
#[rstest]
fn the_hosts_connection_is_a_conversation(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let (mut scene, mut inside) = Scene::set(family)?;
    scene.host_goes_on()?;
    inside.chat(3)?;
    let mut assured = Vec::new();
    flow_table::walk(&scene.lab.node, family, |entry| {
        if entry.protocol == protocol::TCP {
            assured.push(entry.state & state::ASSURED != 0);
        }
        Then::Stays
    })?;
    ensure!(assured == [true; 3], "{assured:?}");
    Ok(())
}

#[rstest]
fn a_pod_that_connects_again_takes_nothing_from_the_host(
    #[values(V4, V6)] family: Family,
    #[values("closed", "reset")] end: &str,
) -> Result<()> {
    needs_root!();
    let (mut scene, mut inside) = Scene::set(family)?;
    for _ in 0..3 {
        match end {
            "reset" => inside.reset()?,
            _ => drop(inside),
        }
        thread::sleep(SILENCE / 4);
        let remote = family.remote_at(PORT);
        inside = tcp::Client::connect_from(scene.pod.netns(), SOURCE, remote)?;
        inside.chat(3)?;
        scene.host_goes_on()?;
    }
    Ok(())
}

#[rstest]
fn a_pod_that_goes_takes_nothing_from_the_host(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let (mut scene, _inside) = Scene::set(family)?;
    // What is still on its way to the pod, connection tracking knows no more.
    scene.lab.firewall.tolerate_invalid();
    let ends = scene.lab.ends_from_world(family.remote(), family.node())?;
    scene.pod.call("DEL").run(&scene.lab.node)?.silence()?;
    let link = RawLink::open(scene.lab.world.netns(), World::LINK)?;
    for _ in 0..3 {
        link.send(&ends.ack(PORT, SOURCE, b"late"))?;
    }
    thread::sleep(SILENCE / 4);
    for _ in 0..3 {
        scene.host_goes_on()?;
    }
    Ok(())
}

/// The pod closes its connection and goes, and nothing comes for it any more, while the node's own says nothing: others who need places find the entry, which
/// has expired as far as the pod's is concerned.
#[rstest]
fn who_needs_a_place_takes_nothing_from_the_host(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let (mut scene, inside) = Scene::set_in(small()?, family)?;
    // Connection tracking forgets nothing meanwhile.
    let established = "net/netfilter/nf_conntrack_tcp_timeout_established";
    scene.lab.node.netns().set_sysctl(established, "600")?;
    scene.host_goes_on()?;
    drop(inside);
    thread::sleep(SILENCE / 4);
    scene.pod.call("DEL").run(&scene.lab.node)?.silence()?;
    let mut expired = 0;
    flow_table::walk(&scene.lab.node, family, |entry| {
        let is_closed = entry.state & state::FINISHED == state::FINISHED;
        if entry.protocol == protocol::TCP && entry.is_outer() && is_closed {
            expired += 1;
            return Then::ExpiresAt(entry.since.wrapping_sub(1));
        }
        Then::Stays
    })?;
    ensure!(expired == 1, "{expired} entries");
    let other = scene.lab.pod("b")?;
    let meter = Meter::start(&scene.lab.node)?;
    turn_over(&meter, FLOWS, other.netns(), family.remote_at(PORT))?;
    scene.host_goes_on()
}

//! Two flows in one entry: a pod's, and one of the host that was given another port because the pod's has its tuple. Whatever becomes of
//! the first, the second goes on.

use std::{net::SocketAddr, thread};

use anyhow::{Context as _, Result, ensure};
use rstest::rstest;
use underpass_abi::counter::Counter;
use underpass_tests::{
    Family::{self, V4, V6},
    Lab, Pod,
    counter::Meter,
    needs_root,
    traffic::{SILENCE, option::Setting, raw::RawLink, tcp},
    world::World,
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;

/// A pod and its node, connected to one server from the same port.
struct Scene {
    _server: tcp::Server,
    inside: tcp::Client,
    host: tcp::Client,
    /// As whom the server sees the host.
    seen: SocketAddr,
    pod: Pod,
    lab: Lab,
}

impl Scene {
    fn set(family: Family) -> Result<Self> {
        let lab = Lab::new()?;
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
        meter.expect(Counter::HostPortMoved, 1)?;
        Ok(Self {
            _server: server,
            inside,
            host,
            seen,
            pod,
            lab,
        })
    }

    fn host_goes_on(&mut self) -> Result<()> {
        let seen = self.host.chat(3).context("the node's own connection")?;
        ensure!(seen == self.seen, "it was {} and is {seen}", self.seen);
        Ok(())
    }
}

#[rstest]
fn a_pod_that_connects_again_takes_nothing_from_the_host(
    #[values(V4, V6)] family: Family,
    #[values("closed", "reset")] end: &str,
) -> Result<()> {
    needs_root!();
    let mut scene = Scene::set(family)?;
    for _ in 0..3 {
        if end == "reset" {
            scene.inside.set(&[Setting::no_linger()])?;
        }
        let remote = family.remote_at(PORT);
        let Scene { pod, inside, .. } = &mut scene;
        // Its own kernel keeps the port for a while after an ordinary end.
        let port = if end == "reset" { SOURCE } else { 0 };
        drop(std::mem::replace(
            inside,
            tcp::Client::connect(pod.netns(), remote)?,
        ));
        thread::sleep(SILENCE / 4);
        *inside = tcp::Client::connect_from(pod.netns(), port, remote)?;
        scene.inside.chat(3)?;
        scene.host_goes_on()?;
    }
    Ok(())
}

#[rstest]
fn a_pod_that_goes_takes_nothing_from_the_host(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let mut scene = Scene::set(family)?;
    // What is still on its way to the pod, connection tracking knows no more.
    scene.lab.firewall.tolerate_invalid();
    let ends = scene.lab.ends_from_world(family.remote(), family.node())?;
    let Scene { pod, lab, .. } = &mut scene;
    let netns = pod.netns().clone();
    pod.call("DEL").run(&lab.node)?.silence()?;
    let link = RawLink::open(lab.world.netns(), World::LINK)?;
    for _ in 0..3 {
        link.send(&ends.ack(PORT, SOURCE, b"late"))?;
    }
    thread::sleep(SILENCE / 4);
    drop(netns);
    for _ in 0..3 {
        scene.host_goes_on()?;
    }
    Ok(())
}

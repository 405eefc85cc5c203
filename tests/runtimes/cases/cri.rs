//! containerd by its CRI, as a kubelet calls it.

use std::net::SocketAddr;

use underpass_runtimes::{
    Containerd, Running,
    containerd::{End, Pod, port},
    cri::{PortMapping, Protocol},
    plugins, skipped,
};
use underpass_tests::prelude::*;

use crate::{
    reach,
    scene::{ECHO, ECHO_INSIDE, Scene, WEB, WEB_INSIDE, server},
};

const PROGRAMS: [&str; 3] = ["containerd", "ctr", "runc"];

/// A node with containerd, which has a network.
fn set() -> Result<(Scene, Containerd)> {
    let scene = Scene::set()?;
    let containerd = Containerd::start(scene.cage()?)?;
    containerd.join(&plugins::with_ports())?;
    Ok((scene, containerd))
}

fn ports() -> Vec<PortMapping> {
    vec![
        port(Protocol::Tcp, WEB, WEB_INSIDE),
        port(Protocol::Tcp, ECHO, ECHO_INSIDE),
        port(Protocol::Udp, ECHO, ECHO_INSIDE),
    ]
}

fn start(containerd: &Containerd, name: &str, ports: Vec<PortMapping>) -> Result<Pod> {
    Pod::start(
        containerd,
        name,
        ports,
        &server(name).each_ref().map(String::as_str),
    )
    .with_context(|| format!("its log:\n{}", containerd.log()))
}

#[test]
fn a_pod_with_host_ports_is_reached_from_everywhere() -> Result<()> {
    if skipped(&PROGRAMS) {
        return Ok(());
    }
    let (scene, containerd) = set()?;
    let pod = start(&containerd, "web", ports())?;
    reach::everywhere(&scene.lab, &pod.running(containerd.cage())?, "web")?;
    // Another pod of the node, by the host port and by the pod's own address.
    let other = start(&containerd, "other", Vec::new())?;
    let (web, client) = (
        pod.running(containerd.cage())?,
        other.running(containerd.cage())?,
    );
    for family in Family::BOTH {
        reach::serves(client.netns(), reach::web(family), "web")?;
        reach::serves(
            client.netns(),
            SocketAddr::new(web.ip(family), WEB_INSIDE),
            "web",
        )?;
    }
    drop((web, client));
    scene.has(2)?;
    pod.remove()?;
    reach::is_gone(&scene.lab)?;
    other.remove()?;
    scene.is_clean()?;
    containerd.destroy()
}

/// Connections from the world to a pod, by its host port and in both families, and the servers in the pod's namespace.
struct Conversations {
    clients: Vec<tcp::Client>,
    _servers: Vec<tcp::Server>,
}

impl Conversations {
    fn open(scene: &Scene, pod: &Running<'_>) -> Result<Self> {
        let (mut clients, mut servers) = (Vec::new(), Vec::new());
        for family in Family::BOTH {
            let inside = SocketAddr::new(pod.ip(family), ECHO_INSIDE);
            servers.push(tcp::Server::start(pod.netns(), inside)?);
            let world = scene.lab.world.netns();
            clients.push(tcp::Client::connect(world, reach::echo(family))?);
        }
        Ok(Self {
            clients,
            _servers: servers,
        })
    }

    fn go_on(&mut self) -> Result<()> {
        let mut clients = self.clients.iter_mut();
        clients.try_for_each(|client| client.chat(5).map(drop))
    }
}

#[test]
fn pods_outlive_the_daemon() -> Result<()> {
    if skipped(&PROGRAMS) {
        return Ok(());
    }
    let (scene, mut containerd) = set()?;
    let pod = start(&containerd, "web", ports())?;
    let other = start(&containerd, "other", Vec::new())?;
    for how in [End::Term, End::Kill] {
        let running = pod.running(containerd.cage())?;
        reach::is_serving(&running, "web")?;
        let mut conversations = Conversations::open(&scene, &running)?;
        drop(running);
        conversations.go_on()?;
        containerd.stop(how)?;
        conversations.go_on().context("without daemon")?;
        for family in Family::BOTH {
            reach::serves(scene.lab.world.netns(), reach::web(family), "web")?;
        }
        containerd.resume()?;
        conversations.go_on().context("with the next daemon")?;
        drop(conversations);
        reach::everywhere(&scene.lab, &pod.running(containerd.cage())?, "web")?;
    }
    scene.has(2)?;
    pod.remove()?;
    other.remove()?;
    scene.is_clean()?;
    containerd.destroy()
}

#[test]
fn a_pod_that_died_without_daemon_is_removed_by_the_next() -> Result<()> {
    if skipped(&PROGRAMS) {
        return Ok(());
    }
    let (scene, mut containerd) = set()?;
    let pod = start(&containerd, "web", ports())?;
    reach::is_serving(&pod.running(containerd.cage())?, "web")?;
    containerd.stop(End::Kill)?;
    containerd.cage().kill_all("busybox")?;
    containerd.resume()?;
    pod.remove()?;
    scene.is_clean()?;
    containerd.destroy()
}

#[test]
fn the_network_is_ready_once_there_is_one() -> Result<()> {
    if skipped(&PROGRAMS) {
        return Ok(());
    }
    let scene = Scene::set()?;
    let containerd = Containerd::start(scene.cage()?)?;
    let before = containerd.cri().network()?;
    ensure!(
        !before.status && before.reason == "NetworkPluginNotReady",
        "{before:?}"
    );
    containerd.join(&plugins::with_ports())?;
    let after = containerd.cri().network()?;
    ensure!(after.status && after.message.is_empty(), "{after:?}");
    // That it is ready is no mere word.
    let pod = start(&containerd, "web", Vec::new())?;
    for family in Family::BOTH {
        reach::to_the_world(&scene.lab, &pod.running(containerd.cage())?, family)?;
    }
    pod.remove()?;
    scene.is_clean()?;
    containerd.destroy()
}

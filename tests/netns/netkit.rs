//! Containers on a netkit pair instead of a veth. The whole suite runs with it by `cargo xtask test vm newest --device netkit`; here is
//! what is different about it.

use std::net::SocketAddr;

use rstest::rstest;
use underpass_tests::{
    counter::pins,
    frame::Ends,
    kernel::Facility,
    leak::Traces,
    prelude::*,
    program::detach_from_netkit,
    runtime::{Call, Conf},
    traffic::{raw::RawLink, serve},
};

const PORT: u16 = 8080;
const INSIDE: u16 = 80;

fn conf(lab: &Lab, device: &str) -> Conf {
    lab.conf().with("device", device)
}

/// The driver of a pod's device on the node.
fn driver(lab: &Lab, pod: &Pod) -> Result<String> {
    let name = pod.host_veth();
    let links = lab
        .node
        .netns()
        .ip_json(&["-details", "link", "show", "dev", name])?;
    let kind = links[0]["linkinfo"]["info_kind"].as_str();
    Ok(kind
        .with_context(|| format!("no kind: {links}"))?
        .to_owned())
}

/// On every kernel: it is used where it is there, and said where it is not.
#[test]
fn the_plugin_knows_whether_there_is_netkit() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let is_there = Facility::Netkit.refusal()?.is_none();
    for (device, expected) in [
        ("veth", "veth"),
        ("auto", if is_there { "netkit" } else { "veth" }),
    ] {
        let pod = lab.pod_with(device, &conf(&lab, device))?;
        let driver = driver(&lab, &pod)?;
        ensure!(driver == expected, "{device}: {driver}");
        pod.del()?;
    }
    let asked = conf(&lab, "netkit");
    let status = Call::new("STATUS").conf(&asked);
    if is_there {
        status.run(&lab.node)?.silence()?;
        let pod = lab.pod_with("a", &asked)?;
        ensure!(driver(&lab, &pod)? == "netkit");
        return pod.del();
    }
    let traces = Traces::of(&lab.node)?;
    let error = status.run(&lab.node)?.error()?;
    ensure!(error.code == 50 && error.msg.contains("netkit"), "{error}");
    let netns = lab.node.netns().sibling("a")?;
    let error = Call::new("ADD")
        .attachment("a", &netns.path().display().to_string(), Pod::IFNAME)
        .conf(&asked)
        .run(&lab.node)?
        .error()?;
    ensure!(
        error.code == 7 && error.msg.contains("device \"netkit\""),
        "{error}"
    );
    traces.expect_same(&lab.node)
}

/// Two pods on netkits and one on a veth, servers in the last two and in the world. The second has a host port.
struct Scene {
    _servers: [(tcp::Server, udp::Server); 3],
    a: Pod,
    b: Pod,
    veth: Pod,
    lab: Lab,
}

impl Scene {
    fn set(family: Family) -> Result<Self> {
        let lab = Lab::new()?;
        let a = lab.pod_with("a", &conf(&lab, "netkit"))?;
        let b = lab.pod_with("b", &conf(&lab, "netkit").with_host_port(PORT, INSIDE))?;
        let veth = lab.pod_with("veth", &conf(&lab, "veth"))?;
        Ok(Self {
            _servers: [
                serve(b.netns(), family.port(INSIDE))?,
                serve(veth.netns(), family.port(INSIDE))?,
                serve(lab.world.netns(), family.remote_at(PORT))?,
            ],
            a,
            b,
            veth,
            lab,
        })
    }
}

#[rstest]
fn pods_talk_on_the_bypass(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    if Facility::Netkit.is_missing()? {
        return Ok(());
    }
    let scene = Scene::set(family)?;
    for (from, to) in [
        (&scene.a, &scene.b),
        (&scene.a, &scene.veth),
        (&scene.veth, &scene.b),
    ] {
        let at = to.at(family, INSIDE);
        let meter = Meter::start(&scene.lab.node)?;
        let mut client = tcp::Client::connect(from.netns(), at)?;
        client.chat(50)?;
        let seen = client.exchange(5_000_000, 5_000_000)?.seen;
        ensure!(seen.ip() == from.ip(family), "the server saw {seen}");
        udp::Client::open(from.netns(), family)?.chat(at, 50)?;
        ping::Ping::new(from.netns(), to.ip(family))?.series(10)?;
        ping::Ping::new(to.netns(), from.ip(family))?.echo(4000)?;
        meter.expect(Counter::BypassPeer, 250)?;
        ensure!(meter.read()?.dropped() == 0, "{:?}", meter.read()?);
    }
    // What is not theirs to send is dropped where it is sent.
    let link = RawLink::open(scene.a.netns(), Pod::IFNAME)?;
    let meter = Meter::start(&scene.lab.node)?;
    for dst in [family.remote(), scene.b.ip(family)] {
        let ends: Ends = scene.a.ends(dst)?.from_ip(family.unused_pod());
        link.send(&ends.udp(1000, 2000, b"forged"))?;
    }
    meter.expect(Counter::DropSourceAddress, 2)
}

#[rstest]
fn the_world_is_reached_on_the_bypass(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    if Facility::Netkit.is_missing()? {
        return Ok(());
    }
    let scene = Scene::set(family)?;
    let at = family.remote_at(PORT);
    let pod = &scene.a;
    let meter = Meter::start(&scene.lab.node)?;
    let mut client = tcp::Client::connect(pod.netns(), at)?;
    client.chat(50)?;
    let seen = client.exchange(5_000_000, 5_000_000)?.seen.ip();
    ensure!(seen == family.node(), "the world saw {seen}");
    let seen = udp::Client::open(pod.netns(), family)?.chat(at, 50)?.seen;
    ensure!(seen.ip() == family.node(), "the world saw {seen}");
    ping::ping(pod.netns(), family.remote())?;
    meter.expect(Counter::BypassWire, 95)?;
    meter.expect(Counter::BypassPeer, 95)
}

#[rstest]
fn a_host_port_is_reached_from_everywhere(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    if Facility::Netkit.is_missing()? {
        return Ok(());
    }
    let scene = Scene::set(family)?;
    let node = SocketAddr::new(family.node(), PORT);
    let loopback = SocketAddr::new(family.loopback(), PORT);
    let gateway = family.pod_gateway();
    for (who, netns, at, expected) in [
        ("the world", scene.lab.world.netns(), node, family.gateway()),
        ("a pod", scene.a.netns(), node, scene.a.ip(family)),
        ("itself", scene.b.netns(), node, gateway),
        ("the host", scene.lab.node.netns(), loopback, gateway),
    ] {
        let mut client = tcp::Client::connect(netns, at).with_context(|| format!("from {who}"))?;
        client.chat(5)?;
        let seen = client.exchange(500_000, 500_000)?.seen.ip();
        ensure!(seen == expected, "{who} was seen as {seen}");
        let seen = udp::Client::open(netns, family)?.chat(at, 5)?.seen.ip();
        ensure!(seen == expected, "{who} was seen as {seen}");
    }
    Ok(())
}

#[test]
fn check_and_status_notice_a_program_that_is_gone() -> Result<()> {
    needs_root!();
    if Facility::Netkit.is_missing()? {
        return Ok(());
    }
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &conf(&lab, "netkit"))?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    let status = Call::new("STATUS").conf(&conf(&lab, "netkit"));
    status.run(&lab.node)?.silence()?;
    let index = lab.node.netns().ifindex(pod.host_veth())?;
    let program = pins(&lab.node).join("programs/from_pod");
    lab.node
        .netns()
        .run(|| detach_from_netkit(index, &program))?;
    let words = format!(
        "program from_pod is not attached to the peer of {}",
        pod.host_veth()
    );
    let error = pod.call_with_result("CHECK").run(&lab.node)?.error()?;
    ensure!(error.code == 100 && error.msg.contains(&words), "{error}");
    let reply = status.run(&lab.node)?;
    reply.silence()?;
    ensure!(reply.stderr.contains(&words), "{}", reply.stderr);
    pod.del()
}

#[test]
fn unload_takes_the_program_off() -> Result<()> {
    needs_root!();
    if Facility::Netkit.is_missing()? {
        return Ok(());
    }
    let scene = Scene::set(V4)?;
    let said = scene.lab.node.underpass(&["unload", "--force"])?;
    for pod in [&scene.a, &scene.b, &scene.veth] {
        let line = format!("detached from {}", pod.host_veth());
        ensure!(said.contains(&line), "{said}");
    }
    // Without programs the node's stack forwards, and nobody looks at sources.
    for family in Family::BOTH {
        ping::ping(scene.a.netns(), scene.b.ip(family))?;
    }
    Ok(())
}

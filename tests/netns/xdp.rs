//! XDP on the uplink: what it takes, what it leaves to tc, and whom it gives way to.

use std::process::Command;

use rstest::rstest;
use serde_json::Value;
use underpass_abi::{ABI, counter::Counter, map};
use underpass_dataplane::kernel::version;
use underpass_tests::{
    netns::Netns,
    prelude::*,
    runtime::{Call, Conf, Reply},
    traffic::offload,
    world::World,
};

use crate::scene::Scene;

const LARGE: u64 = 300_000;

/// The kernel that containers take frames on, and the sentence that an older one is left with.
fn needs(mode: &str) -> Option<String> {
    let since = if mode == "native" { (5, 13) } else { (5, 15) };
    let sentence = || format!("needs Linux {}.{}", since.0, since.1);
    (version() < since).then(sentence)
}

/// Says so if this kernel is too old.
fn is_missing(mode: &str) -> bool {
    let sentence = needs(mode);
    if let Some(sentence) = &sentence {
        anstream::println!("not on this kernel: xdp {mode:?} {sentence}");
    }
    sentence.is_some()
}

/// The default network with XDP, on veths whatever the others are on: nothing else takes frames.
fn conf(lab: &Lab, mode: &str) -> Conf {
    lab.conf().with("device", "veth").with("xdp", mode)
}

/// The network over that lab.
fn set(family: Family, lab: Lab, mode: &str) -> Result<Scene> {
    let conf = conf(&lab, mode);
    Scene::set(family, lab, conf)
}

impl Scene {
    /// UDP and TCP from the pod to the world and from the world to the host port: small exchanges, a
    /// datagram of a full frame, and many bytes both ways. Both ends see what they must.
    fn talk(&self, family: Family) -> Result<()> {
        for (client, server, expected) in self.ways(family) {
            let mut asking = udp::Client::open(client, family)?;
            for len in [1, 2, 1200, 1400, 7, 8, 9, 10, 100, 1000] {
                let seen = asking.ask(server, len)?.seen.ip();
                ensure!(seen == expected, "{server} saw {seen} by UDP");
            }
            let mut connected = tcp::Client::connect(client, server)?;
            connected.chat(10)?;
            let seen = connected.exchange(LARGE, LARGE)?.seen.ip();
            ensure!(seen == expected, "{server} saw {seen} by TCP");
        }
        ping::ping(self.pod.netns(), family.remote())
    }
}

/// The id of the XDP program that the uplink has.
fn program_of(node: &Node) -> Result<Option<u64>> {
    let links = node
        .netns()
        .ip_json(&["link", "show", "dev", Node::UPLINK])?;
    Ok(links[0]["xdp"]["prog"]["id"].as_u64())
}

/// With checksums that the sender computed: what a wire carries.
#[rstest]
fn known_flows_are_delivered(
    #[values(V4, V6)] family: Family,
    #[values("native", "generic")] mode: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    offload::take_off(lab.world.netns(), World::LINK)?;
    let scene = set(family, lab, mode)?;
    let meter = Meter::start(&scene.lab.node)?;
    scene.talk(family)?;
    if needs(mode).is_some() {
        // Nothing is missing but speed.
        ensure!(program_of(&scene.lab.node)?.is_none());
        meter.expect_none(Counter::BypassXdp)?;
        return meter.expect(Counter::BypassPeer, 20);
    }
    // Each direction has its first packets, and one a second, elsewhere.
    meter.expect(Counter::BypassXdp, 20)?;
    ensure!(meter.read()?.dropped() == 0, "{:?}", meter.read()?);
    scene
        .pod
        .call_with_result("CHECK")
        .run(&scene.lab.node)?
        .silence()
}

/// The world's veth leaves checksums to a device that there is not: such frames can't go by XDP.
#[rstest]
fn unfinished_checksums_are_left_to_tc(
    #[values(V4, V6)] family: Family,
    #[values("native", "generic")] mode: &str,
) -> Result<()> {
    needs_root!();
    let scene = set(family, Lab::new()?, mode)?;
    let meter = Meter::start(&scene.lab.node)?;
    scene.talk(family)?;
    meter.expect_none(Counter::BypassXdp)?;
    meter.expect(Counter::BypassPeer, 20)
}

#[test]
fn status_shows_it_and_unload_takes_it_off() -> Result<()> {
    needs_root!();
    if is_missing("native") {
        return Ok(());
    }
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &conf(&lab, "native"))?;
    ensure!(program_of(&lab.node)?.is_some(), "no program on the uplink");
    let text = lab.node.underpass(&["status"])?;
    ensure!(text.contains("native XDP: from_wire_xdp"), "{text}");
    let status: Value = serde_json::from_str(&lab.node.underpass(&["status", "--json"])?)?;
    ensure!(
        status["devices"].to_string().contains(map::FROM_WIRE_XDP),
        "{status:#}"
    );
    pod.del()?;
    let said = lab.node.underpass(&["unload"])?;
    ensure!(said.contains(Node::UPLINK), "{said}");
    ensure!(program_of(&lab.node)?.is_none(), "a program is left");
    Ok(())
}

#[test]
fn without_the_key_there_is_none() -> Result<()> {
    needs_root!();
    if is_missing("generic") {
        return Ok(());
    }
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &lab.conf().with("device", "veth"))?;
    ensure!(program_of(&lab.node)?.is_none());
    let mut call = pod.call_with_result("CHECK");
    // The same container, of a network that has XDP now.
    let mut later = conf(&lab, "generic").json().clone();
    later["prevResult"] = pod.result().clone();
    later["runtimeConfig"] = Value::Null;
    call = call.stdin(later.to_string().as_bytes());
    let reply = call.run(&lab.node)?;
    reply.succeeded()?;
    ensure!(reply.stderr.contains(map::XDP_PODS), "{}", reply.stderr);
    Ok(())
}

/// An ADD of a container to the network with native XDP, and its namespace: the answer has the log.
fn add(lab: &Lab) -> Result<(Reply, Netns)> {
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let add = Call::new("ADD")
        .attachment("a", &path, Pod::IFNAME)
        .conf(&conf(lab, "native"));
    let reply = add.run(&lab.node)?;
    reply.result()?;
    Ok((reply, netns))
}

/// Somebody else's program: that of another node's dataplane, with pins of its own.
#[test]
fn another_program_stays() -> Result<()> {
    needs_root!();
    if is_missing("native") {
        return Ok(());
    }
    let lab = Lab::new()?;
    let root = "/sys/fs/bpf/another";
    lab.node.underpass(&["load", "--bpf-root", root])?;
    let pin = format!("{root}/v{ABI}/programs/{}", map::FROM_WIRE_XDP);
    let mut attach = Command::new("ip");
    attach.args(["link", "set", "dev", Node::UPLINK, "xdpdrv", "pinned", &pin]);
    lab.node.netns().expect(&mut attach, &[])?;
    let before = program_of(&lab.node)?.context("no program on the uplink")?;

    let (reply, _netns) = add(&lab)?;
    ensure!(
        reply.stderr.contains("somebody else") && reply.stderr.contains(&before.to_string()),
        "{}",
        reply.stderr
    );
    ensure!(program_of(&lab.node)? == Some(before), "it was replaced");
    lab.node.underpass(&["unload", "--force"])?;
    ensure!(program_of(&lab.node)? == Some(before), "it was taken off");
    Ok(())
}

#[test]
fn an_old_kernel_is_named() -> Result<()> {
    needs_root!();
    let Some(sentence) = needs("native") else {
        anstream::println!("not on this kernel: it is new enough for XDP");
        return Ok(());
    };
    let lab = Lab::new()?;
    let (reply, _netns) = add(&lab)?;
    ensure!(reply.stderr.contains(&sentence), "{}", reply.stderr);
    ensure!(program_of(&lab.node)?.is_none());
    Ok(())
}

/// A veth runs XDP where a frame fits a page of memory.
#[test]
fn a_driver_that_cannot_is_left_to_tc() -> Result<()> {
    needs_root!();
    if is_missing("native") {
        return Ok(());
    }
    let lab = Lab::with_mtu(9000)?;
    let (reply, netns) = add(&lab)?;
    ensure!(
        reply.stderr.contains("stays without XDP") && reply.stderr.contains(Node::UPLINK),
        "{}",
        reply.stderr
    );
    ensure!(program_of(&lab.node)?.is_none());
    for family in Family::BOTH {
        ping::ping(&netns, family.remote())?;
    }
    Ok(())
}

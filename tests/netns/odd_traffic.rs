//! With `ipMasq` no packet with a pod's address ever leaves the node, however odd it is.

use std::{collections::BTreeSet, net::IpAddr};

use rstest::rstest;
use underpass_tests::{
    capture::Capture,
    frame::{UNKNOWN_PROTOCOL, as_fragment},
    prelude::*,
    traffic::{SILENCE, raw::RawLink},
};

const PORT: u16 = 443;
const SCTP: u8 = 132;

/// A pod, and all that arrives in the world.
struct Scene {
    pod: Pod,
    link: RawLink,
    world: Capture,
    lab: Lab,
}

impl Scene {
    fn set(bypass: &str) -> Result<Self> {
        // Nothing else keeps it in.
        let lab = Lab::open()?;
        let pod = lab.pod_with("a", &lab.conf().with("bypass", bypass))?;
        Ok(Self {
            link: RawLink::open(pod.netns(), Pod::IFNAME)?,
            world: Capture::start(lab.world.netns(), "eth0")?,
            pod,
            lab,
        })
    }

    fn send(&self, frames: &[Vec<u8>]) -> Result<()> {
        frames.iter().try_for_each(|frame| self.link.send(frame))
    }

    fn expect_no_pod_address(&self) -> Result<()> {
        std::thread::sleep(SILENCE / 2);
        let arrived: BTreeSet<IpAddr> = self.world.addresses().into_iter().collect();
        let own = self.pod.addresses();
        ensure!(
            !arrived.iter().any(|ip| own.contains(ip)),
            "a pod's address came out: {arrived:?}"
        );
        Ok(())
    }

    fn came_from(&self, ip: IpAddr) -> bool {
        self.world.addresses().contains(&ip)
    }
}

#[rstest]
fn fragments(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(bypass)?;
    let server = family.remote_at(PORT);
    let _server = udp::Server::start(scene.lab.world.netns(), server)?;
    let client = udp::Client::open(scene.pod.netns(), family)?;
    for len in [3000, 100, 9000, 100, 60_000] {
        client.send(server, &vec![7; len])?;
    }
    // A later fragment that comes first, one that nothing precedes, and an overlap.
    let ends = scene.pod.ends(family.remote())?;
    let whole = ends.udp(5000, PORT, &[7; 64]);
    scene.send(&[
        as_fragment(&whole, 9, false),
        as_fragment(&whole, 0, true),
        as_fragment(&whole, 1000, true),
        as_fragment(&whole, 1, false),
    ])?;
    let mut ping = ping::Ping::new(scene.pod.netns(), family.remote())?;
    // Whether a fragmented ping is translated or dropped: not with the pod's address.
    let _ = ping.echo(4000);
    scene.expect_no_pod_address()?;
    ensure!(
        scene.came_from(family.node()),
        "whole datagrams are let out"
    );
    Ok(())
}

#[rstest]
fn unknown_protocols(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(bypass)?;
    let meter = Meter::start(&scene.lab.node)?;
    let ends = scene.pod.ends(family.remote())?;
    let mut frames = vec![
        ends.protocol(UNKNOWN_PROTOCOL, &[1; 40]),
        ends.protocol(UNKNOWN_PROTOCOL, &[]),
        ends.protocol(47, &[0, 0, 8, 0, 0x45, 0, 0, 20]),
        ends.protocol(50, &[1; 40]),
    ];
    meter_drops(&scene, &meter, &frames)?;
    frames.clear();
    frames.push(ends.protocol(SCTP, &[1; 40]));
    // Too short for the header they claim.
    frames.push(ends.protocol(6, &[1; 3]));
    frames.push(ends.protocol(17, &[1; 3]));
    frames.push(ends.protocol(1, &[8]));
    frames.push(ends.protocol(58, &[128]));
    scene.send(&frames)?;
    scene.expect_no_pod_address()
}

/// What follows in the frame is no part of the packet, and the stack cuts it off.
#[rstest]
fn ports_behind_the_packets_end(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(bypass)?;
    let meter = Meter::start(&scene.lab.node)?;
    let ends = scene.pod.ends(family.remote())?;
    let (icmp, echo) = match family {
        V4 => (1, 8),
        V6 => (58, 128),
    };
    let frames = [
        ends.protocol(6, &[1; 8]),
        ends.protocol(6, &[]),
        ends.protocol(17, &[1; 3]),
        ends.protocol(SCTP, &[1; 2]),
        ends.protocol(icmp, &[echo]),
    ]
    .map(|frame| [frame, vec![0; 40]].concat());
    // Those without a payload as well: of length 0 IPv6 has jumbograms alone.
    scene.send(&frames)?;
    scene.expect_no_pod_address()?;
    meter.expect(Counter::DropMalformed, 4)
}

fn meter_drops(scene: &Scene, meter: &Meter<'_>, frames: &[Vec<u8>]) -> Result<()> {
    scene.send(frames)?;
    meter.expect(Counter::DropUntranslated, frames.len() as u64)
}

#[rstest]
fn icmp_of_every_type(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(bypass)?;
    let ends = scene.pod.ends(family.remote())?;
    // What a packet of an unknown flow from the world would be quoted like.
    let incoming = scene.pod.ends(family.remote())?;
    let incoming = incoming.from_ip(family.remote()).to_ip(ends.src);
    let quotes = [
        ends.udp(1000, 2000, b"own"),
        incoming.udp(2000, 1000, b"foreign"),
    ];
    for kind in 0..=u8::MAX {
        for quote in &quotes {
            scene
                .link
                .send(&ends.icmp(kind, 0, [0, 0, 5, 0], &quote[14..]))?;
        }
    }
    scene.expect_no_pod_address()
}

#[rstest]
fn an_error_about_an_answer_that_nobody_waits_for(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(bypass)?;
    let server = family.remote_at(PORT);
    let _server = udp::Server::start(scene.lab.world.netns(), server)?;
    // The pod's stack knows no such socket: it will call the answers' port unreachable.
    let ends = scene.pod.ends(family.remote())?;
    for _ in 0..5 {
        scene.send(&[ends.udp(5001, PORT, b"anyone there?")])?;
        std::thread::sleep(SILENCE / 10);
    }
    scene.expect_no_pod_address()?;
    ensure!(scene.came_from(family.node()), "the questions are let out");
    Ok(())
}

#[rstest]
fn tcp_out_of_nowhere(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set(bypass)?;
    let server = family.remote_at(PORT);
    let ends = scene.pod.ends(family.remote())?;
    // Nobody listens: the resets that come back are answers to unknown segments as well.
    scene.send(&[
        ends.ack(6000, PORT, b"lost"),
        ends.ack(6000, PORT, b""),
        ends.syn(6001, PORT),
        ends.syn(6001, PORT),
    ])?;
    let _server = tcp::Server::start(scene.lab.world.netns(), server)?;
    scene.send(&[ends.syn(6002, PORT), ends.ack(6002, PORT, b"x")])?;
    tcp::visit(scene.pod.netns(), server)?;
    scene.expect_no_pod_address()
}

#[rstest]
fn a_flow_while_its_pod_goes_and_comes(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set("learned")?;
    let server = family.remote_at(PORT);
    let _server = udp::Server::start(scene.lab.world.netns(), server)?;
    for name in ["b", "c", "d"] {
        let other = scene.lab.pod(name)?;
        let mut client = udp::Client::open(other.netns(), family)?;
        client.chat(server, 5)?;
        let own = other.ip(family);
        other.del()?;
        ensure!(!scene.came_from(own), "the address of {name} came out");
    }
    scene.expect_no_pod_address()
}

#[rstest]
fn packets_cut_short(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set("learned")?;
    let ends = scene.pod.ends(family.remote())?;
    for whole in [ends.udp(5000, PORT, b"payload"), ends.syn(5000, PORT)] {
        for len in 14..whole.len() {
            // The interface refuses what has no whole Ethernet header.
            scene.link.send(&whole[..len])?;
        }
    }
    scene.expect_no_pod_address()?;
    ping::ping(scene.pod.netns(), family.remote())
}

//! What a pod must not send: the packet dies at the pod's own device and is counted.

mod conversations;

use std::net::SocketAddr;

use rstest::rstest;
use underpass_abi::{flow::protocol, node::Tunnels};
use underpass_dataplane::{Maps, Pins, lock::Lock};
use underpass_tests::{
    capture::Capture,
    frame::{self, Ends},
    prelude::*,
    runtime::Conf,
    traffic::{SILENCE, raw::RawLink, serve},
};

use crate::net_dir::{self, NET_DIR};

const FOREIGN_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x99];

/// Two pods; what the first sends, the second and the world must not get.
struct Scene {
    pod: Pod,
    neighbour: Pod,
    link: RawLink,
    lab: Lab,
}

impl Scene {
    fn set() -> Result<Self> {
        let lab = Lab::new()?;
        let conf = lab.conf();
        Self::with(lab, &conf)
    }

    /// The first pod has this configuration.
    fn with(lab: Lab, conf: &Conf) -> Result<Self> {
        let (pod, neighbour) = (lab.pod_with("a", conf)?, lab.pod("b")?);
        Ok(Self {
            link: RawLink::open(pod.netns(), Pod::IFNAME)?,
            pod,
            neighbour,
            lab,
        })
    }

    /// Sends frames, which must be counted and not arrive: the ends of the forged packets are `marked`.
    fn expect_dropped(&self, frames: &[Vec<u8>], counter: Counter, marked: &Ends) -> Result<()> {
        let captures = [
            Capture::start(self.lab.world.netns(), "eth0")?,
            Capture::start(self.neighbour.netns(), Pod::IFNAME)?,
        ];
        let meter = Meter::start(&self.lab.node)?;
        for frame in frames {
            self.link.send(frame)?;
        }
        meter.expect(counter, frames.len() as u64)?;
        std::thread::sleep(SILENCE / 4);
        for capture in captures {
            let arrived = capture.addresses();
            ensure!(!arrived.contains(&marked.src), "arrived from {arrived:?}");
        }
        Ok(())
    }

    fn targets(&self, family: Family) -> [std::net::IpAddr; 2] {
        [family.remote(), self.neighbour.ip(family)]
    }
}

#[rstest]
fn a_foreign_address(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    for dst in scene.targets(family) {
        let ends = scene.pod.ends(dst)?.from_ip(family.unused_pod());
        let frames = [ends.udp(1000, 2000, b"forged"), ends.syn(1000, 2000)];
        scene.expect_dropped(&frames, Counter::DropSourceAddress, &ends)?;
    }
    let neighbour = scene.neighbour.ip(family);
    let ends = scene.pod.ends(family.remote())?.from_ip(neighbour);
    scene.expect_dropped(
        &[ends.udp(1000, 2000, b"forged")],
        Counter::DropSourceAddress,
        &ends,
    )
}

#[rstest]
fn a_foreign_mac(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    for dst in scene.targets(family) {
        let ends = scene.pod.ends(dst)?.from_mac(FOREIGN_MAC);
        scene.expect_dropped(
            &[ends.udp(1000, 2000, b"forged")],
            Counter::DropSourceMac,
            &ends,
        )?;
    }
    Ok(())
}

#[rstest]
fn a_redirect(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    let kind = match family {
        V4 => 5,
        V6 => 137,
    };
    for dst in scene.targets(family) {
        let ends = scene.pod.ends(dst)?;
        let quoted = ends.udp(1, 2, b"quoted");
        scene.expect_dropped(
            &[ends.icmp(kind, 1, [0; 4], &quoted[14..])],
            Counter::DropRedirect,
            &ends,
        )?;
    }
    Ok(())
}

#[test]
fn a_router_advertisement() -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    let all_nodes = "ff02::1".parse()?;
    for dst in [all_nodes, scene.neighbour.ip(V6)] {
        let ends = scene.pod.ends(dst)?;
        scene.expect_dropped(
            &[ends.icmp(134, 0, [64, 0, 7, 8], &[0; 8])],
            Counter::DropRouterAdvertisement,
            &ends,
        )?;
    }
    Ok(())
}

#[rstest]
fn an_answer_of_a_dhcp_server(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    let (server, client) = match family {
        V4 => (67, 68),
        V6 => (547, 546),
    };
    let ends = scene.pod.ends(scene.neighbour.ip(family))?;
    scene.expect_dropped(
        &[ends.udp(server, client, &[2; 240])],
        Counter::DropDhcpServer,
        &ends,
    )
}

/// What asks is let through, but never learned: the answer would take the bypass.
#[rstest]
fn an_answer_of_a_dhcp_server_that_was_asked(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    let (server, client) = match family {
        V4 => (67, 68),
        V6 => (547, 546),
    };
    let asking = udp::Client::open_at(scene.neighbour.netns(), family, client)?;
    for _ in 0..3 {
        asking.send(scene.pod.at(family, server), b"who is there?")?;
    }
    let ends = scene.pod.ends(scene.neighbour.ip(family))?;
    let frames = [
        ends.udp(server, client, &[2; 240]),
        ends.udp(server, client, &[2; 240]),
    ];
    scene.expect_dropped(&frames, Counter::DropDhcpServer, &ends)
}

/// From the moment that somebody looked at the node's devices, and as long as the tunnel is there.
#[rstest]
fn a_datagram_of_a_tunnel(#[values(V4, V6)] family: Family) -> Result<()> {
    const PORT: u16 = 8_472;
    needs_root!();
    let Scene {
        lab,
        pod,
        neighbour,
        ..
    } = &Scene::set()?;
    let look = |lines: &[&str]| -> Result<()> {
        let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
        lab.node.netns().ip(&lines)?;
        let said = lab.node.underpass(&["apply", "--net-dir", NET_DIR])?;
        ensure!(said.contains("tunnels: "), "{said:?}");
        Ok(())
    };
    let (world, other) = (family.remote_at(PORT), neighbour.at(family, PORT));
    let _servers = [
        serve(lab.world.netns(), world)?,
        serve(neighbour.netns(), other)?,
    ];
    let chat = |to| udp::Client::open(pod.netns(), family)?.chat(to, 5);
    chat(world)?;
    chat(other)?;
    net_dir::put(&lab.node, "10-lab.conflist", &lab.conf())?;
    let add = format!("link add tunnel9 type vxlan id 9 dstport {PORT}");
    look(&[&add, "link set tunnel9 up"])?;
    for to in [world, SocketAddr::new(family.node(), PORT), other] {
        let meter = Meter::start(&lab.node)?;
        udp::Client::open(pod.netns(), family)?.hears_nothing(to)?;
        meter.expect(Counter::DropTunnel, 1)?;
    }
    look(&["link delete tunnel9"])?;
    chat(world)?;
    Ok(())
}

/// The network says it: there is no device, as after a boot.
#[rstest]
fn a_datagram_of_a_tunnel_to_come(
    #[values(V4, V6)] family: Family,
    #[values("learned", "off")] bypass: &str,
) -> Result<()> {
    const PORT: u16 = 8_472;
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("bypass", bypass);
    let kept_out = lab.pod_with("a", &conf.clone().with("tunnelPort", PORT))?;
    let (pod, neighbour) = (lab.pod_with("b", &conf)?, lab.pod_with("c", &conf)?);
    let [world, other, next] = [
        family.remote_at(PORT),
        neighbour.at(family, PORT),
        neighbour.at(family, PORT + 1),
    ];
    let _servers = [
        serve(lab.world.netns(), world)?,
        serve(neighbour.netns(), other)?,
        serve(neighbour.netns(), next)?,
    ];
    let chat = |pod: &Pod, to| udp::Client::open(pod.netns(), family)?.chat(to, 5);
    chat(&pod, world)?;
    chat(&pod, other)?;
    chat(&kept_out, next)?;
    for to in [world, SocketAddr::new(family.node(), PORT), other] {
        let meter = Meter::start(&lab.node)?;
        udp::Client::open(kept_out.netns(), family)?.hears_nothing(to)?;
        meter.expect(Counter::DropTunnel, 1)?;
        // Who asks by TCP asks for something else.
        if to.ip() != family.node() {
            tcp::Client::connect(kept_out.netns(), to)?.chat(3)?;
        }
        meter.expect(Counter::DropTunnel, 1)?;
    }
    Ok(())
}

/// GRE and IP in IP have no ports; what has the same number as their protocol, or as none, is something else.
#[rstest]
fn a_packet_of_a_tunnel_without_ports(
    #[values(V4, V6)] family: Family,
    #[values(4, 41, 47)] protocol: u8,
) -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    let Lab { node, .. } = &scene.lab;
    let mut tunnels = Tunnels::default();
    tunnels.packets[0] = Tunnels::packet(protocol, 0);
    node.netns().run(|| {
        let maps = Maps::open_existing(&Pins::at(node.bpf_root()))?.context("the maps")?;
        maps.set_tunnels(&Lock::acquire(node.bpf_root())?, tunnels)?;
        anyhow::Ok(())
    })?;
    let ends = scene.pod.ends(family.node())?;
    let meter = Meter::start(node)?;
    let others = [
        ends.udp(protocol.into(), protocol.into(), b"of no tunnel"),
        ends.udp(0, 0, b"of no tunnel"),
        ends.syn(protocol.into(), protocol.into()),
        ends.protocol(48, b"of no tunnel"),
    ];
    others.iter().try_for_each(|frame| scene.link.send(frame))?;
    ping::ping(scene.pod.netns(), family.node())?;
    meter.expect_none(Counter::DropTunnel)?;
    scene.expect_dropped(
        &[ends.protocol(protocol, b"from anybody")],
        Counter::DropTunnel,
        &ends,
    )
}

/// What lies behind the end of its first piece in a frame is no part of a datagram, and does not say what that is. (Of IPv4 a first piece has eight
/// bytes of the next header, or the stack drops it.)
#[test]
fn a_datagram_of_a_tunnel_in_pieces() -> Result<()> {
    const PORT: u16 = 8_472;
    const OPTIONS: u8 = 60;
    /// What only fills the destination options: `PadN` of four bytes.
    const PADDING: [u8; 6] = [1, 4, 0, 0, 0, 0];
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &lab.conf().with("tunnelPort", PORT))?;
    let ends = pod.ends(V6.node())?;
    let options = |next: u8| [&[next, 0], &PADDING[..]].concat();
    let datagram = |port| ends.udp(1000, port, b"from anybody")[14 + V6.header_len()..].to_vec();
    let behind_it = [options(protocol::UDP), datagram(53)].concat();
    let first = frame::as_fragment(&ends.protocol(OPTIONS, &options(OPTIONS)), 0, true);
    let rest = [options(protocol::UDP), datagram(PORT)].concat();
    let later = frame::as_fragment(&ends.protocol(OPTIONS, &rest), 1, false);
    let at = SocketAddr::new(V6.node(), PORT);
    let _end = udp::Server::start(lab.node.netns(), at)?;
    let capture = Capture::start(pod.netns(), Pod::IFNAME)?;
    let meter = Meter::start(&lab.node)?;
    let link = RawLink::open(pod.netns(), Pod::IFNAME)?;
    link.send(&[first, behind_it].concat())?;
    link.send(&later)?;
    meter.expect(Counter::DropMalformed, 1)?;
    let is_answer = |bytes: &[u8]| {
        frame::read(bytes).is_some_and(|seen| seen.ports.is_some_and(|(port, _)| port == PORT))
    };
    let answer = capture.wait_for(SILENCE, is_answer);
    ensure!(answer.is_none(), "the tunnel's end got it: {answer:02x?}");
    Ok(())
}

#[test]
fn neither_ip_nor_arp() -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    let ends = scene.pod.ends(V4.remote())?;
    let frames = [0x88cc, 0x8863].map(|kind| ends.ether_type(kind, &[0; 60]));
    scene.expect_dropped(&frames, Counter::DropEtherType, &ends)?;
    // A VLAN tag: 802.1Q, and 802.1ad.
    let frames = [0x8100, 0x88a8].map(|kind| ends.ether_type(kind, &[0; 60]));
    scene.expect_dropped(&frames, Counter::DropVlanTag, &ends)
}

#[rstest]
fn a_vlan_tag_is_no_disguise(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    let captures = [
        Capture::start(scene.lab.world.netns(), "eth0")?,
        Capture::start(scene.neighbour.netns(), Pod::IFNAME)?,
    ];
    for dst in scene.targets(family) {
        let forged = scene.pod.ends(dst)?.from_ip(family.unused_pod());
        let mut tagged = forged.udp(1000, 2000, b"forged");
        tagged.splice(12..12, [0x81, 0x00, 0x00, 0x07]);
        scene.link.send(&tagged)?;
    }
    std::thread::sleep(SILENCE);
    for capture in captures {
        let arrived = capture.addresses();
        ensure!(!arrived.contains(&family.unused_pod()), "{arrived:?}");
    }
    Ok(())
}

#[test]
fn arp_in_anothers_name() -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    let ends = scene.pod.ends(V4.remote())?;
    let mut claim = vec![0, 1, 8, 0, 6, 4, 0, 2];
    claim.extend(ends.src_mac);
    claim.extend([10, 88, 0, 250]);
    claim.extend(ends.dst_mac);
    claim.extend([10, 88, 0, 1]);
    scene.expect_dropped(&[ends.ether_type(0x0806, &claim)], Counter::DropArp, &ends)?;
    let host = scene.lab.node.netns().ip_json(&["neighbour", "show"])?;
    ensure!(!host.to_string().contains("10.88.0.250"), "{host}");
    Ok(())
}

#[rstest]
fn honest_packets_are_not_taken_for_forged(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let scene = Scene::set()?;
    let meter = Meter::start(&scene.lab.node)?;
    ping::ping(scene.pod.netns(), family.remote())?;
    ping::ping(scene.pod.netns(), scene.neighbour.ip(family))?;
    ping::ping(scene.pod.netns(), family.node())?;
    let counted = meter.read()?;
    ensure!(counted.dropped() == 0, "counted: {counted:?}");
    Ok(())
}

#[rstest]
fn with_anti_spoofing_off_it_passes(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("antiSpoof", false).with("ipMasq", false);
    let (pod, neighbour) = (lab.pod_with("a", &conf)?, lab.pod_with("b", &conf)?);
    // The stack's own check of source addresses would stop it as well.
    for device in ["all", pod.host_veth()] {
        lab.node
            .netns()
            .set_sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), "0")?;
    }
    let capture = Capture::start(neighbour.netns(), Pod::IFNAME)?;
    let ends = pod.ends(neighbour.ip(family))?.from_ip(family.unused_pod());
    RawLink::open(pod.netns(), Pod::IFNAME)?.send(&ends.udp(1000, 2000, b"forged"))?;
    let arrived = capture.wait_for(underpass_tests::traffic::PATIENCE, |frame| {
        frame::read(frame).is_some_and(|packet| packet.src == family.unused_pod())
    });
    ensure!(arrived.is_some(), "nothing came");
    Ok(())
}

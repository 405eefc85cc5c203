//! Uplinks of other kinds than a plain Ethernet device, and queues that make traffic late, lost, disordered or paced. The devices and
//! queues are modules that not every kernel has.

use std::{net::SocketAddr, process::Command};

use anyhow::bail;
use rstest::rstest;
use rtnetlink::LinkBridge;
use underpass_dataplane::kernel::version;
use underpass_tests::{
    capture::Capture,
    frame,
    kernel::Facility,
    netns::Netns,
    prelude::*,
    second::{Kind, Second},
    traffic::serve,
    wire::Wire,
    world::World,
};

use crate::{net_dir, scene::Scene};

mod found;

/// What fits into a WireGuard device on Ethernet.
const MTU: u32 = 1420;
/// Of a datagram in several pieces.
const LARGE: usize = 4000;
const PIECES: usize = 3;
/// Where a client and a server of their own are.
const SOURCE: u16 = 45_678;
const INSIDE: u16 = 80;
/// Until chance puts pieces in disorder.
const TRIES: usize = 50;

/// The default network over that lab.
fn set(family: Family, lab: Lab) -> Result<Scene> {
    let conf = lab.conf();
    Scene::set(family, lab, conf)
}

impl Scene {
    /// TCP between the pod and the world, a few exchanges and so many bytes both ways, opened by either.
    fn tcp(&self, family: Family, len: u64) -> Result<()> {
        for (client, server, expected) in self.ways(family) {
            let mut client = tcp::Client::connect(client, server)?;
            client.chat(5)?;
            let seen = client.exchange(len, len)?.seen.ip();
            ensure!(seen == expected, "{server} saw {seen} by TCP");
        }
        Ok(())
    }

    /// UDP in both directions, with datagrams of these sizes.
    fn udp(&self, family: Family, sizes: &[usize]) -> Result<()> {
        for (client, server, expected) in self.ways(family) {
            let mut client = udp::Client::open(client, family)?;
            for &len in sizes {
                let seen = client.ask(server, len)?.seen.ip();
                ensure!(seen == expected, "{server} saw {seen} by UDP");
            }
        }
        Ok(())
    }
}

#[test]
fn probes_agree_with_what_the_kernel_lists() -> Result<()> {
    needs_root!();
    for facility in Facility::ALL {
        let Some(is_listed) = facility.is_listed()? else {
            anstream::println!("not on this kernel: it tells neither its modules nor its options");
            return Ok(());
        };
        let refusal = facility.refusal()?;
        ensure!(
            refusal.is_none() == is_listed,
            "{facility:?} is listed: {is_listed}; used: {refusal:?}"
        );
    }
    Ok(())
}

#[rstest]
fn masquerade_and_host_ports_work(
    #[values(V4, V6)] family: Family,
    #[values(
        Wire::Bridge,
        Wire::BridgeVlan,
        Wire::Vlan,
        Wire::MacVlan,
        Wire::Bond,
        Wire::WireGuard,
        Wire::Vrf
    )]
    wire: Wire,
) -> Result<()> {
    needs_root!();
    if wire.is_missing()? {
        return Ok(());
    }
    let scene = set(family, Lab::over(wire, MTU)?)?;
    let meter = Meter::start(&scene.lab.node)?;
    scene.tcp(family, 500_000)?;
    // What a bridge has put together for connection tracking, see docs/limitations.md.
    let large = match (wire, family) {
        (Wire::Bridge, V6) | (Wire::BridgeVlan, _) => 1000,
        (Wire::Bridge, V4) if version() < (5, 12) => 1000,
        _ => LARGE,
    };
    scene.udp(family, &[1, 100, 1000, large, 100])?;
    ping::ping(scene.pod.netns(), family.remote())?;
    if wire == Wire::WireGuard {
        return meter.expect_no_bypass();
    }
    meter.expect(Counter::BypassWire, 10)?;
    meter.expect(Counter::BypassPeer, 10)
}

/// Nobody tracks connections there, or puts datagrams together.
#[rstest]
fn pieces_come_by_a_bridge(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    if Wire::Bridge.is_missing()? {
        return Ok(());
    }
    let scene = set(family, Lab::open_over(Wire::Bridge, MTU)?)?;
    scene.udp(family, &[LARGE, 1, LARGE, LARGE])
}

/// What the node's connection tracking knows of a packet at the port of a bridge is none of the pod's.
#[rstest]
fn a_firewall_in_the_pod_knows_its_own_connections(
    #[values(V4, V6)] family: Family,
    #[values(Wire::Ethernet, Wire::Bridge)] wire: Wire,
) -> Result<()> {
    needs_root!();
    if wire.is_missing()? {
        return Ok(());
    }
    let scene = set(family, Lab::over(wire, MTU)?)?;
    scene.pod.netns().nft(
        "table inet own {
            chain input {
                type filter hook input priority filter; policy drop;
                iifname lo accept
                icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept
                ct state established,related accept
                ct state new th dport 80 accept
            }
        }
        ",
    )?;
    let meter = Meter::start(&scene.lab.node)?;
    scene.tcp(family, 500_000)?;
    scene.udp(family, &[100; 20])?;
    meter.expect(Counter::BypassPeer, 10)
}

/// A VLAN of a device that leads to the world itself: the packets of one are seen at the other as well.
#[rstest]
fn a_vlan_on_an_uplink_is_an_uplink_of_its_own(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    if Wire::Vlan.is_missing()? {
        return Ok(());
    }
    let lab = Lab::over(Wire::Vlan, MTU)?;
    let below = match family {
        V4 => ["203.0.113.1", "203.0.113.2"],
        V6 => ["2001:db8:3::1", "2001:db8:3::2"],
    };
    for (end, address) in [lab.node.netns(), lab.world.netns()].iter().zip(below) {
        end.rtnl(|end| end.add_address(Wire::BELOW, address.parse()?, family.link_bits()))?;
    }
    let scene = set(family, lab)?;
    let meter = Meter::start(&scene.lab.node)?;
    scene.tcp(family, 500_000)?;
    scene.udp(family, &[1, 100, 1000, LARGE, 100])?;
    meter.expect(Counter::BypassWire, 10)?;
    meter.expect(Counter::BypassPeer, 10)?;
    ensure!(
        meter.read()?.get(Counter::HostTupleMoved) == 0,
        "{:?}",
        meter.read()?
    );
    Ok(())
}

/// Puts a queue on an end of the uplink.
fn queue(lab: &Lab, ends: &[End], queue: &str) -> Result<()> {
    for end in ends {
        let (netns, device) = match end {
            End::Node => (lab.node.netns(), Node::UPLINK),
            End::World => (lab.world.netns(), World::LINK),
        };
        let arguments = format!("qdisc replace dev {device} root {queue}");
        netns.expect(Command::new("tc").args(arguments.split(' ')), &[])?;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Node,
    World,
}

#[rstest]
fn tcp_survives_a_line_that_delays_loses_and_reorders(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    if Facility::Netem.is_missing()? {
        return Ok(());
    }
    let scene = set(family, Lab::new()?)?;
    let line = "netem delay 4ms 1ms loss 1% reorder 25% 50%";
    queue(&scene.lab, &[End::Node, End::World], line)?;
    let meter = Meter::start(&scene.lab.node)?;
    scene.tcp(family, 300_000)?;
    meter.expect(Counter::BypassWire, 50)?;
    meter.expect(Counter::BypassPeer, 50)?;
    ensure!(meter.read()?.dropped() == 0, "{:?}", meter.read()?);
    Ok(())
}

/// What the world sends in disorder is another matter: see docs/limitations.md, on fragments.
#[rstest]
fn pieces_that_the_line_reorders_arrive(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    if Facility::Netem.is_missing()? {
        return Ok(());
    }
    let scene = set(family, Lab::new()?)?;
    queue(&scene.lab, &[End::Node], "netem delay 4ms reorder 50% 50%")?;
    let line = Capture::start(scene.lab.world.netns(), World::LINK)?;
    for _ in 0..TRIES {
        scene.udp(family, &[LARGE])?;
        let pieces: Vec<u16> = line
            .frames()
            .iter()
            .filter_map(|frame| frame::piece_at(frame))
            .collect();
        // One datagram is on its way at a time.
        if pieces.chunks_exact(PIECES).any(|one| !one.is_sorted()) {
            return Ok(());
        }
    }
    bail!("{TRIES} times the line kept the order")
}

/// The kernel's clocks differ: what arrived carries the time of day where somebody asked for that, and a queue that paces takes it for the
/// time to send at.
#[rstest]
fn a_queue_that_paces_takes_nothing_for_the_future(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    if Facility::Fq.is_missing()? {
        return Ok(());
    }
    let scene = set(family, Lab::new()?)?;
    queue(&scene.lab, &[End::Node, End::World], "fq maxrate 80mbit")?;
    // While one socket wants timestamps, every packet that arrives gets one.
    let curious = udp::Client::open(scene.lab.node.netns(), family)?;
    curious.take_timestamps().context("ask for timestamps")?;
    let meter = Meter::start(&scene.lab.node)?;
    scene.tcp(family, 300_000)?;
    scene.udp(family, &[100, LARGE, 100, 100])?;
    meter.expect(Counter::BypassWire, 50)?;
    meter.expect(Counter::BypassPeer, 50)
}

/// What such a client is answered keeps the container's address, packet after packet, though nothing takes the bypass.
#[rstest]
fn a_client_with_a_route_to_pods_is_answered_by_a_tunnel(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _second = Second::connect(&lab, Kind::Tunnel)?;
    Second::answer(&lab)?;
    let pod = lab.pod("a")?;
    let _servers = serve(pod.netns(), family.port(INSIDE))?;
    let (world, server) = (lab.world.netns(), pod.at(family, INSIDE));
    let own = |port| SocketAddr::new(Second::gateway(family), port);
    let meter = Meter::start(&lab.node)?;
    let mut stream = tcp::Client::connect_between(world, own(SOURCE), server)?;
    let mut socket = udp::Client::open_bound(world, own(SOURCE))?;
    for _ in 0..3 {
        stream.chat(10)?;
        let seen = stream.exchange(100_000, 100_000)?.seen;
        ensure!(seen == own(SOURCE), "by TCP the pod saw {seen}");
        let seen = socket.chat(server, 10)?.seen;
        ensure!(seen == own(SOURCE), "by UDP the pod saw {seen}");
    }
    meter.expect_none(Counter::Masqueraded)?;
    meter.expect_no_bypass()
}

/// What the uplink becomes a port of.
pub(crate) const BRIDGE: &str = "br0";

/// Makes the uplink the port of a bridge with that MAC, which gets its addresses and routes.
pub(crate) fn put_at_bridge(node: &Netns, mac: Vec<u8>, families: &[Family]) -> Result<()> {
    node.rtnl(|rtnl| rtnl.add(LinkBridge::new(BRIDGE).mtu(1500).address(mac).build()))?;
    let bridge = node.ifindex(BRIDGE)?;
    node.rtnl(|rtnl| {
        rtnl.set(Node::UPLINK, |link| link.controller(bridge))?;
        rtnl.set_up(BRIDGE)
    })?;
    for family in families {
        node.rtnl(|rtnl| {
            rtnl.delete_address(Node::UPLINK, family.node(), family.link_bits())?;
            rtnl.add_address(BRIDGE, family.node(), family.link_bits())
        })?;
        node.ip(&[format!(
            "route replace {} via {} dev {BRIDGE}",
            family.everywhere(),
            family.gateway()
        )])?;
    }
    Ok(())
}

/// Programs on both would translate what the other has translated.
#[rstest]
fn an_uplink_that_becomes_the_port_of_a_bridge(
    #[values(V4, V6)] family: Family,
    #[values("a new MAC", "the MAC of the port")] mac: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    net_dir::put(&lab.node, "10-lab.conflist", &lab.conf())?;
    let scene = set(family, lab)?;
    scene.tcp(family, 1000)?;
    let node = scene.lab.node.netns();
    let mac = match mac {
        "a new MAC" => vec![2, 0, 0, 0, 0xbb, 1],
        _ => node.mac(Node::UPLINK)?.to_vec(),
    };
    put_at_bridge(node, mac, &[family])?;
    let said = scene
        .lab
        .node
        .underpass(&["apply", "--net-dir", net_dir::NET_DIR])?;
    for line in [
        format!("{BRIDGE}: attached from_wire, to_wire"),
        format!(
            "{}: detached, it is a part of another uplink now",
            Node::UPLINK
        ),
    ] {
        ensure!(
            said.lines().any(|said| said == line),
            "{line:?} is missing in {said:?}"
        );
    }
    // The world has to hear of the other MAC.
    ping::ping(node, family.gateway())?;
    let meter = Meter::start(&scene.lab.node)?;
    scene.tcp(family, 500_000)?;
    scene.udp(family, &[1, 100, 1000, 100])?;
    meter.expect(Counter::BypassWire, 10)?;
    ensure!(
        meter.read()?.get(Counter::HostTupleMoved) == 0,
        "{:?}",
        meter.read()?
    );
    scene
        .pod
        .call_with_result("CHECK")
        .run(&scene.lab.node)?
        .silence()
}

//! What a pod may not do: put packets into the network of all pods, in anybody's name, by sending VXLAN to a node.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    thread,
};

use nix::sys::signal::Signal;
use rstest::rstest;
use serde_json::Value;
use underpass_dataplane::kernel;
use underpass_tests::{
    capture::Capture,
    frame::{self, Ends},
    prelude::*,
    traffic::{PATIENCE, SILENCE},
};

use super::{fixture::Cluster, member::TUNNEL, tunnel::beyond_a_router};

const VXLAN: u16 = 4_789;
const MARK: &[u8] = b"in another's name";

/// A datagram of VXLAN that says to come from a pod of node 1, for a pod of the node `at`.
fn forged(cluster: &Cluster, at: usize, ends: &Ends, mark: &[u8]) -> Result<Vec<u8>> {
    let device = cluster.members[at].node.netns().mac(TUNNEL)?;
    let inside = Ends {
        src_mac: [2, 0, 0, 0, 0, 0x99],
        dst_mac: device,
        ..*ends
    };
    // The flag that there is a network identifier, and the identifier 1.
    let header = [8, 0, 0, 0, 0, 0, 1, 0];
    Ok([&header[..], &inside.udp(1_000, 2_000, mark)].concat())
}

/// A pod that starts after a boot may be there before the agent has made the device: its network says what to keep it out of.
#[rstest]
fn nor_before_there_is_a_device_for_it(
    #[values(V4, V6)] outside: Family,
    #[values(true, false)] guarded: bool,
) -> Result<()> {
    needs_root!();
    let (mut cluster, pods) = beyond_a_router(outside, &["off"])?;
    let member = &mut cluster.members[0];
    let conf = member.conf()?;
    let conf = if guarded {
        conf
    } else {
        conf.with("tunnelPort", Value::Null)
    };
    member.stop_agent(Signal::SIGKILL);
    let node = Arc::clone(&member.node);
    node.netns().ip(&[format!("link delete {TUNNEL}")])?;
    let attacker = Pod::add(&node, "attacker", &conf)?;
    let [_, victim] = &pods[0];
    let way = cluster.members[1].address(outside);
    for inside in Family::BOTH {
        let ends = attacker.ends(victim.ip(inside))?;
        let capture = Capture::start(victim.netns(), Pod::IFNAME)?;
        let meter = Meter::start(&node)?;
        let socket = udp::Client::open(attacker.netns(), outside)?;
        socket.send(
            SocketAddr::new(way, VXLAN),
            &forged(&cluster, 1, &ends, MARK)?,
        )?;
        let has_mark = |frame: &[u8]| frame.windows(MARK.len()).any(|part| part == MARK);
        if guarded {
            meter.expect(Counter::DropTunnel, 1)?;
            thread::sleep(SILENCE / 8);
            ensure!(
                !capture.frames().iter().any(|frame| has_mark(frame)),
                "{inside:?}"
            );
        } else {
            let arrived = capture.wait_for(SILENCE, has_mark);
            ensure!(arrived.is_some(), "{inside:?}: nothing arrived");
        }
    }
    Ok(())
}

/// Neither to another node nor to its own one, which sees such packets without masquerade; without the guard both get through, so it is the
/// guard that keeps them out.
#[rstest]
fn a_pod_sends_no_packets_of_the_tunnel(
    #[values(V4, V6)] outside: Family,
    #[values(true, false)] guarded: bool,
) -> Result<()> {
    needs_root!();
    let (cluster, pods) = beyond_a_router(outside, &["off"])?;
    let victims = &pods[0];
    let member = &cluster.members[0];
    let conf = member.conf()?.with("antiSpoof", guarded);
    let attacker = Pod::add(&member.node, "attacker", &conf)?;
    for inside in Family::BOTH {
        // In the name of the pod of the other node: the reverse path filter finds nothing wrong with it.
        for (to, victim) in victims.iter().enumerate() {
            let named = &victims[1 - to];
            let ends = attacker.ends(victim.ip(inside))?.from_ip(named.ip(inside));
            let capture = Capture::start(victim.netns(), Pod::IFNAME)?;
            let meter = Meter::start(&member.node)?;
            let node = &cluster.members[to];
            // The end of the tunnel has all addresses of its node: those of its own device are reached through it.
            let behind = Family::BOTH.map(|family| node.tunnel_address(family));
            let behind: Vec<IpAddr> = behind.into_iter().collect::<Result<_>>()?;
            let mut ways = [&[node.address(outside)][..], &behind].concat();
            if kernel::version() < (5, 14) {
                // The first address of a subnet is a broadcast address there, to which nobody sends by chance.
                ways.retain(|way| way.is_ipv6() || *way == node.address(outside));
            }
            for (count, way) in (1..).zip(ways) {
                let socket = udp::Client::open(attacker.netns(), Family::of(way))?;
                let mark = [MARK, &[count]].concat();
                socket.send(
                    SocketAddr::new(way, VXLAN),
                    &forged(&cluster, to, &ends, &mark)?,
                )?;
                let has_mark = |frame: &[u8]| frame.windows(mark.len()).any(|part| part == mark);
                let what = format!("{inside:?} to {way}, of node {}", to + 1);
                if guarded {
                    meter.expect(Counter::DropTunnel, count.into())?;
                    thread::sleep(SILENCE / 8);
                    let frames = capture.frames();
                    ensure!(!frames.iter().any(|frame| has_mark(frame)), "{what}");
                } else if Family::of(way) == outside {
                    // (The end takes packets of one family.)
                    let arrived = capture.wait_for(SILENCE, has_mark);
                    let arrived = arrived.with_context(|| format!("{what}: nothing arrived"))?;
                    let seen = frame::read(&arrived).context("a packet")?.src;
                    ensure!(seen == named.ip(inside), "{what}: from {seen}");
                }
            }
        }
    }
    Ok(())
}

/// Who reaches the VXLAN port gets packets into the pods' network, but the node itself hears no router and takes no address there.
#[rstest]
fn no_router_is_heard_through_the_tunnel(#[values(V4, V6)] outside: Family) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 1])?;
    cluster.put_outside(outside);
    for member in &cluster.members {
        // A node that has IPv6 of its own and forwards none: its pods have IPv4.
        let ranges = &member.ranges()[..1];
        cluster.api.set(&member.name, &member.addresses(), ranges);
        member.node.netns().run(|| {
            fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "0")?;
            fs::write("/proc/sys/net/ipv6/conf/default/accept_ra", "1")
        })?;
    }
    cluster.start_agents()?;
    for member in &cluster.members {
        member.is_ready()?;
    }
    let node = cluster.members[0].node.netns();
    let router = Ends {
        src_mac: [2, 0, 0, 0, 0, 0x99],
        dst_mac: node.mac(TUNNEL)?,
        src: "fe80::99".parse()?,
        dst: "ff02::1".parse()?,
    };
    // A hop limit, a lifetime of half an hour; the prefix 2001:db8:99::/64 to make addresses from.
    let prefix = [
        &[3, 4, 64, 0xc0, 0, 0, 7, 8, 0, 0, 7, 8, 0, 0, 0, 0][..],
        &[
            0x20, 0x01, 0x0d, 0xb8, 0, 0x99, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ],
    ]
    .concat();
    let inside = router.icmp(134, 0, [64, 0, 7, 8], &[&[0; 8][..], &prefix].concat());
    let datagram = [&[8, 0, 0, 0, 0, 0, 1, 0][..], &inside].concat();
    let seen = Capture::start(node, TUNNEL)?;
    let socket = udp::Client::open(cluster.members[1].node.netns(), outside)?;
    let way = cluster.members[0].address(outside);
    socket.send(SocketAddr::new(way, VXLAN), &datagram)?;
    let arrived = seen.wait_for(PATIENCE, |frame| frame.ends_with(&prefix));
    ensure!(arrived.is_some(), "the advertisement did not come in");
    thread::sleep(SILENCE / 4);
    let routes = node.ip_json(&["-6", "route", "show", "dev", TUNNEL])?;
    ensure!(!routes.to_string().contains("default"), "{routes}");
    let addresses = node.ip_json(&["-6", "address", "show", "dev", TUNNEL])?;
    ensure!(
        !addresses.to_string().contains("2001:db8:99"),
        "{addresses}"
    );
    Ok(())
}

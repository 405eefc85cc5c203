//! What VXLAN changes for pods: the length that fits, and what becomes of what is longer.

use std::{fs, net::IpAddr, thread, time::Duration};

use anyhow::bail;
use rstest::rstest;
use serde_json::Value;
use underpass_tests::{
    capture::Capture,
    frame,
    netns::Netns,
    prelude::*,
    traffic::{SILENCE, offload, option::Setting, serve},
};

use super::{
    fixture::Cluster,
    member::{Member, TUNNEL, cidr, nodad},
};

const PORT: u16 = 80;
/// The length of a transfer, in bytes.
const LONG: u64 = 10_000_000;
/// Larger than any packet, in bytes: a few pieces, and as many as there can be.
const LARGE: [usize; 3] = [1_460, 4_000, 60_000];
/// What links carry, in bytes without the Ethernet header.
const MTU: usize = 1_500;

/// What VXLAN takes of each packet, in bytes.
pub(super) const fn overhead(outside: Family) -> usize {
    const ETHERNET: usize = 14;
    const UDP: usize = 8;
    const VXLAN: usize = 8;
    outside.header_len() + UDP + VXLAN + ETHERNET
}

/// Two nodes with a router between them, each with pods of these networks, which have the uplink's MTU, as those from before there was a node
/// behind VXLAN. The outside of VXLAN is of this family.
pub(super) fn beyond_a_router(outside: Family, kinds: &[&str]) -> Result<(Cluster, Vec<[Pod; 2]>)> {
    let mut cluster = Cluster::idle(&[0, 1])?;
    cluster.put_outside(outside);
    cluster.start_agents()?;
    cluster.settle()?;
    let pods = kinds
        .iter()
        .map(|bypass| {
            let [here, there] = [0, 1].map(|at| {
                let member = &cluster.members[at];
                let conf = member.conf()?.with("bypass", *bypass);
                let conf = conf.with("mtu", Value::Null);
                Pod::add(&member.node, &format!("{bypass}-{at}"), &conf)
            });
            Ok([here?, there?])
        })
        .collect::<Result<_>>()?;
    Ok((cluster, pods))
}

/// What TCP has sent in a namespace.
struct Segments {
    sent: u64,
    /// Those among them that it had sent before.
    again: u64,
    /// How often no answer came in time, after which all that is under way is sent again.
    timeouts: u64,
}

impl Segments {
    fn of(netns: &Netns) -> Result<Self> {
        let text = netns.run(|| {
            let files = ["snmp", "netstat"].map(|name| format!("/proc/thread-self/net/{name}"));
            Ok::<_, anyhow::Error>(fs::read_to_string(&files[0])? + &fs::read_to_string(&files[1])?)
        })?;
        Ok(Self {
            sent: counter(&text, "Tcp:", "OutSegs")?,
            again: counter(&text, "Tcp:", "RetransSegs")?,
            timeouts: counter(&text, "TcpExt:", "TCPTimeouts")?,
        })
    }
}

/// Finds a value of the kernel's that it lists below its name, in lines that begin with `of`.
fn counter(text: &str, of: &str, name: &str) -> Result<u64> {
    let mut lines = text.lines().filter(|line| line.starts_with(of));
    let (names, values) = (lines.next().unwrap_or(""), lines.next().unwrap_or(""));
    let mut pairs = names.split(' ').zip(values.split(' '));
    let (_, value) = pairs
        .find(|(one, _)| *one == name)
        .with_context(|| format!("no {name}"))?;
    Ok(value.parse()?)
}

/// Whatever its length, it arrives, and what TCP has to send again is little; who asks for packets in one piece is told how long they
/// may be. Most of it passes both nodes' stacks by, if they were told to learn.
#[rstest]
fn what_is_longer_than_the_tunnel_takes(#[values(V4, V6)] outside: Family) -> Result<()> {
    needs_root!();
    let kinds = ["learned", "off"];
    let (cluster, pods) = beyond_a_router(outside, &kinds)?;
    for (bypass, [here, there]) in kinds.into_iter().zip(&pods) {
        for family in Family::BOTH {
            let at = there.at(family, PORT);
            let _server = serve(there.netns(), at)?;
            let meters = [0, 1].map(|at| Meter::start(&cluster.members[at].node));
            // Who sends first knows nothing of the tunnel yet.
            let seen = tcp::Client::connect(here.netns(), at)?
                .exchange(LONG, LONG)?
                .seen;
            ensure!(seen.ip() == here.ip(family), "{seen}");
            let mut client = udp::Client::open(here.netns(), family)?;
            for len in LARGE {
                client.ask(at, len)?;
            }
            for meter in meters {
                expect_large_packets(&meter?, bypass)?;
            }
        }
        for pod in [here, there] {
            let Segments {
                sent,
                again,
                timeouts,
            } = Segments::of(pod.netns())?;
            ensure!(
                again * 50 < sent,
                "{} sent {again} of {sent} segments again, after {timeouts} timeouts",
                pod.name()
            );
        }
    }
    // Neither knows the way to the other's peer.
    let [[learned, there], [off, other]] = &pods[..] else {
        bail!("two pairs of pods");
    };
    for family in Family::BOTH {
        for (from, to) in [(learned, other), (off, there)] {
            let fits = MTU - overhead(outside);
            expect_told(from, to.ip(family), fits).with_context(|| from.name().to_owned())?;
        }
    }
    Ok(())
}

/// Of two transfers each way passed the stack, in packets that nobody had cut to segments yet.
fn expect_large_packets(meter: &Meter<'_>, bypass: &str) -> Result<()> {
    if bypass == "off" {
        return meter.expect_no_bypass();
    }
    for counter in [Counter::BypassWire, Counter::BypassPeer] {
        meter.expect(counter, 100)?;
        let counted = meter.read()?;
        let segments = LONG / MTU as u64;
        ensure!(counted.get(counter) < segments, "{counted:?}");
    }
    Ok(())
}

/// Fails unless the sender of a long ping is told how much fits, also when its pings pass the stack by; and so much does fit.
fn expect_told(from: &Pod, to: IpAddr, fits: usize) -> Result<()> {
    const ECHO: usize = 8;
    let family = Family::of(to);
    let mut ping = ping::Ping::new(from.netns(), to)?;
    ping.set(&[Setting::in_one_piece(family)])?;
    ping.series(10)?;
    let fits = fits - family.header_len() - ECHO;
    // This one leaves, and is lost: only to IPv4 a ping socket says so.
    let lost = ping.echo(fits + 1);
    ensure!(lost.is_err(), "{family:?}: {lost:?}");
    let said = ping.echo(fits + 1).err().map(|error| format!("{error:#}"));
    ensure!(
        said.as_ref()
            .is_some_and(|said| said.contains("Message too long")),
        "{family:?}: {said:?}"
    );
    ping.echo(fits).map(drop)
}

/// The links become narrow while pods talk: the agents narrow the tunnel, and the pods are told.
#[test]
fn a_tunnel_shrinks_in_the_middle() -> Result<()> {
    const SOME: u64 = 2_000_000;
    const NARROW: usize = 1_400;
    needs_root!();
    let (cluster, pods) = beyond_a_router(V4, &["learned"])?;
    let [here, there] = &pods[0];
    // Else segments are seen before they are cut.
    for pod in [here, there] {
        offload::take_off(pod.netns(), Pod::IFNAME)?;
    }
    let servers =
        Family::BOTH.map(|family| tcp::Server::start(there.netns(), there.at(family, PORT)));
    let mut clients = Vec::new();
    for family in Family::BOTH {
        let mut client = tcp::Client::connect(here.netns(), there.at(family, PORT))?;
        client.exchange(SOME, SOME)?;
        clients.push(client);
    }
    cluster.narrow(u32::try_from(NARROW)?)?;
    for member in &cluster.members {
        eventually("the tunnel is as narrow as its link", || {
            let links = member
                .node
                .netns()
                .ip_json(&["link", "show", "dev", TUNNEL])?;
            ensure!(links[0]["mtu"] == NARROW - overhead(V4), "{links}");
            Ok(())
        })?;
    }
    let meters = [0, 1].map(|at| Meter::start(&cluster.members[at].node));
    // The programs look again once a second; each end has to learn it.
    for client in &mut clients {
        client.exchange(SOME, SOME)?;
    }
    thread::sleep(Duration::from_secs(2));
    let lines = ["node1", "node2"].map(|port| Capture::start(&cluster.fabric, port));
    for client in &mut clients {
        client.exchange(SOME, SOME)?;
    }
    for (meter, line) in meters.into_iter().zip(lines) {
        let (meter, line) = (meter?, line?);
        for counter in [Counter::BypassWire, Counter::BypassPeer] {
            meter.expect(counter, 100)?;
        }
        thread::sleep(SILENCE / 4);
        let frames = line.frames();
        let pieces = frames
            .iter()
            .filter(|frame| frame::is_fragment(frame))
            .count();
        let longest = frames.iter().map(Vec::len).max();
        ensure!(pieces == 0, "{pieces} pieces");
        ensure!(
            longest.is_some_and(|longest| longest <= 14 + NARROW),
            "a frame of {longest:?} bytes"
        );
    }
    drop(servers);
    Ok(())
}

/// A DHCP client that gets its lease again, a link that goes down and comes up: what is beyond the tunnel is there when the address is.
#[rstest]
fn an_address_that_comes_back_finds_its_device(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 1])?;
    cluster.put_outside(family);
    cluster.start_agents()?;
    cluster.settle()?;
    let member = &cluster.members[0];
    let before = member.node.netns().ifindex(TUNNEL)?;
    let flush = format!("address flush dev {} scope global", Node::UPLINK);
    member.node.netns().ip(&[flush])?;
    member.compares()?;
    member.node.netns().ip(&member.readdress())?;
    cluster.settle()?;
    let after = member.node.netns().ifindex(TUNNEL)?;
    ensure!(before == after, "device {before} became {after}");
    Cluster::all_reach_all(&cluster.pods()?)?;

    // Where the node has another address, and the one of before is translated to it.
    let other = match family {
        V4 => "198.18.10.77/24",
        V6 => "2001:db8:a::77/64",
    };
    let uplink = Node::UPLINK;
    let nodad = nodad(family);
    member.node.netns().ip(&[
        format!("address flush dev {uplink} scope global"),
        format!("address add {other} dev {uplink} {nodad}"),
    ])?;
    member.sends_from(None)
}

/// Waits until new pods get this MTU, in bytes.
fn offers(member: &Member, mtu: u32) -> Result<()> {
    eventually(&format!("an MTU of {mtu}"), || {
        let conflist = member.conflist()?.context("a conflist")?;
        ensure!(conflist["plugins"][0]["mtu"] == mtu, "{conflist}");
        Ok(())
    })
}

/// Other nodes are on a wide link, and the world is behind a narrow one. No comparison comes by itself: what becomes of the way is heard.
#[rstest]
fn pods_have_no_more_than_the_way_to_the_world_takes(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    const WAN: &str = "wan0";
    const PORT: &str = "world";
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 1])?;
    let netns = cluster.members[0].node.netns().clone();
    cluster.fabric.cable(PORT, &netns, WAN, 1_400)?;
    let (own, gateway, length) = match family {
        V4 => ("203.0.113.1", "203.0.113.254", 24),
        V6 => ("2001:db8:77::1", "2001:db8:77::fe", 64),
    };
    let (everywhere, nodad) = (family.everywhere(), nodad(family));
    let member = &cluster.members[0];
    let others = cidr(family, 1, 0);
    let inside = member.gateway(family);
    cluster
        .fabric
        .ip(&[format!("address add {gateway}/{length} dev {PORT} {nodad}")])?;
    netns.ip(&[
        format!("address add {own}/{length} dev {WAN} {nodad}"),
        format!("route add {others} via {inside}"),
        format!("route replace {everywhere} via {gateway}"),
    ])?;
    for member in &mut cluster.members {
        member.start_agent_with(&["--resync", "3600"])?;
    }
    cluster.settle()?;
    let [member, other] = &cluster.members[..] else {
        bail!("two members");
    };
    offers(member, 1_400)?;
    offers(other, 1_450)?;
    let pod = member.pod("pod")?;
    let link = pod.netns().ip_json(&["link", "show", "dev", Pod::IFNAME])?;
    ensure!(link[0]["mtu"] == 1_400, "{link}");

    netns.set_mtu(WAN, 1_300)?;
    cluster.fabric.set_mtu(PORT, 1_300)?;
    offers(member, 1_300)?;
    // A narrow link that is no way to the world is one to those on it.
    netns.ip(&[format!("route replace {everywhere} via {inside}")])?;
    offers(member, 1_450)?;
    netns.ip(&[format!("route replace {everywhere} via {gateway}")])?;
    offers(member, 1_300)
}

//! What pods of two nodes on a link say to each other, by a route alone: it passes the stacks of both by.

use std::net::SocketAddr;

use rstest::rstest;
use underpass_tests::{capture::Capture, frame, prelude::*, traffic::serve};

use super::{firewall::none_was_invalid, fixture::Cluster};

const PORT: u16 = 80;
/// So many questions, each of them a packet in each direction at least, and nearly all of these must take the bypass.
const MANY: usize = 40;
const MOST: u64 = 30;
/// Where VXLAN's outsides go.
const VXLAN: u16 = 4_789;

/// Each node knows both directions: what its own pod sends goes onto the wire, and what the other one sends goes into the pod. Nothing is wrapped.
#[rstest]
fn both_nodes_learn_a_flow(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let cluster = Cluster::new(&[0, 0])?;
    cluster.settle()?;
    let firewalls = cluster.fortify()?;
    let pods = cluster.pods()?;
    let lines = ["node1", "node2"].map(|port| Capture::start(&cluster.fabric, port));
    let [asking, asked] = &pods[..] else {
        anyhow::bail!("two pods");
    };
    let at = asked.at(family, PORT);
    let _servers = serve(asked.netns(), at)?;

    let mut client = tcp::Client::connect(asking.netns(), at)?;
    learned(&cluster, "TCP", || client.chat(MANY).map(drop))?;
    is_known(&cluster, &pods, [client.local()?, at]).context("TCP")?;

    let mut client = udp::Client::open(asking.netns(), family)?;
    client.connect(at)?;
    learned(&cluster, "UDP", || client.chat(at, MANY).map(drop))?;
    is_known(&cluster, &pods, [client.local()?, at]).context("UDP")?;

    let mut ping = ping::Ping::new(asking.netns(), at.ip())?;
    learned(&cluster, "ping", || ping.series(MANY))?;

    for line in lines {
        expect_plain(&line?, &pods, family)?;
    }
    none_was_invalid(&firewalls)
}

/// Fails unless most of what is said goes onto the wire and into the pod on both nodes, past their stacks.
fn learned(cluster: &Cluster, by: &str, talk: impl FnOnce() -> Result<()>) -> Result<()> {
    let members = &cluster.members;
    let meters = members.iter().map(|member| Meter::start(&member.node));
    let meters = meters.collect::<Result<Vec<_>>>()?;
    talk()?;
    for (meter, member) in meters.iter().zip(members) {
        for counter in [Counter::BypassWire, Counter::BypassPeer] {
            meter
                .expect(counter, MOST)
                .with_context(|| format!("{by} on {}", member.name))?;
        }
    }
    Ok(())
}

/// Fails unless each node remembers the flow between these ends, with the way of each direction.
fn is_known(cluster: &Cluster, pods: &[Pod], ends: [SocketAddr; 2]) -> Result<()> {
    let family = Family::of(ends[0].ip());
    for (member, pod) in cluster.members.iter().zip(pods) {
        let flows = member.node.flows(ends)?;
        let [flow] = &flows[..] else {
            anyhow::bail!("{} remembers {flows:#?}", member.name);
        };
        let states = flow["state"].as_array().context("a state")?;
        ensure!(states.contains(&"bypass".into()), "{flow:#}");
        for number in [0, 1] {
            let to: SocketAddr = flow["ends"][1 - number]
                .as_str()
                .context("an end")?
                .parse()?;
            let (action, device) = if to.ip() == pod.ip(family) {
                ("into the pod", pod.host_veth())
            } else {
                ("onto the wire", Node::UPLINK)
            };
            let way = &flow["directions"][number];
            ensure!(
                way["action"] == action
                    && way["device"] == device
                    && way["packets"]
                        .as_u64()
                        .is_some_and(|packets| packets >= MOST),
                "{}: to {to}: {flow:#}",
                member.name
            );
        }
    }
    Ok(())
}

/// Fails unless a line has seen pods' packets as they are, and none of VXLAN.
fn expect_plain(line: &Capture, pods: &[Pod], family: Family) -> Result<()> {
    let addresses: Vec<_> = pods.iter().map(|pod| pod.ip(family)).collect();
    eventually("packets of pods", || {
        let frames = line.frames();
        let seen = frames.iter().filter_map(|frame| frame::read(frame));
        let plain = seen
            .filter(|packet| addresses.contains(&packet.src) && addresses.contains(&packet.dst));
        let plain = plain.count();
        // By TCP, UDP, and ping.
        ensure!(plain >= 3 * MANY, "{plain} of {} frames", frames.len());
        Ok(())
    })?;
    let frames = line.frames();
    let mut seen = frames.iter().filter_map(|frame| frame::read(frame));
    let wrapped = seen.find(|packet| packet.ports.is_some_and(|(_, to)| to == VXLAN));
    ensure!(wrapped.is_none(), "{wrapped:?}");
    Ok(())
}

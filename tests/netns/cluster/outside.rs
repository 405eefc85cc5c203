//! What pods say to nodes and to the world, and what these say to pods: host ports, and whose address is seen.

use std::net::{IpAddr, SocketAddr};

use underpass_tests::{netns::Netns, prelude::*, traffic::serve};

use super::{firewall::none_was_invalid, fixture::Cluster};

const PORT: u16 = 80;
/// The port of the node that leads to a pod.
const HOST: u16 = 8_080;
const INSIDE: u16 = 81;

/// Two nodes on a link, and one that they reach through VXLAN.
#[test]
fn pods_talk_with_nodes_and_the_world() -> Result<()> {
    needs_root!();
    let cluster = Cluster::new(&[0, 0, 1])?;
    cluster.settle()?;
    let firewalls = cluster.fortify()?;
    let pods = cluster.pods()?;
    nodes_and_the_world_see_the_node(&cluster, &pods)?;
    nodes_reach_pods_of_others(&cluster, &pods)?;
    host_ports_are_reached_from_other_nodes(&cluster, &pods)?;
    none_was_invalid(&firewalls)
}

/// Asks by TCP, UDP and ping; whoever answers must see this address.
pub(super) fn reaches(from: &Netns, at: SocketAddr, expected: IpAddr) -> Result<()> {
    let talk = || -> Result<()> {
        let seen = tcp::visit(from, at)?;
        ensure!(seen == expected, "{seen} is seen by TCP");
        let mut client = udp::Client::open(from, Family::of(at.ip()))?;
        let seen = client.chat(at, 5)?.seen.ip();
        ensure!(seen == expected, "{seen} is seen by UDP");
        ping::ping(from, at.ip())
    };
    talk().with_context(|| format!("{} to {at}", from.name()))
}

/// A pod's node masquerades what leaves the cluster, and what goes to other nodes' own addresses; its own address sees the pod's.
fn nodes_and_the_world_see_the_node(cluster: &Cluster, pods: &[Pod]) -> Result<()> {
    for family in Family::BOTH {
        let mut answering = vec![(&cluster.fabric, family.remote_at(PORT))];
        for member in &cluster.members {
            let at = SocketAddr::new(member.address(family), PORT);
            answering.push((member.node.netns(), at));
        }
        for (netns, at) in answering {
            let _servers = serve(netns, at)?;
            for (pod, member) in pods.iter().zip(&cluster.members) {
                let own = member.address(family);
                let expected = if at.ip() == own { pod.ip(family) } else { own };
                reaches(pod.netns(), at, expected)?;
            }
        }
    }
    Ok(())
}

/// They are seen with the address that they have on the way: on their link, or of their VXLAN device.
fn nodes_reach_pods_of_others(cluster: &Cluster, pods: &[Pod]) -> Result<()> {
    for family in Family::BOTH {
        for (pod, home) in pods.iter().zip(&cluster.members) {
            let at = pod.at(family, PORT);
            let _servers = serve(pod.netns(), at)?;
            let others = cluster.members.iter();
            for member in others.filter(|member| member.number != home.number) {
                let expected = if member.link == home.link {
                    member.address(family)
                } else {
                    member.tunnel_address(family)?
                };
                reaches(member.node.netns(), at, expected)
                    .with_context(|| format!("from {}", member.name))?;
            }
        }
    }
    Ok(())
}

/// By the node's address on its link, and by that of its VXLAN device, which is one of the pods' range.
fn host_ports_are_reached_from_other_nodes(cluster: &Cluster, pods: &[Pod]) -> Result<()> {
    let asked = &cluster.members[0];
    let conf = asked.conf()?.with_host_port(HOST, INSIDE);
    let server = Pod::add(&asked.node, "server", &conf)?;
    for family in Family::BOTH {
        let _servers = serve(server.netns(), server.at(family, INSIDE))?;
        let (link, tunnel) = (asked.address(family), asked.tunnel_address(family)?);
        let mut ways = vec![(&cluster.fabric, link, asked.gateway(family), None)];
        for (pod, member) in pods.iter().zip(&cluster.members).skip(1) {
            // What goes to the link's address is masqueraded.
            ways.push((pod.netns(), link, member.address(family), Some(member)));
            ways.push((pod.netns(), tunnel, pod.ip(family), Some(member)));
        }
        for (from, to, expected, member) in ways {
            let at = SocketAddr::new(to, HOST);
            let mut meters = vec![Meter::start(&asked.node)?];
            if let Some(member) = member {
                meters.push(Meter::start(&member.node)?);
            }
            let mut client = tcp::Client::connect(from, at)?;
            let seen = client.exchange(2_000_000, 2_000_000)?.seen.ip();
            ensure!(seen == expected, "{} by {at} is {seen} by TCP", from.name());
            let seen = udp::Client::open(from, family)?.chat(at, 40)?.seen.ip();
            ensure!(seen == expected, "{} by {at} is {seen} by UDP", from.name());
            for meter in meters {
                for counter in [Counter::BypassWire, Counter::BypassPeer] {
                    meter
                        .expect(counter, 60)
                        .with_context(|| format!("{} by {at}", from.name()))?;
                }
            }
        }
    }
    Ok(())
}

//! What pods get of their node: ports, a share of the network, an address until they go.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use underpass_tests::{netns::Netns, prelude::*, traffic};

use crate::{
    cluster::{Cluster, router},
    eventually,
    pod::{Pod, Wish, all_reach_all, talk, talk_unseen},
};

const HOST: u16 = 9000;
const INSIDE: u16 = 90;

/// The world, other nodes, their pods and the pod itself reach it by a port of its node.
pub(crate) fn host_port(cluster: &mut Cluster) -> Result<()> {
    let web = Pod::start_one(
        cluster,
        &Wish::new("web", "node1").with_host_port(HOST, INSIDE),
    )?;
    let others = Pod::start(
        cluster,
        &[Wish::new("near", "node2"), Wish::new("far", "node3")],
    )?;
    let member = cluster.member("node1")?;
    for family in Family::BOTH {
        let _servers = traffic::serve(&web.netns, web.at(family, INSIDE)?)?;
        let at = SocketAddr::new(member.address(family), HOST);
        talk(&cluster.world, at, router(family, member.link)).context("from the world")?;
        for other in &cluster.members {
            talk_unseen(other.node.netns(), at).with_context(|| format!("from {}", other.name))?;
        }
        for other in others.iter().chain([&web]) {
            talk_unseen(&other.netns, at).with_context(|| format!("from {}", other.name))?;
        }
    }
    web.remove(cluster)?;
    let member = cluster.member("node1")?;
    for family in Family::BOTH {
        tcp::refuses(
            &cluster.world,
            SocketAddr::new(member.address(family), HOST),
        )?;
    }
    Pod::remove_all(cluster, others)
}

/// Three pods of a node have the same hostPort: one at 127.0.0.1, two at an address of the node, by a protocol each.
pub(crate) fn shared_host_port(cluster: &mut Cluster) -> Result<()> {
    let member = cluster.member("node1")?;
    for family in Family::BOTH {
        let (here, node) = (family.loopback(), member.address(family));
        let wish = |name: &str, ip, protocol| {
            Wish::new(name, "node1").with_host_port_at(ip, protocol, HOST, INSIDE)
        };
        let pods = Pod::start(
            cluster,
            &[
                wish("local", here, "TCP"),
                wish("stream", node, "TCP"),
                wish("datagrams", node, "UDP"),
            ],
        )?;
        let at = |ip| SocketAddr::new(ip, HOST);
        let netns = member.node.netns();
        // One serves at a time, so who is served elsewhere as well was sent to the wrong pod.
        let server = tcp::Server::start(&pods[0].netns, pods[0].at(family, INSIDE)?)?;
        tcp::visit(netns, at(here)).context("from the node, at its loopback")?;
        tcp::is_refused(&cluster.world, at(node))?;
        drop(server);
        let server = tcp::Server::start(&pods[1].netns, pods[1].at(family, INSIDE)?)?;
        tcp::visit(&cluster.world, at(node)).context("from the world")?;
        tcp::is_refused(netns, at(here))?;
        udp::Client::open(&cluster.world, family)?.hears_nothing(at(node))?;
        drop(server);
        let server = udp::Server::start(&pods[2].netns, pods[2].at(family, INSIDE)?)?;
        udp::Client::open(&cluster.world, family)?.chat(at(node), 5)?;
        tcp::is_refused(&cluster.world, at(node))?;
        drop(server);
        Pod::remove_all(cluster, pods)?;
    }
    Ok(())
}

/// Both directions of a pod with annotations have their rate.
pub(crate) fn bandwidth(cluster: &mut Cluster) -> Result<()> {
    let wish = Wish::new("slow", "node1")
        .annotated("kubernetes.io/ingress-bandwidth", "10M")
        .annotated("kubernetes.io/egress-bandwidth", "20M");
    let member = cluster.member("node1")?;
    let before = rates(member.node.netns())?;
    ensure!(before.is_empty(), "{before:?}");
    let pod = Pod::start_one(cluster, &wish)?;
    let other = Pod::start_one(cluster, &Wish::new("fast", "node1"))?;
    // Each end of its veth has a queue for what leaves there; tc counts bytes.
    let to_pod = rates(member.node.netns())?;
    ensure!(to_pod == [1_250_000], "to it {to_pod:?}");
    let from_pod = rates(&pod.netns)?;
    ensure!(from_pod == [2_500_000], "from it {from_pod:?}");
    let unlimited = rates(&other.netns)?;
    ensure!(unlimited.is_empty(), "from the other {unlimited:?}");
    let pods = vec![pod, other];
    all_reach_all(&pods)?;
    Pod::remove_all(cluster, pods)?;
    let after = rates(cluster.member("node1")?.node.netns())?;
    ensure!(after.is_empty(), "{after:?}");
    Ok(())
}

/// The rates that queues of a namespace's devices have, in bytes per second.
fn rates(netns: &Netns) -> Result<Vec<u64>> {
    let mut command = Command::new("tc");
    let text = netns.expect(command.args(["-json", "qdisc", "show"]), &[])?;
    let queues: Vec<Value> = serde_json::from_str(&text).context("read tc")?;
    let mut rates: Vec<u64> = queues
        .iter()
        .filter_map(|queue| queue["options"]["rate"].as_u64())
        .collect();
    rates.sort_unstable();
    Ok(rates)
}

/// A pod that is deleted gives its addresses back, and nothing of it is left.
pub(crate) fn lease(cluster: &mut Cluster) -> Result<()> {
    let member = cluster.member("node2")?;
    let before = (member.leases()?, member.devices()?);
    let pods = Pod::start(cluster, &[Wish::new("a", "node2"), Wish::new("b", "node2")])?;
    let leases = member.leases()?;
    for pod in &pods {
        for family in Family::BOTH {
            let ip = pod.ip(family)?;
            ensure!(leases.contains(&ip), "{ip} is not leased: {leases:?}");
        }
    }
    Pod::remove_all(cluster, pods)?;
    given_back(cluster, &before)
}

/// Waits until the second node has the addresses leased and the devices that it had before.
fn given_back(cluster: &Cluster, before: &(BTreeSet<IpAddr>, BTreeSet<String>)) -> Result<()> {
    eventually("addresses and devices are free", || {
        let member = cluster.member("node2")?;
        let now = (member.leases()?, member.devices()?);
        ensure!(now == *before, "{now:?} instead of {before:?}");
        Ok(())
    })
}

/// So many come and go at once, as after a change of a Deployment.
const CROWD: usize = 20;

/// Many pods at once have an address each, and give them back.
pub(crate) fn crowd(cluster: &mut Cluster) -> Result<()> {
    let member = cluster.member("node2")?;
    let before = (member.leases()?, member.devices()?);
    let wishes: Vec<Wish> = (0..CROWD)
        .map(|number| Wish::new(&format!("crowd-{number}"), "node2"))
        .collect();
    let pods = Pod::start(cluster, &wishes)?;
    let addresses: BTreeSet<IpAddr> = pods.iter().flat_map(Pod::addresses).copied().collect();
    ensure!(
        addresses.len() == CROWD * Family::BOTH.len(),
        "{addresses:?}"
    );
    ensure!(
        addresses.is_subset(&cluster.member("node2")?.leases()?),
        "not all are leased"
    );
    all_reach_all(&pods[..3])?;
    Pod::remove_all(cluster, pods)?;
    given_back(cluster, &before)
}

/// A pod whose namespaces die is given others by the kubelet, and nothing of the old ones is left.
pub(crate) fn dead_sandbox(cluster: &mut Cluster) -> Result<()> {
    let pods = Pod::start(
        cluster,
        &[Wish::new("dies", "node1"), Wish::new("stays", "node3")],
    )?;
    let member = cluster.member("node1")?;
    let leases = member.leases()?.len();
    let old = pods[0].container.clone();
    member.kill_sandbox("dies")?;
    let mut again = None;
    eventually("the pod runs again", || {
        let pod = Pod::wait(cluster, "dies")?;
        ensure!(pod.container != old, "it is still the old one");
        again = Some(pod);
        Ok(())
    })?;
    let again = again.context("a pod")?;
    let mut pods = pods;
    pods[0] = again;
    all_reach_all(&pods)?;
    let member = cluster.member("node1")?;
    eventually("the old addresses are free", || {
        let now = member.leases()?;
        ensure!(now.len() == leases, "{now:?}");
        Ok(())
    })?;
    Pod::remove_all(cluster, pods)
}

/// A kubelet reaches its pods: it says that they are ready only if it does.
pub(crate) fn probes(cluster: &mut Cluster) -> Result<()> {
    let wishes: Vec<Wish> = cluster
        .members
        .iter()
        .map(|member| Wish::new(&format!("probed-on-{}", member.name), &member.name).probed(INSIDE))
        .collect();
    let pods = Pod::start(cluster, &wishes)?;
    Pod::remove_all(cluster, pods)
}

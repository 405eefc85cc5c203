//! Pods reach pods, and everybody sees who asks.

use anyhow::{Context as _, Result, ensure};
use underpass_tests::{counter::Counters, prelude::*};

use super::readiness::ranges;
use crate::{
    cluster::Cluster,
    pod::{Pod, Wish, all_reach_all, is_of_ranges},
};

/// Two pods of the first node.
pub(crate) fn on_one_node(cluster: &mut Cluster) -> Result<()> {
    let pods = Pod::start(cluster, &[Wish::new("a", "node1"), Wish::new("b", "node1")])?;
    all_reach_all(&pods)?;
    Pod::remove_all(cluster, pods)
}

/// A pod of each node; the third node is behind a router.
pub(crate) fn between_nodes(cluster: &mut Cluster) -> Result<()> {
    let pods = cluster.pods()?;
    for (pod, member) in pods.iter().zip(&cluster.members) {
        is_of_ranges(pod, &ranges(&cluster.node(&member.name)?))?;
    }
    all_reach_all(&pods)?;
    for member in &cluster.members {
        Counters::expect_bypass(&member.node, &member.name)?;
    }
    // The first node reaches the others' pods as itself, whichever way they are.
    for family in Family::BOTH {
        for (index, device) in [(1, Node::UPLINK), (2, "underpass-vxlan")] {
            let to = pods[index].ip(family)?.to_string();
            let netns = cluster.members[0].node.netns();
            let route = netns.ip_json(&["route", "get", &to])?;
            ensure!(route[0]["dev"] == device, "{to}: {route}");
            ping::ping(netns, pods[index].ip(family)?).context("from the node")?;
        }
    }
    Pod::remove_all(cluster, pods)
}

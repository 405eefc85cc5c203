//! From a node without network to one with it.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use underpass_tests::Family;

use super::deployed::role;
use crate::{cluster::Cluster, credentials::User, eventually, member::Member};

/// Where the agent writes the network, in a cage.
pub(crate) const CONFLIST: &str = "/etc/cni/net.d/10-underpass.conflist";

/// Waits for nodes that the controller manager has given ranges, and for what they say of their network.
pub(crate) fn not_without_network(cluster: &mut Cluster) -> Result<()> {
    for member in &cluster.members {
        let said = cluster.condition(&member.name, "Ready", "False")?;
        ensure!(
            said.contains("cni plugin not initialized"),
            "{} is not ready for another reason: {said}",
            member.name
        );
        eventually(&format!("{} has ranges", member.name), || {
            let ranges = ranges(&cluster.node(&member.name)?);
            ensure!(ranges.len() == Family::BOTH.len(), "{ranges:?}");
            Ok(())
        })?;
    }
    Ok(())
}

/// Starts the agents before there is their role, which the API server refuses.
pub(crate) fn not_without_role(cluster: &mut Cluster) -> Result<()> {
    for member in &mut cluster.members {
        member.start_agent()?;
    }
    for member in &mut cluster.members {
        eventually("the agent is refused", || {
            member.agent.is_alive(member.containerd.cage())?;
            let log = member.agent.log(member.containerd.cage());
            ensure!(log.contains("forbidden"), "{log}");
            Ok(())
        })?;
        ensure!(!member.cage().path(CONFLIST).exists(), "there is a network");
    }
    Ok(())
}

/// Gives them the role, and waits until all is installed.
pub(crate) fn with_agent(cluster: &mut Cluster) -> Result<()> {
    cluster.control.apply_text(&role()?)?;
    for member in &mut cluster.members {
        member.is_installed()?;
    }
    for member in &cluster.members {
        cluster.condition(&member.name, "Ready", "True")?;
        network_is_of_node(cluster, member)?;
    }
    Ok(())
}

/// Fails unless a node's network has the ranges that the API says.
pub(crate) fn network_is_of_node(cluster: &Cluster, member: &Member) -> Result<()> {
    let conflist: Value = serde_json::from_str(&member.cage().read(CONFLIST)?)?;
    let expected = ranges(&cluster.node(&member.name)?);
    let plugin = &conflist["plugins"][0];
    let sets = plugin["ipam"]["ranges"].as_array().context("no ranges")?;
    let subnets: Vec<&str> = sets
        .iter()
        .filter_map(|set| set[0]["subnet"].as_str())
        .collect();
    ensure!(
        subnets == expected,
        "{subnets:?}, and the Node has {expected:?}"
    );
    Ok(())
}

/// What the agent may do and what not, by the API server's own word.
pub(crate) fn role_is_small(cluster: &mut Cluster) -> Result<()> {
    let member = &cluster.members[0];
    let file = cluster.control.credentials_here(&User::agent())?;
    for verb in ["list", "watch"] {
        cluster
            .control
            .kubectl_as(&file, &["auth", "can-i", verb, "nodes"])?;
    }
    for (verb, what) in [
        ("get", "nodes"),
        ("update", "nodes"),
        ("patch", "nodes/status"),
        ("list", "pods"),
        ("list", "secrets"),
        ("create", "pods"),
    ] {
        let answer = cluster
            .control
            .kubectl_as(&file, &["auth", "can-i", verb, what]);
        ensure!(
            answer.is_err(),
            "the agent of {} may {verb} {what}",
            member.name
        );
    }
    Ok(())
}

pub(crate) fn ranges(node: &Value) -> Vec<String> {
    let ranges = node["spec"]["podCIDRs"].as_array().into_iter().flatten();
    ranges
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect()
}

//! What the agent writes to its Node, if the deployment has the components for that.

use anyhow::{Result, ensure};
use underpass_runtimes::containerd::End;

use crate::{cluster::Cluster, eventually};

/// The roles that the components add.
const ROLES: [&str; 4] = [
    include_str!("../../../../deploy/components/node-condition/cluster-role.yaml"),
    include_str!("../../../../deploy/components/node-condition/cluster-role-binding.yaml"),
    include_str!("../../../../deploy/components/taint/cluster-role.yaml"),
    include_str!("../../../../deploy/components/taint/cluster-role-binding.yaml"),
];

/// The taint that is the agent's to take off, and one that is not.
const TAINT: &str = "underpass/agent-not-ready";
const OTHERS: &str = "example.org/others";

/// What the components set of the agent's environment.
const VARIABLES: [(&str, &str); 2] = [
    ("UNDERPASS_NODE_CONDITION", "true"),
    ("UNDERPASS_STARTUP_TAINT", TAINT),
];

/// Says it when the agent starts, and takes off what is put back later. Without the roles the agent has no right to, and says so.
pub(crate) fn condition_and_taint(cluster: &mut Cluster) -> Result<()> {
    let name = cluster.members[0].name.clone();
    for key in [OTHERS, TAINT] {
        taint(cluster, &name, key)?;
    }
    restart_with(cluster, true)?;
    eventually("the agent is refused", || {
        let member = &cluster.members[0];
        let log = member.agent.log(member.cage());
        for right in ["nodes/status", "deploy/components/taint"] {
            ensure!(log.contains(right), "no word of {right}: {log}");
        }
        Ok(())
    })?;
    ensure!(
        taints(cluster, &name)?.contains(&TAINT.to_owned()),
        "who may not take the taint off did"
    );

    cluster.control.apply_text(&ROLES.join("---\n"))?;
    let said = cluster.condition(&name, "NetworkUnavailable", "False")?;
    ensure!(
        said.contains("underpass-agent"),
        "somebody else says {said}"
    );
    is_taken_off(cluster, &name)?;
    taint(cluster, &name, TAINT)?;
    is_taken_off(cluster, &name)?;

    cluster.control.delete_text(&ROLES.join("---\n"))?;
    let untainted = format!("{OTHERS}-");
    cluster
        .control
        .kubectl(&["taint", "node", &name, &untainted])?;
    restart_with(cluster, false)
}

/// Starts the first node's agent anew, with the components or without them.
fn restart_with(cluster: &mut Cluster, is_told: bool) -> Result<()> {
    let member = &mut cluster.members[0];
    for (name, value) in VARIABLES {
        member.agent.set(name, is_told.then_some(value));
    }
    member.stop_agent(End::Term)?;
    member.start_agent()
}

fn taint(cluster: &Cluster, node: &str, key: &str) -> Result<()> {
    let taint = format!("{key}=true:PreferNoSchedule");
    cluster.control.kubectl(&["taint", "node", node, &taint])?;
    Ok(())
}

/// Waits until the Node has not got our taint any more; it must have kept the other.
fn is_taken_off(cluster: &Cluster, node: &str) -> Result<()> {
    eventually("the taint is taken off", || {
        let taints = taints(cluster, node)?;
        ensure!(!taints.contains(&TAINT.to_owned()), "{taints:?}");
        ensure!(taints.contains(&OTHERS.to_owned()), "{taints:?}");
        Ok(())
    })
}

fn taints(cluster: &Cluster, node: &str) -> Result<Vec<String>> {
    let node = cluster.node(node)?;
    let taints = node["spec"]["taints"].as_array().into_iter().flatten();
    let keys = taints.filter_map(|taint| taint["key"].as_str());
    Ok(keys.map(str::to_owned).collect())
}

//! A Node that is deleted and comes back, and a node without us.

use anyhow::{Context as _, Result, ensure};
use underpass_runtimes::containerd::End;

use super::readiness::{CONFLIST, network_is_of_node, ranges};
use crate::{
    cluster::Cluster,
    eventually,
    member::Member,
    pod::{Pod, all_reach_all, is_of_ranges},
};

/// The second node is deleted, and registers again with other ranges.
pub(crate) fn another_range(cluster: &mut Cluster) -> Result<()> {
    let old = ranges(&cluster.node("node2")?);
    let others = |cluster: &Cluster, ranges: &[String], expected: bool| {
        for index in [0, 2] {
            let member = &cluster.members[index];
            eventually(&format!("routes of {}", member.name), || {
                let routes = member.routes()?;
                for range in ranges {
                    ensure!(routes.contains(range) == expected, "{range}: {routes:?}");
                }
                Ok(())
            })?;
        }
        anyhow::Ok(())
    };
    others(cluster, &old, true).context("before")?;
    cluster.control.kubectl(&["delete", "node", "node2"])?;
    others(cluster, &old, false).context("deleted")?;
    cluster.members[1].restart_kubelet()?;
    let mut new = Vec::new();
    eventually("the controller manager gives ranges", || {
        new = ranges(&cluster.node("node2")?);
        ensure!(!new.is_empty(), "none yet");
        Ok(())
    })?;
    ensure!(
        new.iter().all(|range| !old.contains(range)),
        "the same ranges again: {new:?}"
    );
    others(cluster, &new, true).context("registered again")?;
    let member = &cluster.members[1];
    eventually("the network follows", || {
        network_is_of_node(cluster, member)
    })?;
    cluster.condition("node2", "Ready", "True")?;
    let pods = cluster.pods()?;
    is_of_ranges(&pods[1], &new)?;
    all_reach_all(&pods)?;
    Pod::remove_all(cluster, pods)
}

/// What a person asks has no complaint, on nodes as a real Kubernetes leaves them.
pub(crate) fn command_line(cluster: &mut Cluster) -> Result<()> {
    let pods = cluster.pods()?;
    for member in &cluster.members {
        for (command, expected) in [
            ("status", ""),
            ("doctor", "nothing to complain about"),
            ("selftest", ""),
        ] {
            let said = member
                .underpass(&[command])
                .with_context(|| format!("{command} on {}", member.name))?;
            ensure!(
                said.contains(expected),
                "{command} on {}: {said}",
                member.name
            );
        }
    }
    Pod::remove_all(cluster, pods)
}

/// Nothing of the plugin is left on a node that is uninstalled, which is not ready any more, until an agent runs again.
pub(crate) fn uninstalled(cluster: &mut Cluster) -> Result<()> {
    let member = &mut cluster.members[2];
    member.stop_agent(End::Term)?;
    member.underpass(&["uninstall"])?;
    nothing_is_left(member)?;
    let said = cluster.condition("node3", "Ready", "False")?;
    ensure!(said.contains("cni"), "not ready for another reason: {said}");
    let member = &mut cluster.members[2];
    member.start_agent()?;
    member.is_installed()?;
    cluster.condition("node3", "Ready", "True")?;
    let pods = cluster.pods()?;
    all_reach_all(&pods)?;
    Pod::remove_all(cluster, pods)
}

fn nothing_is_left(member: &Member) -> Result<()> {
    ensure!(
        !member.cage().path(CONFLIST).exists(),
        "the conflist is left"
    );
    let script = "ls -A /opt/cni/bin /sys/fs/bpf/underpass /var/lib/cni/networks 2>/dev/null | grep -v ':$' || true";
    let left = member.cage().expect("sh", &["-c", script])?;
    ensure!(left.trim().is_empty(), "{left}");
    for direction in ["ingress", "egress"] {
        let filters = member
            .cage()
            .expect("tc", &["filter", "show", "dev", "eth0", direction])?;
        ensure!(filters.trim().is_empty(), "{filters}");
    }
    Ok(())
}

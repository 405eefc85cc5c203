//! Pods come and go and reach each other while a part of the cluster is away, and after it.

use anyhow::{Context as _, Result, ensure};
use underpass_runtimes::containerd::End;

use crate::{
    cluster::Cluster,
    eventually,
    member::Member,
    pod::{Pod, Wish, all_reach_all},
};

/// Without the API server a kubelet starts and ends pods that it finds in files.
pub(crate) fn without_api_server(cluster: &mut Cluster) -> Result<()> {
    let mut pods = cluster.pods()?;
    let before = cluster.members[0].leases()?;
    cluster.control.stop_server()?;
    all_reach_all(&pods).context("those that were there")?;
    let member = &cluster.members[0];
    let wish = Wish::new("fixed", &member.name).fixed();
    member.add_static_pod("fixed", wish.json())?;
    let fixed = Pod::of_runtime(member, &format!("fixed-{}", member.name))?;
    pods.push(fixed);
    all_reach_all(&pods).context("with the new one")?;
    let fixed = pods.pop().context("the new one")?;
    ensure!(
        fixed.addresses().iter().all(|ip| !before.contains(ip)),
        "its addresses are new"
    );
    member.remove_static_pod("fixed")?;
    drop(fixed);
    eventually("its addresses are free", || {
        let now = member.leases()?;
        ensure!(now == before, "{now:?} instead of {before:?}");
        Ok(())
    })?;
    cluster.control.resume_server()?;
    for member in &cluster.members {
        cluster.condition(&member.name, "Ready", "True")?;
    }
    Pod::remove_all(cluster, pods)
}

/// Without agents nothing is withdrawn, and pods are added and removed.
pub(crate) fn without_agents(cluster: &mut Cluster) -> Result<()> {
    let before = at_rest(cluster)?;
    for member in &mut cluster.members {
        member.stop_agent(End::Kill)?;
    }
    // The checks after this one need agents, whatever it comes to.
    let without = pods_come_and_go(cluster, &before);
    for member in &mut cluster.members {
        member.start_agent()?;
        member.is_installed()?;
    }
    without
}

fn pods_come_and_go(cluster: &Cluster, routes: &[Vec<String>]) -> Result<()> {
    let pods = cluster.pods()?;
    all_reach_all(&pods)?;
    Pod::remove_all(cluster, pods)?;
    let after = at_rest(cluster)?;
    ensure!(after == routes, "{after:?} instead of {routes:?}");
    Ok(())
}

/// The routes of all nodes, once no pod has an address: the API may have forgotten one before its network is gone.
fn at_rest(cluster: &Cluster) -> Result<Vec<Vec<String>>> {
    eventually("no address is leased", || {
        for member in &cluster.members {
            let leases = member.leases()?;
            ensure!(leases.is_empty(), "{} has {leases:?}", member.name);
        }
        Ok(())
    })?;
    let members = cluster.members.iter();
    members.map(Member::routes).collect()
}

/// A kubelet that starts again finds its pods as they were.
pub(crate) fn with_another_kubelet(cluster: &mut Cluster) -> Result<()> {
    let pods = cluster.pods()?;
    for member in &mut cluster.members {
        member.restart_kubelet()?;
    }
    outlived(cluster, pods)
}

/// So does a containerd that starts again.
pub(crate) fn with_another_runtime(cluster: &mut Cluster) -> Result<()> {
    let pods = cluster.pods()?;
    for member in &mut cluster.members {
        member.restart_runtime()?;
    }
    outlived(cluster, pods)
}

/// Sees that pods are still the same and reach each other, and that another one joins them.
fn outlived(cluster: &Cluster, mut pods: Vec<Pod>) -> Result<()> {
    all_reach_all(&pods)?;
    for member in &cluster.members {
        cluster.condition(&member.name, "Ready", "True")?;
    }
    pods.push(Pod::start_one(cluster, &Wish::new("another", "node2"))?);
    all_reach_all(&pods)?;
    let said = cluster.control.get(&["pods"])?;
    for pod in said["items"].as_array().into_iter().flatten() {
        let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
        ensure!(
            restarts == 0,
            "{} was started {restarts} times more",
            pod["metadata"]["name"]
        );
    }
    Pod::remove_all(cluster, pods)
}

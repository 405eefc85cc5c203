//! What an agent writes to its Node when it is told to: the condition and the taint that schedulers wait for.

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use underpass_tests::prelude::*;

use super::{fixture::Cluster, member::Member};

const TAINT: &str = "underpass.example/no-network";
const OPTIONS: [&str; 5] = [
    "--resync",
    "2",
    "--node-condition",
    "--startup-taint",
    TAINT,
];
/// What the fake API calls a write of the condition, and of the taints.
const WRITES: [&str; 2] = ["patch status", "patch"];

/// A Node as a kubelet and a cloud make it: not to be used before somebody says that it has a network.
fn young(member: &Member, uid: &str, ranges: &[String]) -> Value {
    let addresses: Vec<Value> = member
        .addresses()
        .iter()
        .map(|address| json!({"type": "InternalIP", "address": address}))
        .collect();
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": member.name, "uid": uid, "labels": {"of": "others"}},
        "spec": {"podCIDRs": ranges, "taints": [
            {"key": TAINT, "effect": "NoSchedule"}, others_taint(), {"key": TAINT, "effect": "NoExecute"}]},
        "status": {"addresses": addresses, "conditions": [
            {"type": "Ready", "status": "True"}, unavailable("2026-01-01T00:00:00Z")]},
    })
}

fn others_taint() -> Value {
    json!({"key": "others", "effect": "NoExecute", "value": "a", "timeAdded": "2026-01-01T00:00:00Z"})
}

/// What a cloud's controller writes.
fn unavailable(since: &str) -> Value {
    json!({"type": "NetworkUnavailable", "status": "True", "reason": "NoRouteCreated", "lastTransitionTime": since})
}

fn conditions(node: &Value) -> &[Value] {
    node["status"]["conditions"]
        .as_array()
        .map_or(&[], Vec::as_slice)
}

/// Waits until the API knows that the node can be used, and nothing of others was changed.
fn is_announced(cluster: &Cluster, member: &Member, taints: &[Value]) -> Result<()> {
    eventually("the Node says that it has a network", || {
        let node = cluster.api.node(&member.name).context("a Node")?;
        ensure!(node["spec"]["taints"] == Value::from(taints), "{node}");
        let of = |kind: &str| conditions(&node).iter().find(|one| one["type"] == kind);
        let network = of("NetworkUnavailable").context("no condition")?;
        let has = |key: &str, value: &str| network[key] == value;
        ensure!(
            has("status", "False") && has("reason", "UnderpassIsUp"),
            "{network}"
        );
        ensure!(
            !has("lastTransitionTime", "2026-01-01T00:00:00Z"),
            "{network}"
        );
        ensure!(of("Ready") == Some(&json!({"type": "Ready", "status": "True"})));
        ensure!(
            node["metadata"]["labels"] == json!({"of": "others"}),
            "{node}"
        );
        Ok(())
    })
}

fn writes(cluster: &Cluster) -> [usize; 2] {
    WRITES.map(|write| cluster.api.count(write))
}

#[test]
fn a_node_is_announced_when_its_network_is_there_and_once() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0])?;
    let member = &mut cluster.members[0];
    cluster.api.put(&member.name, young(member, "a", &[]));
    member.start_agent_with(&OPTIONS)?;
    let member = &cluster.members[0];
    eventually("it looks for ranges", || {
        ensure!(member.log()?.contains("has no podCIDRs"));
        Ok(())
    })?;
    member.compares()?;
    ensure!(writes(&cluster) == [0, 0], "{:?}", writes(&cluster));

    cluster
        .api
        .put(&member.name, young(member, "a", &member.ranges()));
    eventually("something is written", || {
        ensure!(writes(&cluster) != [0, 0]);
        Ok(())
    })?;
    ensure!(member.conflist()?.is_some(), "there is no network yet");
    is_announced(&cluster, member, &[others_taint()])?;
    ensure!(writes(&cluster) == [1, 1], "{:?}", writes(&cluster));

    // Others write into the Node, and nobody has to answer that.
    for heartbeat in 0..3 {
        let mut node = cluster.api.node(&member.name).context("a Node")?;
        node["metadata"]["annotations"] = json!({"heartbeat": heartbeat});
        cluster.api.put(&member.name, node);
        member.compares()?;
    }
    ensure!(writes(&cluster) == [1, 1], "{:?}", writes(&cluster));

    // The next agent finds all right, and takes nothing back when it ends.
    cluster.members[0].stop_agent(Signal::SIGTERM);
    cluster.members[0].start_agent_with(&OPTIONS)?;
    let member = &cluster.members[0];
    member.is_ready()?;
    member.compares()?;
    cluster.members[0].stop_agent(Signal::SIGTERM);
    is_announced(&cluster, &cluster.members[0], &[others_taint()])?;
    ensure!(writes(&cluster) == [1, 1], "{:?}", writes(&cluster));
    Ok(())
}

#[test]
fn other_writers_lose_nothing_and_do_not_win() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let member = &mut cluster.members[0];
    cluster
        .api
        .put(&member.name, young(member, "a", &member.ranges()));
    let rival = json!({"key": "rival", "effect": "NoSchedule"});
    cluster.api.refuse(&[409, 409]);
    cluster.api.be_overtaken(rival.clone());
    member.start_agent_with(&OPTIONS)?;
    let member = &cluster.members[0];
    is_announced(&cluster, member, &[others_taint(), rival.clone()])?;

    // A cloud's controller writes its own word again, and again.
    for number in 0..2 {
        let mut node = cluster.api.node(&member.name).context("a Node")?;
        let list = node["status"]["conditions"].as_array_mut();
        let mut all = list.into_iter().flatten();
        let network = all.find(|one| one["type"] == "NetworkUnavailable");
        *network.context("a condition")? =
            unavailable(&format!("2026-01-0{}T00:00:00Z", number + 1));
        cluster.api.put(&member.name, node);
        is_announced(&cluster, member, &[others_taint(), rival.clone()])?;
    }
    let log = member.log()?;
    ensure!(
        log.matches("somebody has undone this").count() == 1,
        "{log}"
    );

    // Deleted, and registered again by its kubelet: with other ranges, and all that it is registered with.
    let before = writes(&cluster);
    cluster.api.delete(&member.name);
    let moved = ["10.244.77.0/24", "fd00:244:77::/64"].map(str::to_owned);
    cluster.api.put(&member.name, young(member, "b", &moved));
    eventually("something is written", || {
        ensure!(writes(&cluster) != before);
        Ok(())
    })?;
    let conflist = member.conflist()?.context("a conflist")?;
    let subnet = &conflist["plugins"][0]["ipam"]["ranges"][0][0]["subnet"];
    ensure!(
        *subnet == moved[0].as_str(),
        "before the network has {moved:?}: {conflist}"
    );
    is_announced(&cluster, member, &[others_taint()])
}

#[test]
fn an_agent_without_the_right_to_write_does_all_the_rest() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0, 1])?;
    cluster.api.forbid(true);
    for member in &mut cluster.members {
        cluster
            .api
            .put(&member.name, young(member, "a", &member.ranges()));
        member.start_agent_with(&OPTIONS)?;
    }
    cluster.settle()?;
    let member = &cluster.members[0];
    member.is_ready()?;
    eventually("it tries again", || {
        ensure!(member.metric("node_write_failures_total")? >= 4);
        Ok(())
    })?;
    let pods = cluster.pods()?;
    Cluster::all_reach_all(&pods)?;
    let log = member.log()?;
    for what in [
        "deploy/components/node-condition",
        "deploy/components/taint",
    ] {
        ensure!(log.matches(what).count() == 1, "{what}: {log}");
    }
    // Somebody applies what it asks for.
    cluster.api.forbid(false);
    is_announced(&cluster, member, &[others_taint()])
}

//! The agent in a container of its image: with what the manifest mounts of the node, and nothing else.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use nix::sys::signal::Signal;
use serde_json::Value;
use underpass_tests::prelude::*;

use super::{fixture::Cluster, member::HEALTH};
use container::Container;

mod container;

/// A resource of the manifest that people apply.
fn resource(kind: &str) -> Result<Value> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/underpass.yaml");
    let text = fs::read_to_string(file)?;
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(&text).map_err(|error| anyhow::anyhow!("{error}"))?;
    let found = documents.into_iter().find(|one| one["kind"] == kind);
    found.with_context(|| format!("a {kind}"))
}

#[test]
fn a_container_of_the_image_makes_a_node_of_the_cluster() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::cold(&[0, 1])?;
    let pod = resource("DaemonSet")?["spec"]["template"]["spec"].take();
    let container = Container::new(&cluster.members[0], &pod)?;
    cluster.members[0].agent = Some(container.start(&cluster.members[0])?);
    cluster.members[1].start_agent()?;
    let settled = cluster.settle();
    settled.with_context(|| container::log(&cluster.members[0]))?;

    // What the kubelet asks.
    let member = &cluster.members[0];
    for probe in ["livenessProbe", "readinessProbe"] {
        let get = &pod["containers"][0][probe]["httpGet"];
        let at = format!("{}:{}", get["host"].as_str().unwrap_or("?"), get["port"]);
        ensure!(at == HEALTH, "{probe} asks at {at}");
        let path = get["path"].as_str().context("a path")?;
        eventually(probe, || {
            let said = member.get(path)?;
            ensure!(
                said.starts_with("HTTP/1.1 200"),
                "{said}{}",
                container::log(member)
            );
            Ok(())
        })?;
    }
    // What it has of the API is what it asks of it.
    let role = resource("ClusterRole")?;
    let rules = role["rules"].as_array().context("rules")?;
    ensure!(rules.len() == 1 && rules[0]["resources"] == serde_json::json!(["nodes"]));
    let verbs = rules[0]["verbs"].as_array().context("verbs")?;
    let verbs: BTreeSet<&str> = verbs.iter().filter_map(Value::as_str).collect();
    let requests = cluster.api.requests();
    ensure!(
        verbs == requests.iter().map(String::as_str).collect(),
        "{verbs:?} and {requests:?}"
    );

    // The leases' index is of the node's machine, or nothing of before a reboot would be freed.
    let index = "/var/lib/cni/networks/.underpass/pods/mark";
    let read = |path: &Path| member.node.netns().run(|| fs::read_to_string(path));
    let mark = read(Path::new(index)).context(index)?;
    let machine = read(&Container::on_node("/etc/machine-id")?)?;
    ensure!(
        mark.trim_end().ends_with(machine.trim_end()),
        "{mark} on {machine}"
    );

    let pods = cluster.pods()?;
    Cluster::all_reach_all(&pods)?;
    cluster.all_bypass()?;
    // Stopped as the kubelet stops it, it takes nothing back.
    cluster.members[0].stop_agent(Signal::SIGTERM);
    Cluster::all_reach_all(&pods)
}

/// The command of an init container that another network's manifest has, in the same place.
#[test]
fn the_image_installs_the_plugin_for_others() -> Result<()> {
    needs_root!();
    let cluster = Cluster::cold(&[0])?;
    let member = &cluster.members[0];
    let pod = resource("DaemonSet")?["spec"]["template"]["spec"].take();
    Container::new(member, &pod)?;
    let install = &mut container::command("/underpass");
    let said = member
        .node
        .netns()
        .expect(install.args(["install", "--upgrade"]), &[])?;
    ensure!(said.contains("no conflist is written"), "{said}");
    let installed = Container::on_node("/opt/cni/bin/underpass")?;
    let version = member
        .node
        .netns()
        .expect(Command::new(installed).env_clear().arg("--version"), &[])?;
    ensure!(version.contains(env!("CARGO_PKG_VERSION")), "{version}");
    Ok(())
}

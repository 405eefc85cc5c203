//! The agent as a cluster runs it: by a manifest, from an image, with the token of its service account.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use underpass_runtimes::containerd::{End, SNAPSHOTTER};

use crate::{
    cluster::Cluster,
    eventually,
    pod::{Pod, all_reach_all},
};

/// Names the file that is applied, in which the agent is a `DaemonSet` of this name.
const MANIFEST: &str = "UNDERPASS_TEST_MANIFEST";
const DAEMON_SET: [&str; 3] = ["daemonset", "underpass-agent", "--namespace=kube-system"];
/// Names the archive with the image that the file names.
const IMAGE: &str = "UNDERPASS_TEST_IMAGE";

/// The parts of the deployment that change its `DaemonSet`, beside the file that is applied.
const PARTS: [&str; 6] = [
    "components/vxlan",
    "components/cloud",
    "components/k3s",
    "components/node-condition",
    "components/taint",
    "examples/cluster",
];
/// What each of them has: a patch, what kustomize reads, and all else that is applied with it.
const PATCH: &str = "daemon-set.yaml";
const KUSTOMIZATION: &str = "kustomization.yaml";

/// What of the manifest the agent needs if it does not run as its `DaemonSet`: account and role.
pub(crate) fn role() -> Result<String> {
    let text = read(Path::new(&named(MANIFEST)?))?;
    let documents = text.split("---\n");
    let role: Vec<&str> = documents
        .filter(|document| !document.contains("kind: DaemonSet\n"))
        .collect();
    Ok(role.join("---\n"))
}

fn named(variable: &str) -> Result<String> {
    env::var(variable)
        .with_context(|| format!("{variable} names nothing: run `cargo xtask test kubernetes`"))
}

/// The server would take the file, and what each part makes of it; a field that it does not know is refused.
pub(crate) fn fits_the_server(cluster: &mut Cluster) -> Result<()> {
    let control = &cluster.control;
    let path = PathBuf::from(named(MANIFEST)?);
    let text = read(&path)?;
    control.would_apply(&text)?;
    let wrong = text.replace("hostNetwork: true", "hostNetworks: true");
    let refusal = control.would_apply(&wrong).err();
    let refusal = refusal.context("a field that nobody knows is taken")?;
    ensure!(
        format!("{refusal:#}").contains("hostNetworks"),
        "{refusal:#}"
    );
    let mut documents = text.split("---\n");
    let set = documents
        .find(|document| document.contains("kind: DaemonSet\n"))
        .context("the file has a DaemonSet")?;
    let folder = path.parent().context("a folder")?;
    for part in PARTS {
        let documents = rendered(cluster, set, &folder.join(part));
        documents
            .and_then(|all| all.iter().try_for_each(|one| control.would_apply(one)))
            .with_context(|| part.to_owned())?;
    }
    Ok(())
}

/// What is applied with a part: the `DaemonSet` that its patch makes, and what it adds. (This kubectl's kustomize knows no components.)
fn rendered(cluster: &Cluster, set: &str, part: &Path) -> Result<Vec<String>> {
    let changed = cluster.control.patched(set, &read(&part.join(PATCH))?)?;
    let mut documents = vec![changed];
    for entry in fs::read_dir(part).with_context(|| format!("list {}", part.display()))? {
        let path = entry?.path();
        if !path.ends_with(PATCH) && !path.ends_with(KUSTOMIZATION) {
            documents.push(read(&path)?);
        }
    }
    Ok(documents)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

/// One file makes the network of nodes that have none. What it made stays when it is taken back, so that no agent runs after this.
pub(crate) fn by_manifest(cluster: &mut Cluster) -> Result<()> {
    let (manifest, image) = (named(MANIFEST)?, named(IMAGE)?);
    for member in &mut cluster.members {
        member.stop_agent(End::Term)?;
        member.underpass(&["uninstall"])?;
        let import = ["images", "import", "--snapshotter", SNAPSHOTTER, &image];
        member.containerd.ctr(&import)?;
    }
    for member in &cluster.members {
        cluster.condition(&member.name, "Ready", "False")?;
    }
    cluster
        .control
        .kubectl(&["apply", "--filename", &manifest])?;
    eventually("the agents are ready", || is_ready(cluster))?;
    for member in &cluster.members {
        cluster.condition(&member.name, "Ready", "True")?;
    }
    let pods = cluster.pods()?;
    all_reach_all(&pods)?;
    let delete = ["delete", "--wait=false", "--filename", &manifest];
    cluster.control.kubectl(&delete)?;
    eventually("the agents are gone", || {
        let all = cluster.control.get(&["pods", "--namespace=kube-system"])?;
        ensure!(all["items"].as_array().is_some_and(Vec::is_empty), "{all}");
        Ok(())
    })?;
    all_reach_all(&pods).context("without agents")?;
    Pod::remove_all(cluster, pods)?;
    let pods = cluster.pods()?;
    all_reach_all(&pods).context("new ones")?;
    Pod::remove_all(cluster, pods)
}

fn is_ready(cluster: &Cluster) -> Result<()> {
    let set = cluster.control.get(&DAEMON_SET)?;
    let status = &set["status"];
    let events = cluster
        .control
        .get(&["events", "--namespace=kube-system"])?;
    let events = events["items"].as_array().into_iter().flatten();
    let said: BTreeSet<String> = events.map(|event| event["message"].to_string()).collect();
    ensure!(
        status["numberReady"] == cluster.members.len(),
        "{status} {said:?}"
    );
    Ok(())
}

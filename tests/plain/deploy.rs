//! The files of deploy/: what Kubernetes makes of them, and whether they fit each other.

mod configs;
mod manifest;
mod others;

use std::{collections::BTreeSet, process::Command};

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::node::plugin;

use manifest::{Kustomization, all_files, fits_the_api, folder, merge, read, read_one};

/// The kustomizations that change something of the base.
const CHANGES: [&str; 6] = [
    "components/vxlan",
    "components/cloud",
    "components/k3s",
    "examples/cluster",
    "components/node-condition",
    "components/taint",
];

/// What a kustomization refers to.
fn id(document: &Value) -> Result<[String; 4]> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let id = [
        text(&document["apiVersion"]),
        text(&document["kind"]),
        text(&document["metadata"]["namespace"]),
        text(&document["metadata"]["name"]),
    ];
    ensure!(!id[1].is_empty() && !id[3].is_empty(), "{document}");
    Ok(id)
}

fn base() -> Result<Vec<Value>> {
    let kustomization: Kustomization = read_one("base/kustomization.yaml")?;
    let files = kustomization.resources.iter();
    let documents: Result<Vec<Vec<Value>>> =
        files.map(|file| read(&format!("base/{file}"))).collect();
    Ok(documents?.concat())
}

/// What a folder's patch makes of the one resource of the base that it names.
fn patched(folder: &str) -> Result<(Value, Value)> {
    let kustomization: Kustomization = read_one(&format!("{folder}/kustomization.yaml"))?;
    let [file] = kustomization.patches.as_slice() else {
        anyhow::bail!("{folder}: one patch is expected");
    };
    let patch: Value = read_one(&format!("{folder}/{}", file.path))?;
    let target = id(&patch)?;
    let mut base = base()?.into_iter();
    let before = base
        .find(|document| id(document).is_ok_and(|id| id == target))
        .with_context(|| format!("{folder}: the base has no {target:?}"))?;
    let mut after = before.clone();
    merge(&mut after, &patch);
    ensure!(before != after, "{folder}: the patch changes nothing");
    Ok((before, after))
}

fn pod(daemon_set: &Value) -> &Value {
    &daemon_set["spec"]["template"]["spec"]
}

/// The names in a list of objects.
fn names<'a>(list: &'a Value, key: &str) -> BTreeSet<&'a str> {
    let list = list.as_array().into_iter().flatten();
    list.filter_map(|entry| entry[key].as_str()).collect()
}

#[test]
fn the_rendered_file_is_the_base() -> Result<()> {
    let sorted = |documents: Vec<Value>| -> Result<Vec<_>> {
        let with_id = documents.into_iter().map(|one| Ok((id(&one)?, one)));
        let mut documents = with_id.collect::<Result<Vec<_>>>()?;
        documents.sort_by(|one, other| one.0.cmp(&other.0));
        Ok(documents)
    };
    let [rendered, base] = [sorted(read("underpass.yaml")?)?, sorted(base()?)?];
    ensure!(
        rendered == base,
        "run `kubectl kustomize deploy/base > deploy/underpass.yaml`: {rendered:#?} instead of {base:#?}"
    );
    Ok(())
}

#[test]
fn every_file_is_of_a_kind_that_is_looked_at() -> Result<()> {
    for file in all_files()? {
        let is_changing = file.starts_with("components/") || file.starts_with("examples/");
        for document in read::<Value>(&file)? {
            let kind = document["kind"].as_str().unwrap_or_default();
            match kind {
                // Each is read strictly, and names files that exist.
                "Kustomization" | "Component" => {
                    let kustomization: Kustomization = read_one(&file)?;
                    let folder = folder().join(&file);
                    let folder = folder.parent().context("a folder")?;
                    for path in kustomization.files() {
                        ensure!(folder.join(path).exists(), "{file} names {path}");
                    }
                }
                // Patches are looked at as what they make of others.
                "DaemonSet" if is_changing => {}
                _ => fits_the_api(&document).with_context(|| file.clone())?,
            }
        }
    }
    Ok(())
}

#[rstest]
fn a_patch_fits_the_base(
    #[values(
        CHANGES[0], CHANGES[1], CHANGES[2], CHANGES[3], CHANGES[4], CHANGES[5]
    )]
    folder: &str,
) -> Result<()> {
    let (before, after) = patched(folder)?;
    fits_the_api(&after)?;
    // What is merged by name has to have a namesake: else it would be something new, which nobody uses.
    for list in ["containers", "volumes"] {
        let [before, after] = [&before, &after].map(|one| names(&pod(one)[list], "name"));
        ensure!(before == after, "{list}: {after:?}");
    }
    Ok(())
}

/// What the agent may do besides reading, each with the component that gives it: one verb for one resource.
#[rstest]
#[case("components/node-condition", "nodes/status")]
#[case("components/taint", "nodes")]
fn a_component_gives_one_right_to_the_agent(
    #[case] folder: &str,
    #[case] resource: &str,
) -> Result<()> {
    let kustomization: Kustomization = read_one(&format!("{folder}/kustomization.yaml"))?;
    let mut documents = Vec::new();
    for file in &kustomization.resources {
        documents.extend(read::<Value>(&format!("{folder}/{file}"))?);
    }
    for document in &documents {
        fits_the_api(document)?;
        let known = base()?.into_iter().map(|one| id(&one));
        let known = known.collect::<Result<Vec<_>>>()?;
        ensure!(!known.contains(&id(document)?), "the base has {document}");
    }
    let find = |kind: &str| {
        let found = documents.iter().find(|one| one["kind"] == kind);
        found.with_context(|| format!("{folder} has no {kind}"))
    };
    let (role, binding) = (find("ClusterRole")?, find("ClusterRoleBinding")?);
    let right = json!([{"apiGroups": [""], "resources": [resource], "verbs": ["patch"]}]);
    ensure!(role["rules"] == right, "{role}");
    ensure!(
        binding["roleRef"]["name"] == role["metadata"]["name"],
        "{binding}"
    );
    let base = base()?;
    let mut others = base
        .iter()
        .filter(|one| one["kind"] == "ClusterRoleBinding");
    let subjects = others.next().map(|one| &one["subjects"]);
    ensure!(Some(&binding["subjects"]) == subjects, "{binding}");
    Ok(())
}

#[test]
fn a_misspelt_field_or_a_wrong_type_is_found() -> Result<()> {
    let base = base()?;
    let daemon_set = base.iter().find(|one| one["kind"] == "DaemonSet");
    let daemon_set = daemon_set.context("the base has a DaemonSet")?;
    fits_the_api(daemon_set)?;
    let mut misspelt = daemon_set.clone();
    misspelt["spec"]["template"]["spec"]["hostNetworks"] = true.into();
    ensure!(fits_the_api(&misspelt).is_err());
    let mut wrong = daemon_set.clone();
    wrong["spec"]["template"]["spec"]["hostNetwork"] = "yes".into();
    ensure!(fits_the_api(&wrong).is_err());
    Ok(())
}

#[test]
fn every_volume_is_mounted_and_every_mount_has_its_volume() -> Result<()> {
    for document in base()?.iter().filter(|one| one["kind"] == "DaemonSet") {
        let mounts = names(&pod(document)["containers"][0]["volumeMounts"], "name");
        let volumes = names(&pod(document)["volumes"], "name");
        ensure!(
            !volumes.is_empty() && mounts == volumes,
            "{mounts:?} and {volumes:?}"
        );
    }
    Ok(())
}

#[test]
fn the_image_is_that_of_this_version() -> Result<()> {
    let image = format!("{}:{}", underpass_image::NAME, env!("CARGO_PKG_VERSION"));
    let mut found = 0;
    for file in all_files()? {
        for document in read::<Value>(&file)? {
            let pod = pod(&document);
            for list in ["initContainers", "containers"] {
                for named in names(&pod[list], "image") {
                    ensure!(named == image, "{file} names {named}, not {image}");
                    found += 1;
                }
            }
            for tag in names(&document["images"], "newTag") {
                ensure!(tag == env!("CARGO_PKG_VERSION"), "{file} names {tag}");
            }
        }
    }
    ensure!(found >= 3, "{found} images");
    Ok(())
}

/// The environment of the agent's container, as far as the manifest says it.
fn environment(daemon_set: &Value) -> Vec<(String, String)> {
    let list = pod(daemon_set)["containers"][0]["env"].as_array();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    list.into_iter()
        .flatten()
        .filter_map(|one| Some((text(&one["name"])?, text(&one["value"])?)))
        .collect()
}

#[rstest]
fn the_agent_understands_its_environment(
    #[values(CHANGES[0], CHANGES[1], CHANGES[3], CHANGES[4], CHANGES[5])] folder: &str,
) -> Result<()> {
    let agent = || {
        let mut command = Command::new(plugin().with_file_name("underpass-agent"));
        command.env_clear();
        command
    };
    let (_, after) = patched(folder)?;
    let help = agent().arg("--help").output()?;
    let help = String::from_utf8(help.stdout)?;
    let variables = environment(&after);
    ensure!(!variables.is_empty(), "{folder} sets nothing");
    for (name, _) in &variables {
        ensure!(
            name.starts_with("KUBERNETES_SERVICE_") || help.contains(&format!("[env: {name}=")),
            "{folder}: the agent does not know {name}"
        );
    }
    // It reads all of them, and ends as there is nothing to run.
    let output = agent()
        .env("NODE_NAME", "a")
        .envs(variables)
        .args(["--underpass", "/nowhere/underpass"])
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        output.status.code() == Some(1) && said.contains("there is no executable"),
        "{folder}: {said}"
    );
    Ok(())
}

#[test]
fn pods_of_a_cluster_in_kind_have_both_families() -> Result<()> {
    let cluster: Value = read_one("examples/kind/cluster.yaml")?;
    let networking = &cluster["networking"];
    ensure!(networking["disableDefaultCNI"] == true, "{networking}");
    let ranges = networking["podSubnet"].as_str().context("ranges")?;
    let ranges: Vec<IpNet> = ranges
        .split(',')
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let families: Vec<bool> = ranges.iter().map(|range| range.addr().is_ipv4()).collect();
    ensure!(families == [true, false], "{ranges:?}");
    Ok(())
}

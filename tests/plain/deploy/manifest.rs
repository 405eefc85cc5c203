//! Reading manifests: as YAML, as what the API takes, and one merged into another.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, ServiceAccount},
    rbac::v1::{ClusterRole, ClusterRoleBinding},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use super::others::{Cluster, NetworkAttachmentDefinition};

/// A file of kustomize, with the fields that ours have and no others.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Kustomization {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    #[serde(default)]
    pub(super) resources: Vec<String>,
    #[serde(default)]
    components: Vec<String>,
    #[serde(default)]
    pub(super) patches: Vec<Patch>,
    #[serde(default, rename = "images")]
    _images: Vec<Image>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Patch {
    pub(super) path: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Image {
    #[serde(rename = "name")]
    _name: String,
    #[serde(rename = "newName")]
    _new_name: String,
    #[serde(rename = "newTag")]
    _new_tag: String,
}

impl Kustomization {
    /// The files and folders that it names.
    pub(super) fn files(&self) -> impl Iterator<Item = &str> {
        let patches = self.patches.iter().map(|patch| &patch.path);
        let named = self.resources.iter().chain(&self.components).chain(patches);
        named.map(String::as_str)
    }
}

pub(super) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

/// All files of YAML, by their paths in the folder.
pub(super) fn all_files() -> Result<Vec<String>> {
    let mut files = Vec::new();
    let mut folders = vec![folder()];
    while let Some(inside) = folders.pop() {
        for entry in fs::read_dir(&inside).with_context(|| format!("list {}", inside.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path
                .extension()
                .is_some_and(|extension| extension == "yaml")
            {
                let name = path.strip_prefix(folder())?;
                files.push(name.display().to_string());
            }
        }
    }
    ensure!(files.len() > 10, "{files:?}");
    Ok(files)
}

/// The documents of a file.
pub(super) fn read<T: DeserializeOwned>(file: &str) -> Result<Vec<T>> {
    let text = fs::read_to_string(folder().join(file)).with_context(|| format!("read {file}"))?;
    serde_saphyr::from_multiple(&text)
        .map_err(|error| anyhow::anyhow!("{error}"))
        .with_context(|| format!("decode {file}"))
}

/// The only document of a file.
pub(super) fn read_one<T: DeserializeOwned>(file: &str) -> Result<T> {
    let mut documents = read(file)?;
    ensure!(documents.len() == 1, "{file} is of several documents");
    documents.pop().context("a document")
}

/// Fails unless the API, or who has made the kind, takes the document as it is and knows each of its fields.
pub(super) fn fits_the_api(document: &Value) -> Result<()> {
    let kind = |key: &str| document[key].as_str().unwrap_or_default();
    match (kind("apiVersion"), kind("kind")) {
        ("v1", "ServiceAccount") => there_and_back::<ServiceAccount>(document),
        ("v1", "ConfigMap") => there_and_back::<ConfigMap>(document),
        ("rbac.authorization.k8s.io/v1", "ClusterRole") => there_and_back::<ClusterRole>(document),
        ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding") => {
            there_and_back::<ClusterRoleBinding>(document)
        }
        ("apps/v1", "DaemonSet") => there_and_back::<DaemonSet>(document),
        ("kind.x-k8s.io/v1alpha4", "Cluster") => there_and_back::<Cluster>(document),
        ("k8s.cni.cncf.io/v1", "NetworkAttachmentDefinition") => {
            there_and_back::<NetworkAttachmentDefinition>(document)
        }
        other => bail!("nobody knows the kind {other:?}"),
    }
}

/// A field that the type does not have is lost on the way, or refused.
fn there_and_back<T: DeserializeOwned + Serialize>(document: &Value) -> Result<()> {
    let typed: T = serde_json::from_value(document.clone())?;
    let mut back = serde_json::to_value(typed)?;
    drop_nulls(&mut back);
    ensure!(
        back == *document,
        "{document:#} became {back:#}: a field is unknown, or missing"
    );
    Ok(())
}

/// A field that is not there is null in types that do not say otherwise.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(drop_nulls);
        }
        Value::Array(elements) => elements.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

/// Merges a patch, as the API does for the kinds that are used here: lists of objects by name, other lists as a whole.
pub(super) fn merge(into: &mut Value, patch: &Value) {
    match (into, patch) {
        (Value::Object(into), Value::Object(patch)) => {
            for (key, value) in patch {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(patch))
            if patch.iter().all(|one| one["name"].is_string()) =>
        {
            for one in patch {
                match into.iter_mut().find(|known| known["name"] == one["name"]) {
                    Some(known) => merge(known, one),
                    None => into.push(one.clone()),
                }
            }
        }
        // One that is new may itself be an object whose parts are new.
        (into @ Value::Null, Value::Object(patch)) => {
            *into = Value::Object(Map::new());
            merge(into, &Value::Object(patch.clone()));
        }
        (into, patch) => *into = patch.clone(),
    }
}

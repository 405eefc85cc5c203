//! Kinds that Kubernetes' own types do not have, with all the fields that their makers have published, and no others.

use std::collections::BTreeMap;

use anyhow::Result;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use rstest::rstest;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::manifest::{fits_the_api, read_one};

/// A cluster of kind: `pkg/apis/config/v1alpha4` of kubernetes-sigs/kind, which refuses a field that it does not know.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Cluster {
    kind: String,
    api_version: String,
    name: Option<String>,
    nodes: Option<Vec<Node>>,
    networking: Option<Networking>,
    feature_gates: Option<BTreeMap<String, bool>>,
    runtime_config: Option<BTreeMap<String, String>>,
    kubeadm_config_patches: Option<Vec<String>>,
    #[serde(rename = "kubeadmConfigPatchesJSON6902")]
    kubeadm_json_patches: Option<Vec<JsonPatch>>,
    containerd_config_patches: Option<Vec<String>>,
    #[serde(rename = "containerdConfigPatchesJSON6902")]
    containerd_json_patches: Option<Vec<String>>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Node {
    role: Option<Role>,
    image: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    extra_mounts: Option<Vec<Mount>>,
    extra_port_mappings: Option<Vec<PortMapping>>,
    gpus: Option<String>,
    kubeadm_config_patches: Option<Vec<String>>,
    #[serde(rename = "kubeadmConfigPatchesJSON6902")]
    kubeadm_json_patches: Option<Vec<JsonPatch>>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Role {
    ControlPlane,
    Worker,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Networking {
    ip_family: Option<Families>,
    api_server_port: Option<i32>,
    api_server_address: Option<String>,
    pod_subnet: Option<String>,
    service_subnet: Option<String>,
    #[serde(rename = "disableDefaultCNI")]
    disable_default_cni: Option<bool>,
    kube_proxy_mode: Option<ProxyMode>,
    dns_search: Option<Vec<String>>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum Families {
    Ipv4,
    Ipv6,
    Dual,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum ProxyMode {
    Iptables,
    Ipvs,
    Nftables,
    None,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct JsonPatch {
    group: String,
    version: String,
    kind: String,
    patch: String,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Mount {
    container_path: Option<String>,
    host_path: Option<String>,
    read_only: Option<bool>,
    selinux_relabel: Option<bool>,
    propagation: Option<String>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PortMapping {
    container_port: Option<i32>,
    host_port: Option<i32>,
    listen_address: Option<String>,
    protocol: Option<String>,
}

/// A network that pods can ask for: the `CustomResourceDefinition` of the Network Plumbing Working Group.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct NetworkAttachmentDefinition {
    kind: String,
    api_version: String,
    metadata: ObjectMeta,
    spec: Option<NetworkAttachmentDefinitionSpec>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct NetworkAttachmentDefinitionSpec {
    config: Option<String>,
}

/// A field that the kind does not have, a wrong type, and a word that is none of its own.
#[rstest]
#[case::kind("examples/kind/cluster.yaml", "/networking/podSubnets", json!("10.0.0.0/8"))]
#[case::type_of_kind("examples/kind/cluster.yaml", "/networking/disableDefaultCNI", json!("yes"))]
#[case::word_of_kind("examples/kind/cluster.yaml", "/networking/ipFamily", json!("both"))]
#[case::node_of_kind("examples/kind/cluster.yaml", "/nodes/1/role", json!("master"))]
#[case::multus("examples/multus/network.yaml", "/spec/configs", json!("{}"))]
#[case::type_of_multus("examples/multus/network.yaml", "/spec/config", json!({}))]
#[case::name_of_multus("examples/multus/network.yaml", "/metadata/names", json!("a"))]
fn what_another_kind_does_not_have_is_found(
    #[case] file: &str,
    #[case] place: &str,
    #[case] value: Value,
) -> Result<()> {
    let document: Value = read_one(file)?;
    fits_the_api(&document)?;
    let mut wrong = document.clone();
    let (parent, key) = place.rsplit_once('/').expect("a path");
    let parent = wrong.pointer_mut(parent).expect("the file has it");
    parent[key] = value;
    assert_ne!(wrong, document, "{place}");
    assert!(fits_the_api(&wrong).is_err(), "{wrong:#}");
    Ok(())
}

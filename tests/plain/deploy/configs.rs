//! The CNI configs in the examples, as the plugin reads them.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use underpass::conf::Conf;
use underpass_cni::NetConf;

use super::{
    id,
    manifest::{fits_the_api, merge, read_one},
    pod,
};

const FLANNEL: &str = "examples/flannel";

/// A text in a document, as JSON.
fn json_in(text: &Value) -> Result<Value> {
    Ok(serde_json::from_str(text.as_str().context("a text")?)?)
}

/// Has the plugin decode what it would get from a runtime.
fn decode(config: &Value) -> Result<Conf> {
    let config = NetConf::parse(config.to_string().as_bytes())?;
    Conf::of_network(&config).with_context(|| format!("{:?}", config.raw()))
}

#[test]
fn the_delegate_of_flannel_is_a_network_of_ours() -> Result<()> {
    let config_map: Value = read_one(&format!("{FLANNEL}/config-map.yaml"))?;
    fits_the_api(&config_map)?;
    let data = &config_map["data"];
    let [list, net] = [
        json_in(&data["cni-conf.json"])?,
        json_in(&data["net-conf.json"])?,
    ];
    let plugins = list["plugins"].as_array().context("plugins")?;
    ensure!(plugins[0]["type"] == "flannel", "{list}");
    // What flannel's plugin adds of its own.
    let mut config = json!({
        "name": list["name"], "cniVersion": list["cniVersion"], "mtu": 1450, "ipMasq": true,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": "10.244.1.0/24"}], [{"subnet": "fd00:244:0:1::/64"}]],
            "routes": [{"dst": "10.244.0.0/16"}, {"dst": "fd00:244::/48"}],
        },
    });
    merge(&mut config, &plugins[0]["delegate"]);
    ensure!(config["type"] == "underpass", "{config}");
    decode(&config)?;
    ensure!(
        config["nonMasqueradeCIDRs"] == json!([net["Network"], net["IPv6Network"]]),
        "{config} and {net}"
    );
    Ok(())
}

#[test]
fn the_patch_of_flannel_installs_the_plugin() -> Result<()> {
    let patch: Value = read_one(&format!("{FLANNEL}/daemon-set.yaml"))?;
    ensure!(id(&patch)?[2..] == ["kube-flannel", "kube-flannel-ds"]);
    // As much of flannel's own as the patch changes or refers to.
    let mut daemon_set = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "x"},
        "spec": {
            "selector": {"matchLabels": {"app": "flannel"}},
            "template": {
                "metadata": {"labels": {"app": "flannel"}},
                "spec": {
                    "containers": [{"name": "kube-flannel", "args": ["--ip-masq", "--kube-subnet-mgr"]}],
                    "volumes": [{"name": "cni-plugin", "hostPath": {"path": "/opt/cni/bin"}}],
                },
            },
        },
    });
    merge(&mut daemon_set, &patch);
    fits_the_api(&daemon_set)?;
    let pod = pod(&daemon_set);
    ensure!(
        pod["containers"][0]["args"] == json!(["--kube-subnet-mgr"]),
        "{pod}"
    );
    let command = &pod["initContainers"][0]["command"];
    ensure!(
        *command == json!(["/underpass", "install", "--upgrade"]),
        "{command}"
    );
    Ok(())
}

#[test]
fn the_second_network_of_multus_is_one_of_ours() -> Result<()> {
    let network: Value = read_one("examples/multus/network.yaml")?;
    ensure!(
        id(&network)?[..2] == ["k8s.cni.cncf.io/v1", "NetworkAttachmentDefinition"],
        "{network}"
    );
    let config = json_in(&network["spec"]["config"])?;
    ensure!(config["name"] == network["metadata"]["name"], "{config}");
    decode(&config)?;
    let mut wrong = config.clone();
    wrong["bypass"] = "eager".into();
    ensure!(decode(&wrong).is_err(), "what makes no sense is found");
    Ok(())
}

//! The folder of plugins that runtimes get, and its networks.

use serde_json::{Value, json};
use underpass_tests::{Node, runtime::Conf};

/// The folder, in the cage: `ctr` knows no other.
pub const FOLDER: &str = "/opt/cni/bin";

/// The folder of networks, in the cage: `ctr` knows no other.
pub const NETWORKS: &str = "/etc/cni/net.d";

/// The names that runtimes call, all of them links to one file on a node: `underpass` is the one in the network; containerd's CRI calls
/// `loopback` for each pod besides.
pub(crate) const NAMES: [&str; 2] = ["underpass", "loopback"];

/// The tests' default network as a list of one plugin, in a version of the specification that the runtime speaks. `more` is merged
/// into the plugin's object.
#[must_use]
pub fn conflist(node: &Node, version: &str, more: &Value) -> String {
    let conf = Conf::new(node);
    let mut plugin = conf.json().clone();
    let name = plugin["name"].take();
    if let (Some(plugin), Some(more)) = (plugin.as_object_mut(), more.as_object()) {
        plugin.retain(|key, _| key != "name" && key != "cniVersion");
        plugin.extend(more.clone());
    }
    json!({ "cniVersion": version, "name": name, "plugins": [plugin] }).to_string()
}

/// What a network says whose containers may have ports of the node.
#[must_use]
pub fn with_ports() -> Value {
    json!({ "capabilities": { "portMappings": true } })
}

//! The folder of plugins that runtimes get, and its networks.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use underpass_tests::{Node, runtime::Conf};

/// The folder, in the cage: `ctr` knows no other.
pub const FOLDER: &str = "/opt/cni/bin";

/// The folder of networks, in the cage: `ctr` knows no other.
pub const NETWORKS: &str = "/etc/cni/net.d";

/// Where Debian has the reference plugins.
const REFERENCE: &str = "/usr/lib/cni";

/// The names that runtimes call, and which of them are the plugin under test; the others are reference plugins. Every runtime calls
/// `underpass`, the name in the network; containerd's CRI calls `loopback` for each pod besides.
const NAMES: [(&str, Executable); 2] = [
    ("underpass", Executable::UnderTest),
    ("loopback", Executable::Reference),
];

#[derive(Clone, Copy)]
enum Executable {
    UnderTest,
    Reference,
}

/// Names of plugins, and the executables that answer to them.
pub(crate) fn all(under_test: &Path) -> impl Iterator<Item = (&'static str, PathBuf)> {
    NAMES.into_iter().map(move |(name, executable)| {
        let path = match executable {
            Executable::UnderTest => under_test.to_owned(),
            Executable::Reference => Path::new(REFERENCE).join(name),
        };
        (name, path)
    })
}

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

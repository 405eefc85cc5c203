//! The folder of networks of a throwaway node, for commands that read it as runtimes do.

use std::{fs, path::Path};

use serde_json::json;
use underpass_tests::{prelude::*, runtime::Conf};

/// Where it is: in the node's own `/run`.
pub(crate) const NET_DIR: &str = "/run/cni/net.d";

/// Puts a file into the folder, with any text.
pub(crate) fn write(node: &Node, file: &str, text: &str) -> Result<()> {
    node.netns()
        .run(|| {
            fs::create_dir_all(NET_DIR)?;
            fs::write(Path::new(NET_DIR).join(file), text)
        })
        .with_context(|| format!("write {file}"))
}

/// Puts a network of one plugin into the folder, as a list of plugins.
pub(crate) fn put(node: &Node, file: &str, conf: &Conf) -> Result<()> {
    let mut plugin = conf.json().clone();
    let name = plugin["name"].take();
    let list = json!({ "cniVersion": "1.1.0", "name": name, "plugins": [plugin] });
    write(node, file, &list.to_string())
}

//! Another build of the plugin: the same in all it does, with another number.
//!
//! A build is known by the checksum of its eBPF object, as it is embedded. One byte of that differs here, which nobody reads: the last one of
//! the header in front of it.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

use crate::{Node, node::plugin};

/// The folder that it is in, of the node's own `/run`.
const FOLDER: &str = "/run/another-build";

/// What the header begins with.
const HEADER: &[u8] = b"underpass eBPF\0";

/// Makes another build for a node, and returns its path there. It has the plugin's name.
pub fn make(node: &Node) -> Result<PathBuf> {
    let name = plugin().file_name().context("the plugin has a name")?;
    let path = Path::new(FOLDER).join(name);
    let mut bytes = fs::read(plugin()).context("read the plugin")?;
    let last = HEADER.len();
    let objects: Vec<usize> = (0..bytes.len().saturating_sub(last))
        .filter(|&at| bytes[at..].starts_with(HEADER))
        .collect();
    ensure!(!objects.is_empty(), "the plugin has no eBPF object");
    for at in objects {
        bytes[at + last] ^= 1;
    }
    node.netns().run(|| -> Result<()> {
        fs::create_dir_all(FOLDER)?;
        fs::write(&path, &bytes)?;
        Ok(fs::set_permissions(&path, Permissions::from_mode(0o755))?)
    })?;
    Ok(path)
}

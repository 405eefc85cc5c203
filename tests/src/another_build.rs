//! Another build of the plugin: the same in all it does, with another number.
//!
//! A build is known by the checksum of its eBPF object. One byte of that differs here, which nobody reads: the last of those that
//! pad the identification at the beginning of an ELF file.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

use crate::{Node, node::plugin};

/// The folder that it is in, of the node's own `/run`.
const FOLDER: &str = "/run/another-build";

/// What an ELF file of 64 bits begins with, lowest byte first.
const ELF: &[u8] = b"\x7fELF\x02\x01\x01";
/// Where the machine is named.
const MACHINE: usize = 18;
/// `EM_BPF`.
const BPF: [u8; 2] = [247, 0];
/// The last byte of the identification.
const PADDING: usize = 15;

/// Makes another build for a node, and returns its path there. It has the plugin's name.
pub fn make(node: &Node) -> Result<PathBuf> {
    let name = plugin().file_name().context("the plugin has a name")?;
    let path = Path::new(FOLDER).join(name);
    let mut bytes = fs::read(plugin()).context("read the plugin")?;
    let objects: Vec<usize> = (0..bytes.len().saturating_sub(MACHINE + BPF.len()))
        .filter(|&at| bytes[at..].starts_with(ELF) && bytes[at + MACHINE..].starts_with(&BPF))
        .collect();
    ensure!(!objects.is_empty(), "the plugin has no eBPF object");
    for at in objects {
        bytes[at + PADDING] ^= 1;
    }
    node.netns().run(|| -> Result<()> {
        fs::create_dir_all(FOLDER)?;
        fs::write(&path, &bytes)?;
        Ok(fs::set_permissions(&path, Permissions::from_mode(0o755))?)
    })?;
    Ok(path)
}

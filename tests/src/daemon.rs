//! A daemon in a container that calls plugins in the root of its node, as the "thick" Multus does.
//!
//! Its container has the node's network and all capabilities, a root of its own with the node's below `/hostroot`, and little memory. It
//! starts a plugin with that folder as its root, and leaves the current folder where it was: outside.

use std::{fs, io, os::unix::process::CommandExt as _, process::Command};

use anyhow::{Context as _, Result};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    unistd::{chdir, pivot_root},
};

use crate::{
    Node,
    memory::Group,
    netns::Netns,
    runtime::{Call, Reply},
};

/// Where the node sees the container's root.
const ROOT: &str = "/run/container";
/// Folders of that root. The node's own root is below the first.
const FOLDERS: [&str; 4] = ["hostroot", "proc", "sys", "old"];

/// Such a daemon.
#[derive(Debug)]
pub struct Daemon {
    container: Netns,
    /// What it and the plugins that it starts may use of memory.
    pub memory: Group,
}

impl Daemon {
    /// A daemon that may use so many bytes of memory. `None` if this machine can't limit memory.
    pub fn on(node: &Node, memory: u64) -> Result<Option<Self>> {
        let Some(memory) = Group::limited(memory)? else {
            return Ok(None);
        };
        let container = node.netns().with_mounts(contain)?;
        Ok(Some(Self { container, memory }))
    }

    /// Makes a call.
    pub fn call(&self, call: &Call) -> Result<Reply> {
        let mut command = call.command();
        self.memory.join(&mut command)?;
        let output = self.container.output(enter(&mut command), call.input())?;
        call.reply(output)
    }
}

/// Makes the root of the container, and all else vanish.
fn contain() -> Result<()> {
    let none: Option<&str> = None;
    fs::create_dir_all(ROOT).with_context(|| format!("make {ROOT}"))?;
    let own = MsFlags::empty();
    mount(Some("root"), ROOT, Some("tmpfs"), own, none).context("mount the root")?;
    chdir(ROOT).context("enter the root")?;
    for folder in FOLDERS {
        fs::create_dir(folder).with_context(|| format!("make {folder}"))?;
    }
    let whole = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(Some("/"), "hostroot", none, whole, none).context("mount the node's root")?;
    mount(Some("proc"), "proc", Some("proc"), own, none).context("mount a procfs")?;
    mount(Some("sysfs"), "sys", Some("sysfs"), own, none).context("mount a sysfs")?;
    pivot_root(".", "old").context("change the root")?;
    chdir("/").context("enter the new root")?;
    umount2("old", MntFlags::MNT_DETACH).context("leave the old root")
}

/// Has a command start in the node's root.
fn enter(command: &mut Command) -> &mut Command {
    // SAFETY: chroot is async-signal-safe and touches nothing of the parent.
    unsafe {
        command.pre_exec(|| match libc::chroot(c"/hostroot".as_ptr()) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        })
    }
}

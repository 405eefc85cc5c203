//! Where tests keep maps and programs for those after them: the verifier would take half of the suite's time.

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::workspace::Workspace;

/// The variable by which fixtures find the folder.
pub(super) const VARIABLE: &str = "UNDERPASS_TEST_LOADED";

/// Mounts a bpffs that only this process and its children see, so that it goes with the last of them, however they end.
pub(super) fn folder(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    let folder = workspace.target.join("loaded");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let none: Option<&str> = None;
    unshare(CloneFlags::CLONE_NEWNS).context("cannot make a mount namespace")?;
    // What the machine mounts meanwhile is seen here, not the other way round.
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)
        .context("cannot keep mounts private")?;
    mount(
        Some("bpf"),
        &folder,
        Some("bpf"),
        MsFlags::empty(),
        Some("mode=700"),
    )
    .with_context(|| format!("cannot mount a bpffs on {}", folder.display()))?;
    Ok(folder)
}

//! The file system that programs and maps are pinned to.

use anyhow::{Context as _, bail};
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use nix::unistd::geteuid;

use crate::report;

const PLACE: &str = "/sys/fs/bpf";
const MOUNT: &str = "mount -t bpf bpf /sys/fs/bpf";

/// Mounts a bpffs where systemd would have done so at boot.
pub(super) fn ensure() -> anyhow::Result<()> {
    let found = statfs(PLACE).with_context(|| {
        format!("{PLACE} is missing: this kernel has no eBPF, boot one of 5.10 or newer")
    })?;
    if found.filesystem_type() == BPF_FS_MAGIC {
        return Ok(());
    }
    if !geteuid().is_root() {
        bail!(
            "no bpffs is mounted at {PLACE}, where programs and maps are pinned: run `sudo {MOUNT}`"
        );
    }
    report::step(
        "mounting",
        &format!("bpffs at {PLACE}: programs and maps are pinned there"),
    );
    mount(
        Some("bpf"),
        PLACE,
        Some("bpf"),
        MsFlags::empty(),
        None::<&str>,
    )
    .with_context(|| format!("`{MOUNT}` failed: run this outside an unprivileged container"))
}

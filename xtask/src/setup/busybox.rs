//! What containers of the tests consist of: a busybox that needs no library, unpacked for this workspace alone.
//!
//! It is not installed: a static busybox excludes the usual one, and whoever has that keeps it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use super::packages;
use crate::{process, report};

const PACKAGE: &str = "busybox-static";

/// Where Debian's package has it, before and since `/bin` became a part of `/usr`.
const PLACES: [&str; 2] = ["bin/busybox", "usr/bin/busybox"];

/// Where it is unpacked; `tools` is the folder of what set-up installs for the workspace.
pub(super) fn folder(tools: &Path) -> PathBuf {
    tools.join("busybox")
}

/// The executable in that folder, if it is there.
pub(super) fn find(folder: &Path) -> Option<PathBuf> {
    let mut paths = PLACES.iter().map(|place| folder.join(place));
    paths.find(|path| path.is_file())
}

/// Unpacks it if it is not there yet.
pub(super) fn ensure(tools: &Path) -> anyhow::Result<()> {
    let folder = folder(tools);
    if find(&folder).is_some() {
        return Ok(());
    }
    if !process::on_path("apt-get") {
        bail!(
            "the tests' containers consist of Debian's {PACKAGE}, and there is no apt-get to fetch it: \
             put a static busybox at {}",
            folder.join(PLACES[0]).display()
        );
    }
    report::step(
        "unpacking",
        &format!("{PACKAGE}: containers of the tests consist of it"),
    );
    let unfinished = tools.join("busybox.new");
    for old in [&unfinished, &folder] {
        if old.exists() {
            fs::remove_dir_all(old).with_context(|| format!("cannot remove {}", old.display()))?;
        }
    }
    packages::unpack(&[PACKAGE], &unfinished)?;
    if find(&unfinished).is_none() {
        bail!(
            "{PACKAGE} was unpacked into {}, and there is no busybox in it",
            unfinished.display()
        );
    }
    fs::rename(&unfinished, &folder)
        .with_context(|| format!("cannot rename {}", unfinished.display()))
}

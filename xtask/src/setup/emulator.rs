//! What guests are started with, unpacked for this workspace alone.
//!
//! It is not installed: QEMU's packages exclude other versions of QEMU's tools, and a static busybox excludes the usual one. Whoever has
//! those keeps them. It is Debian 13's wherever this runs: tests take 0.7 of the time that they take with the QEMU 7.2 of Debian 12.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, bail};

use crate::archive::{Archive, Suites};
use crate::emulator::{ARCHITECTURE, Emulator};
use crate::{process, report};

/// Where the packages come from.
const SUITE: &Suites = &[("Debian", &["trixie"])];
/// Debian's packages, and what they are for.
const PACKAGES: [(&str, &str); 2] = [
    ("qemu-system-x86", "emulates machines for other kernels"),
    ("busybox-static", "starts these machines"),
];

/// Unpacks what is not there yet.
pub(super) fn ensure(tools: &Path) -> anyhow::Result<()> {
    let folder = Emulator::folder(tools);
    if Emulator::find(folder.clone()).is_some() {
        return Ok(());
    }
    if !process::on_path("apt-get") {
        bail!(
            "emulated machines and their kernels are unpacked from Debian's packages, and there is no apt-get to fetch them: \
             run this on Debian"
        );
    }
    for (name, why) in PACKAGES {
        report::step("unpacking", &format!("{name} and what it needs: {why}"));
    }
    let unfinished = tools.join("emulator.new");
    for old in [&unfinished, &folder] {
        if old.exists() {
            fs::remove_dir_all(old).with_context(|| format!("cannot remove {}", old.display()))?;
        }
    }
    let index = tools.join("emulator.index");
    let archive = Archive::open(&index, SUITE, ARCHITECTURE)?;
    archive.unpack_with_dependencies(&PACKAGES.map(|(name, _)| name), &unfinished)?;
    fs::remove_dir_all(&index).with_context(|| format!("cannot remove {}", index.display()))?;
    if Emulator::find(unfinished.clone()).is_none() {
        bail!(
            "the packages were unpacked into {}, but some of what guests are started with is not where it should be",
            unfinished.display()
        );
    }
    fs::rename(&unfinished, &folder)
        .with_context(|| format!("cannot rename {}", unfinished.display()))
}

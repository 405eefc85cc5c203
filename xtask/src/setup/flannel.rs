//! The plugin `flannel`, which hands containers over to another one: ours, in tests. Unpacked for this workspace alone.
//!
//! Its own project gives it out as source only, as far as package archives go; Debian had it among the reference plugins until they
//! parted (`containernetworking-plugins` 0.9.0). A newer package of the same name is what other tests compare with, so this one
//! must not be installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::archive::{Archive, Suites};
use crate::{process, report};

/// The package, and the suite whose package still has it.
const PACKAGE: &str = "containernetworking-plugins";
const SUITE: &Suites = &[("Debian", &["bullseye"])];

/// Where that package has it.
const PLACE: &str = "usr/lib/cni/flannel";

/// Where it is kept; `tools` is the folder of what set-up installs for the workspace.
pub(super) fn file(tools: &Path) -> PathBuf {
    tools.join("flannel/flannel")
}

/// Fetches it if it is not there yet.
pub(super) fn ensure(tools: &Path) -> anyhow::Result<()> {
    let file = file(tools);
    if file.is_file() {
        return Ok(());
    }
    fetch(tools, &file).with_context(|| {
        format!(
            "there is no plugin flannel for the tests that need it: put one of version 0.9 or newer at {}",
            file.display()
        )
    })
}

fn fetch(tools: &Path, file: &Path) -> anyhow::Result<()> {
    if !process::on_path("apt-get") {
        bail!("it comes from a package of Debian, and there is no apt-get to fetch it");
    }
    report::step(
        "unpacking",
        "flannel of Debian 11: tests have it call the plugin",
    );
    let unfinished = tools.join("flannel.new");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)
            .with_context(|| format!("cannot remove {}", unfinished.display()))?;
    }
    let archive = Archive::open(&unfinished.join("archive"), SUITE, &architecture()?)?;
    let versions = archive.versions(PACKAGE)?;
    let version = versions
        .first()
        .with_context(|| format!("Debian 11 has no package {PACKAGE}"))?;
    let whole = unfinished.join("whole");
    archive.unpack(PACKAGE, version, &whole)?;
    let folder = file.parent().unwrap_or(tools);
    fs::create_dir_all(folder)
        .and_then(|()| fs::rename(whole.join(PLACE), file))
        .with_context(|| format!("{PACKAGE} {version} has no {PLACE}"))?;
    fs::remove_dir_all(&unfinished)
        .with_context(|| format!("cannot remove {}", unfinished.display()))
}

/// What Debian calls this kind of machine.
fn architecture() -> anyhow::Result<String> {
    let output = Command::new("dpkg")
        .arg("--print-architecture")
        .output()
        .context("cannot start dpkg")?;
    let name = String::from_utf8(output.stdout).context("dpkg printed no text")?;
    Ok(name.trim().to_owned())
}

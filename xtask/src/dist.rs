//! `cargo xtask dist`: one tarball to unpack on any node of this architecture, whatever its libc.

use std::env::consts::ARCH;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;

use crate::build::{self, EXECUTABLES};
use crate::workspace::Workspace;
use crate::{licences, process, report};

/// Folders of what these refer to.
const FOLDERS: [&str; 3] = ["docs", "deploy", "bench/results"];

/// What a node's administrator reads, and what the licences ask to be passed on.
const TEXTS: [&str; 8] = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "LICENSE-GPL-2.0",
];

pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<()> {
    build::executables(workspace)?;
    let name = format!("underpass-{}", env!("CARGO_PKG_VERSION"));
    let dist = workspace.target.join("dist");
    let folder = dist.join(&name);
    if folder.exists() {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove the old {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;

    for plugin in EXECUTABLES {
        copy(&workspace.released(plugin), &folder)?;
    }
    for text in TEXTS {
        copy(&workspace.root.join(text), &folder)?;
    }
    let mut copying = Command::new("cp");
    copying
        .current_dir(&workspace.root)
        .args(["--recursive", "--parents"])
        .args(FOLDERS)
        .arg(&folder);
    process::run(&mut copying)?;
    let licences = licences::gather(workspace)?;
    process::run(
        Command::new("cp")
            .arg("--recursive")
            .args([&licences, &folder]),
    )?;
    let mut manual = workspace.cargo();
    manual
        .args(["run", "--quiet", "--locked", "--package", "underpass"])
        .args(["--example", "manual", "--"])
        .arg(&folder);
    process::run(&mut manual)?;

    let tarball = dist.join(format!("{name}-{ARCH}-linux.tar.gz"));
    process::run(
        Command::new("tar")
            .arg("--create")
            .arg(format!("--file={}", tarball.display()))
            // The same sources give the same tarball.
            .args([
                "--use-compress-program=gzip -9n",
                "--sort=name",
                "--owner=0",
                "--group=0",
                "--numeric-owner",
            ])
            .arg(format!("--mtime=@{}", commit_time(&workspace.root)))
            .arg(format!("--directory={}", dist.display()))
            .arg(&name),
    )?;
    fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    report::step("packed", &tarball.display().to_string());
    Ok(())
}

/// Seconds since 1970 of the last commit; 0 in a tree that git does not know.
fn commit_time(root: &Path) -> u64 {
    Command::new("git")
        .arg("-C")
        .arg(root)
        .args(["log", "-1", "--format=%ct"])
        .output()
        .ok()
        .and_then(|output| String::from_utf8(output.stdout).ok()?.trim().parse().ok())
        .unwrap_or(0)
}

fn copy(file: &Path, folder: &Path) -> anyhow::Result<()> {
    let name = file
        .file_name()
        .with_context(|| format!("{} is no file", file.display()))?;
    fs::copy(file, folder.join(name))
        .map(drop)
        .with_context(|| {
            format!(
                "cannot copy {}, which belongs into the tarball",
                file.display()
            )
        })
}

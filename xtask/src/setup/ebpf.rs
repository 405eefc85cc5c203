//! The compiler and the linker of the eBPF programs, and the sources of all crates.

use std::env::consts::ARCH;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, fs};

use anyhow::{Context as _, bail};
use underpass_toolchain::{self as toolchain, Compiler, Core, Missing, Toolchain};

use super::{crates::Tool, packages};
use crate::workspace::Workspace;
use crate::{process, report};

const LINKER: Tool = Tool {
    name: "bpf-linker",
    version: "0.10.4",
    why: "it links the eBPF programs (about a minute)",
};

/// `rust-src` is 3 MB. Where rustup's server is out of reach, rustup waits for minutes.
const COMPONENT_LIMIT: Duration = Duration::from_secs(20);
/// A whole toolchain is about 80 MB.
const TOOLCHAIN_LIMIT: Duration = Duration::from_mins(5);

/// Installs what is missing: where the `core` of the compiler that is there then comes from.
pub(super) fn ensure(workspace: &Workspace) -> anyhow::Result<Core> {
    if Compiler::find().is_none() {
        install_compiler(workspace)?;
    }
    if let Err(Missing::Linker) = Toolchain::find(&workspace.root) {
        LINKER.install(workspace)?;
    }
    let toolchain = Toolchain::find(&workspace.root).map_err(anyhow::Error::msg)?;
    fetch("the crates of this workspace", || workspace.cargo())?;
    if toolchain.compiler.core == Core::FromSource {
        // The sources of `core` name crates of their own, and those of the rest of the library some more.
        fetch("the crates of Rust's library", || {
            toolchain.compiler.cargo_with_std(&workspace.root)
        })?;
    }
    Ok(toolchain.compiler.core)
}

/// What the build will use.
pub(super) fn describe(workspace: &Workspace) -> anyhow::Result<[String; 2]> {
    let toolchain = Toolchain::find(&workspace.root).map_err(anyhow::Error::msg)?;
    let origin = match toolchain.compiler.core {
        Core::FromSource => "with the sources of `core`",
        Core::Prebuilt => "with a compiled `core` for eBPF",
    };
    Ok([
        format!("{} {origin}", toolchain.compiler.rustc.display()),
        toolchain.linker.display().to_string(),
    ])
}

/// The least of what can be had: a component, packages, a whole toolchain.
fn install_compiler(workspace: &Workspace) -> anyhow::Result<()> {
    let rustup = process::on_path("rustup");
    let nightly = rustup && has_nightly();
    let refusal = refusal(workspace);
    if nightly && !refusal.exists() {
        let Err(error) = component().and_then(|()| found_after("rustup")) else {
            return Ok(());
        };
        report::warn(&format!("{error:#}; Debian's compiler is tried instead"));
        remember(&refusal, &error)?;
    }
    if packages::can_install() {
        let Err(error) = debian().and_then(|()| found_after("apt-get")) else {
            return Ok(());
        };
        report::warn(&format!("{error:#}"));
    }
    if rustup && !nightly {
        let Err(error) = whole_toolchain().and_then(|()| found_after("rustup")) else {
            return Ok(());
        };
        report::warn(&format!("{error:#}"));
    }
    bail!(
        "no Rust compiler with a `core` library for eBPF could be installed: on Debian 12 run `{}`, elsewhere \
         `rustup toolchain install nightly --profile minimal --component rust-src` (rustup is at https://rustup.rs)",
        packages::by_hand(&packages::DEBIAN_COMPILER)
    )
}

fn component() -> anyhow::Result<()> {
    report::step(
        "installing",
        "rust-src of rustup's nightly: `core` is compiled from it for eBPF",
    );
    let mut rustup = Command::new("rustup");
    rustup.args(["component", "add", "rust-src", "--toolchain", "nightly"]);
    process::run_within(&mut rustup, COMPONENT_LIMIT)
}

fn debian() -> anyhow::Result<()> {
    let names = packages::DEBIAN_COMPILER;
    report::step(
        "installing",
        &format!("{}: a compiler with `core` for eBPF", names.join(", ")),
    );
    packages::install(&names)
}

fn whole_toolchain() -> anyhow::Result<()> {
    report::step(
        "installing",
        "rustup's nightly with rust-src: `core` is compiled from it for eBPF",
    );
    let mut rustup = Command::new("rustup");
    rustup
        .args(["toolchain", "install", "nightly", "--profile", "minimal"])
        .args(["--component", "rust-src"]);
    process::run_within(&mut rustup, TOOLCHAIN_LIMIT)
}

/// An installer that succeeds must leave something to be found.
fn found_after(installer: &str) -> anyhow::Result<()> {
    if Compiler::find().is_some() {
        return Ok(());
    }
    let choice = toolchain::CHOICE;
    match env::var(choice) {
        Ok(wish) => bail!("{installer} reports success, but {choice} asks for {wish}: unset it"),
        Err(_) => bail!("{installer} reports success, but left no `core` library for eBPF"),
    }
}

fn has_nightly() -> bool {
    Command::new("rustup")
        .args(["toolchain", "list"])
        .stderr(Stdio::null())
        .output()
        .is_ok_and(|output| {
            String::from_utf8_lossy(&output.stdout)
                .lines()
                .any(|line| line.starts_with("nightly-"))
        })
}

/// Exists once rustup has failed to give `rust-src`, so that nobody waits for it a second time.
fn refusal(workspace: &Workspace) -> PathBuf {
    workspace.tools().join("rust-src-unavailable")
}

fn remember(refusal: &Path, why: &anyhow::Error) -> anyhow::Result<()> {
    let text = format!("{why:#}\nRemove this file to have `cargo xtask setup` ask rustup again.\n");
    refusal
        .parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(refusal, text))
        .with_context(|| {
            format!(
                "cannot write {}: is the workspace writable?",
                refusal.display()
            )
        })
}

/// Downloads crates where any is missing, so that the build itself works without a network.
fn fetch(what: &str, cargo: impl Fn() -> Command) -> anyhow::Result<()> {
    let command = || {
        let mut command = cargo();
        command
            .args(["fetch", "--locked", "--quiet", "--target"])
            .arg(format!("{ARCH}-unknown-linux-gnu"));
        command
    };
    let offline = command()
        .arg("--offline")
        .stderr(Stdio::null())
        .status()
        .context("cannot start cargo")?;
    if offline.success() {
        return Ok(());
    }
    report::step("fetching", what);
    process::run(&mut command()).context(
        "the crates could not be downloaded: is crates.io within reach, and Cargo.lock up to date?",
    )
}

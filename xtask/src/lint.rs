//! `cargo xtask lint`: format, lints for both targets, dependencies, floors of the programs, public texts.

use std::io::{IsTerminal as _, stdout};

use anyhow::Context as _;

use crate::setup::{self, Need};
use crate::toolchain::Toolchain;
use crate::workspace::Workspace;
use crate::{process, report};

mod floors;
mod text;

pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<()> {
    setup::ensure(workspace, Need::Build)?;

    report::step("checking", "the format");
    let mut format = workspace.cargo();
    format.args(["fmt", "--all", "--check"]);
    if !stdout().is_terminal() {
        // rustfmt would colour its differences even in a pipe.
        format.args(["--", "--color", "never"]);
    }
    process::run(&mut format).context("run `cargo fmt --all`")?;

    report::step("checking", "the crates of the host with clippy");
    process::run(workspace.cargo().args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--locked",
        "--quiet",
        "--",
        "--deny",
        "warnings",
    ]))?;

    report::step(
        "checking",
        "the eBPF programs for the host's clippy and for their own target",
    );
    // Clippy knows no `core` for eBPF; the same source passes for a freestanding program of the host.
    process::run(workspace.cargo().args([
        "clippy",
        "--package",
        "underpass-ebpf",
        "--bins",
        "--features",
        "bpf",
        "--profile",
        "ebpf",
        "--locked",
        "--quiet",
        "--",
        "--deny",
        "warnings",
    ]))?;
    let toolchain = Toolchain::find(&workspace.root).map_err(anyhow::Error::msg)?;
    let out = workspace.target.join("ebpf");
    process::run(
        toolchain
            .cargo("check", &workspace.root, &out, &["-Dwarnings"])?
            .arg("--quiet"),
    )?;

    dependencies(workspace)?;

    report::step(
        "checking",
        "that no floor of the programs knows one above it",
    );
    floors::check(&workspace.root)?;

    report::step("checking", "texts and sizes of files");
    text::check(&workspace.root)?;
    report::step("clean", "nothing to complain about");
    Ok(())
}

/// Licences, advisories, sources and duplicates, as deny.toml says.
fn dependencies(workspace: &Workspace) -> anyhow::Result<()> {
    if !process::on_path("cargo-deny") {
        report::warn(
            "the dependencies were NOT checked: run `cargo install --locked cargo-deny` (some minutes) and lint again",
        );
        return Ok(());
    }
    report::step("checking", "the dependencies");
    process::run(
        workspace
            .cargo()
            .args(["deny", "--log-level", "error", "check"]),
    )
}

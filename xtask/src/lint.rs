//! `cargo xtask lint`: format, lints for both targets, dependencies, floors of the programs, public texts.

use std::env::consts::ARCH;
use std::io::{IsTerminal as _, stdout};
use std::process::Command;

use anyhow::Context as _;
use underpass_toolchain::Toolchain;

use crate::build::PLUGINS;
use crate::setup::{self, Need};
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

    other_architecture(workspace, &toolchain)?;

    report::step("checking", "the documentation of all crates");
    process::run(
        workspace
            .cargo()
            .env(
                "RUSTDOCFLAGS",
                "--deny warnings --allow rustdoc::private-intra-doc-links",
            )
            .args([
                "doc",
                "--workspace",
                "--no-deps",
                "--document-private-items",
            ])
            .args(["--locked", "--quiet"]),
    )?;

    oldest_compiler(workspace)?;
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

/// Checks what a node runs for the other one of the two architectures, with each of the C libraries that it may be linked with.
fn other_architecture(workspace: &Workspace, toolchain: &Toolchain) -> anyhow::Result<()> {
    let architecture = match ARCH {
        "aarch64" => "x86_64",
        _ => "aarch64",
    };
    for library in ["gnu", "musl"] {
        let target = format!("{architecture}-unknown-linux-{library}");
        let Some(mut check) = toolchain.compiler.check_for(&workspace.root, &target) else {
            report::warn(&format!(
                "nothing was checked for {target}: the sources of the standard library are not here (`rustup component add rust-src --toolchain nightly`)"
            ));
            continue;
        };
        report::step("checking", &format!("the plugins for {target}"));
        for plugin in PLUGINS {
            check.args(["--package", plugin]);
        }
        check
            .arg("--quiet")
            .arg("--target-dir")
            .arg(workspace.target.join("other"));
        process::run(&mut check)?;
    }
    Ok(())
}

/// The compiler that Cargo.toml promises to be enough, `rust-version`: the build with it is the proof.
fn oldest_compiler(workspace: &Workspace) -> anyhow::Result<()> {
    const PROMISED: &str = env!("CARGO_PKG_RUST_VERSION");
    let output = Command::new("rustc")
        .arg("--version")
        .current_dir(&workspace.root)
        .output()
        .context("cannot start rustc")?;
    let version = String::from_utf8_lossy(&output.stdout).into_owned();
    let used = version.split(' ').nth(1).unwrap_or_default();
    if used.starts_with(&format!("{PROMISED}.")) {
        report::step(
            "checked",
            &format!("with Rust {PROMISED}, the oldest that is promised"),
        );
        return Ok(());
    }
    let mut check = Command::new("rustup");
    check
        .current_dir(&workspace.root)
        .env("CARGO_TARGET_DIR", workspace.target.join("oldest"))
        .env_remove("CARGO")
        .args([
            "run",
            PROMISED,
            "cargo",
            "check",
            "--workspace",
            "--locked",
            "--quiet",
        ]);
    report::step(
        "checking",
        &format!("with Rust {PROMISED}, the oldest that is promised"),
    );
    process::run(&mut check).with_context(|| {
        format!("this is Rust {used}: `rustup toolchain install {PROMISED} --profile minimal` gives the other one")
    })
}

/// Licences, advisories, sources and duplicates, as deny.toml says; and that each dependency is used.
fn dependencies(workspace: &Workspace) -> anyhow::Result<()> {
    report::step("checking", "the dependencies");
    setup::ensure_checkers(workspace)?;
    let deny = |checks: &[&str]| {
        let mut deny = Command::new(workspace.tool("cargo-deny"));
        deny.current_dir(&workspace.root)
            .args(["--log-level", "error", "check"])
            .args(checks);
        deny
    };
    process::run(&mut deny(&["bans", "licenses", "sources"]))?;
    // The list of advisories comes from the network: without it nothing can be said.
    let mut fetch = Command::new(workspace.tool("cargo-deny"));
    fetch.current_dir(&workspace.root).args(["fetch", "db"]);
    let advisories = fetch.output().context("cannot start cargo-deny")?;
    if advisories.status.success() {
        process::run(deny(&["advisories"]).arg("--disable-fetch"))?;
    } else {
        report::warn(
            "the dependencies were NOT compared with the advisories: their database can't be reached from here",
        );
    }
    process::run(
        Command::new(workspace.tool("cargo-machete"))
            .arg("--with-metadata")
            .arg(&workspace.root),
    )
}

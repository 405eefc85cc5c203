//! `cargo xtask test runtimes`: containerd and podman call the plugins, on nodes that are namespaces.

use std::time::Duration;

use anyhow::Context as _;

use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{build, process, report};

/// The name of their target.
const TARGET: &str = "runtimes";
/// What names the executable that containers run.
pub(super) const BUSYBOX: &str = "UNDERPASS_TEST_BUSYBOX";
/// How long all of them may take, once built. Each has a limit of its own, so this ends only what nothing else would.
const LIMIT: Duration = Duration::from_mins(10);

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Names of tests, and options of `cargo nextest run`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    filter: Vec<String>,
}

pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> anyhow::Result<()> {
    setup::require_root(
        "test runtimes",
        "the tests make namespaces and control groups, and run container runtimes in them",
    )?;
    setup::ensure(workspace, Need::Runtimes)?;
    build::plugins(workspace)?;
    // Of the whole workspace, so that dependencies are not built once more with other features.
    let target = ["--workspace", "--locked", "--test", TARGET];
    process::run(workspace.cargo().args(["test", "--no-run"]).args(target))?;

    let busybox = setup::busybox(workspace).context("set-up has left no busybox")?;
    let mut tests = workspace.cargo();
    if process::on_path("cargo-nextest") {
        tests.args(["nextest", "run", "--ignore-default-filter"]);
        tests.args(target);
    } else {
        report::warn(
            "cargo-nextest is not installed: plain `cargo test` runs the tests, one after the other",
        );
        tests.arg("test").args(target).arg("--");
        tests.env("RUST_TEST_THREADS", "1");
    }
    tests.args(&arguments.filter).env(BUSYBOX, busybox);
    // Everything has been installed, and nextest hides what is said by tests that pass: one that can't run has to fail.
    tests.env("CI", "true");
    super::name_programs(&mut tests, workspace);
    process::run_within(&mut tests, LIMIT)
}

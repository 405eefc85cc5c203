//! `cargo xtask demo`: builds the plugins and becomes the demonstration.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::Context as _;

use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{build, process, test};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Passed on to the demonstration.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> anyhow::Result<()> {
    setup::require_root(
        "demo",
        "the demonstration makes network namespaces and loads eBPF programs",
    )?;
    setup::ensure(workspace, Need::Demo)?;
    build::plugins(workspace)?;
    // Unoptimised: it drives the plugins, which are not, and is built in a fraction of the time.
    process::run(workspace.cargo().args([
        "build",
        "--locked",
        "--package",
        "underpass-tests",
        "--bin",
        "demo",
    ]))?;

    let demo = workspace.target.join("debug").join("demo");
    let mut command = Command::new(&demo);
    test::name_programs(&mut command, workspace);
    // From here on the demonstration is this process: signals and the exit code are its own.
    let error = command.args(&arguments.arguments).exec();
    Err(error).with_context(|| format!("cannot start {}", demo.display()))
}

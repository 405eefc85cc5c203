//! `cargo xtask bench`: builds the plugins and becomes the measurement.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::Context as _;

use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{build, process, test};

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: Option<What>,
    /// Passed on to the measurement; `-- --help` lists what it knows.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// What else is measured than the whole.
#[derive(clap::Subcommand)]
enum What {
    /// The allocator of addresses alone, with many leases.
    Ipam {
        /// Passed on to it.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> anyhow::Result<()> {
    setup::require_root(
        "bench",
        "the measurement makes network namespaces and loads eBPF programs",
    )?;
    setup::ensure(workspace, Need::Test)?;
    build::plugins(workspace)?;
    let (name, arguments) = match &arguments.what {
        None => ("underpass-bench", &arguments.arguments),
        Some(What::Ipam { arguments }) => ("ipam", arguments),
    };
    // The profile of development optimises its own loops; the rest only drives the plugins.
    process::run(workspace.cargo().args([
        "build",
        "--locked",
        "--package",
        "underpass-bench",
        "--bin",
        name,
    ]))?;

    let bench = workspace.target.join("debug").join(name);
    let mut command = Command::new(&bench);
    test::name_programs(&mut command, workspace);
    if name == "underpass-bench" {
        command.args(["--revision", &revision(workspace)]);
    }
    // From here on the measurement is this process: signals and the exit code are its own.
    let error = command.args(arguments).exec();
    Err(error).with_context(|| format!("cannot start {}", bench.display()))
}

/// The commit, and whether the sources differ from it; a tree without git has none.
fn revision(workspace: &Workspace) -> String {
    workspace
        .git(&["describe", "--always", "--dirty", "--abbrev=12"])
        .unwrap_or_else(|| "unknown".to_owned())
}

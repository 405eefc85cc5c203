//! `cargo xtask test`: the tests of the workspace, against the released plugins.

use std::process::Command;

use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{build, process, report, vm};

mod kubernetes;
mod loaded;
mod runtimes;
mod soak;

/// The crate of the tests that a command of their own runs; nextest knows it by its `default-filter`.
const RUNTIMES: &str = "underpass-runtimes";

/// What names the plugin `flannel`, where there is one.
pub(crate) const FLANNEL: &str = "UNDERPASS_FLANNEL";

/// What the fixtures look at, for whoever runs tests.
const VARIABLES: &str = "\
Variables:
  UNDERPASS_TEST_PROXY    the rules of kube-proxy that every node has beside its firewall: iptables (default), nftables, none
  UNDERPASS_TEST_DEVICE   the device of containers: veth, netkit, auto
  UNDERPASS_TEST_BYPASS   the bypass of networks: off is the control
  UNDERPASS_TEST_INVALID  print: packets that are INVALID for connection tracking alone fail no test";

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, after_help = VARIABLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    place: Option<Place>,
    /// Names of tests, and options of `cargo nextest run`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    filter: Vec<String>,
}

/// Tests that are run in another way.
#[derive(clap::Subcommand)]
enum Place {
    /// Those with a Kubernetes of Debian's source, whose pod network is ours.
    Kubernetes(kubernetes::Arguments),
    /// Those with containerd and podman, whose pods have a network by the plugins.
    Runtimes(runtimes::Arguments),
    /// Minutes of traffic on every path while containers come and go.
    Soak(soak::Arguments),
    /// Those that need a kernel, on Debian's kernels in emulated machines.
    Vm(vm::Arguments),
}

pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> anyhow::Result<()> {
    match &arguments.place {
        Some(Place::Kubernetes(arguments)) => return kubernetes::run(workspace, arguments),
        Some(Place::Runtimes(arguments)) => return runtimes::run(workspace, arguments),
        Some(Place::Soak(arguments)) => return soak::run(workspace, arguments),
        Some(Place::Vm(arguments)) => return vm::run(workspace, arguments),
        None => {}
    }
    setup::require_root(
        "test",
        "the tests make network namespaces and load eBPF programs",
    )?;
    setup::ensure(workspace, Need::Test)?;
    build::executables_and_tests(workspace)?;

    let mut tests = workspace.cargo();
    if process::on_path("cargo-nextest") {
        tests
            .args(["nextest", "run", "--workspace", "--locked"])
            .args(&arguments.filter);
    } else {
        report::warn(
            "cargo-nextest is not installed: plain `cargo test` runs the tests, and nothing stops one that hangs",
        );
        tests
            .args([
                "test",
                "--workspace",
                "--exclude",
                RUNTIMES,
                "--locked",
                "--all-targets",
                "--no-fail-fast",
            ])
            .args(&arguments.filter);
        tests.env("RUST_TEST_THREADS", "2");
    }
    name_programs(&mut tests, workspace);
    tests.env(loaded::VARIABLE, loaded::folder(workspace)?);
    process::run(&mut tests)?;

    if arguments.filter.is_empty() {
        report::step("testing", "examples in the documentation");
        process::run(workspace.cargo().args([
            "test",
            "--workspace",
            "--locked",
            "--doc",
            "--quiet",
        ]))?;
    }
    Ok(())
}

/// Tells tests and demonstration which plugins to drive, and where set-up has found the commands that they run.
pub(crate) fn name_programs(command: &mut Command, workspace: &Workspace) {
    command
        .env("UNDERPASS_BIN", workspace.released("underpass"))
        .env("UNDERPASS_IPAM_BIN", workspace.released("underpass-ipam"))
        .envs(setup::flannel(workspace).map(|path| (FLANNEL, path)))
        .env("PATH", process::path());
}

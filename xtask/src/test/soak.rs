//! `cargo xtask test soak`: the tests of that name, for as long as wanted.

use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{build, process};

/// What the test reads its length from, in seconds.
const SECONDS: &str = "UNDERPASS_SOAK_SECONDS";
/// How their names begin in the target `netns`. They run at the same time.
const NAME: &str = "soak::traffic_while_containers_come_and_go";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// How long the traffic goes on.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1440))]
    minutes: u64,
}

pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> anyhow::Result<()> {
    setup::require_root(
        "test soak",
        "the tests make network namespaces and load eBPF programs",
    )?;
    setup::ensure(workspace, Need::Test)?;
    build::plugins(workspace)?;
    // Not by nextest, which ends tests that take minutes and shows nothing until then.
    let mut test = workspace.cargo();
    test.args(["test", "--locked", "--package", "underpass-tests"])
        .args(["--test", "netns", "--", NAME, "--nocapture"])
        .env(SECONDS, (arguments.minutes * 60).to_string());
    super::name_programs(&mut test, workspace);
    process::run(&mut test)
}

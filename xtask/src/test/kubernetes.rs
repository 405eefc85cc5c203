//! `cargo xtask test kubernetes`: a Kubernetes of Debian's source on nodes that are namespaces, with the agent and the plugin as its pod
//! network.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::Context as _;

use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{build, image, process};

/// The package and the executable of it.
const PACKAGE: &str = "underpass-kubernetes";
const EXECUTABLE: &str = "kubernetes";
/// What names the folder of Kubernetes' executables.
const FOLDER: &str = "UNDERPASS_TEST_KUBERNETES";
/// What names the file that people apply, and the archive of the agent's image.
const MANIFEST: &str = "UNDERPASS_TEST_MANIFEST";
const IMAGE: &str = "UNDERPASS_TEST_IMAGE";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Words of checks: of those that need no other before them, the ones that have such a word are made.
    words: Vec<String>,
}

pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> anyhow::Result<()> {
    setup::require_root(
        "test kubernetes",
        "the test makes namespaces and control groups, and runs a cluster in them",
    )?;
    setup::ensure(workspace, Need::Kubernetes)?;
    build::executables(workspace)?;
    // Of the whole workspace, so that dependencies are not built once more with other features.
    process::run(
        workspace
            .cargo()
            .args(["build", "--locked", "--package", PACKAGE]),
    )?;

    let kubernetes = setup::kubernetes(workspace).context("set-up has left no Kubernetes")?;
    let busybox = setup::busybox(workspace).context("set-up has left no busybox")?;
    let test = workspace.target.join("debug").join(EXECUTABLE);
    let mut command = Command::new(&test);
    super::name_programs(&mut command, workspace);
    command
        .args(&arguments.words)
        .env(super::runtimes::BUSYBOX, busybox)
        .env(FOLDER, kubernetes)
        .env(MANIFEST, workspace.root.join("deploy/underpass.yaml"))
        .env(IMAGE, image::pack(workspace)?);
    // From here on the test is this process: signals and the exit code are its own.
    Err(command.exec()).with_context(|| format!("cannot start {}", test.display()))
}

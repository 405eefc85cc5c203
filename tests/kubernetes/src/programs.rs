//! The executables of Kubernetes that the cluster consists of, and those that are tested.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use underpass_tests::node::plugin;

/// Names the folder in which they are; `cargo xtask test kubernetes` builds them.
const VARIABLE: &str = "UNDERPASS_TEST_KUBERNETES";

/// The path of one of them.
pub(crate) fn find(name: &str) -> Result<PathBuf> {
    let folder = env::var_os(VARIABLE).with_context(|| {
        format!("{VARIABLE} names no folder: run `cargo xtask test kubernetes`")
    })?;
    reachable(Path::new(&folder).join(name))
}

/// The agent under test.
pub(crate) fn agent() -> Result<PathBuf> {
    reachable(plugin().with_file_name("underpass-agent"))
}

/// The plugin under test.
pub(crate) fn underpass() -> Result<PathBuf> {
    reachable(plugin().to_owned())
}

/// Refuses what a cage would not see: it has folders of its own over those of the machine.
fn reachable(path: PathBuf) -> Result<PathBuf> {
    ensure!(
        path.is_file(),
        "there is no {}: run `cargo xtask test kubernetes`",
        path.display()
    );
    let hidden = ["/opt", "/run", "/var/lib", "/var/log", "/var/tmp"];
    ensure!(
        hidden.iter().all(|folder| !path.starts_with(folder)),
        "{} can't be seen by nodes, which have a {} of their own: put the workspace elsewhere",
        path.display(),
        hidden.join(", ")
    );
    Ok(path)
}

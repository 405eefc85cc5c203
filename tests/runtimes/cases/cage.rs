//! What the other cases rely on: a cage is apart from the machine, and nothing of it is left, whatever ran in it.

use std::path::Path;

use underpass_runtimes::{Containerd, containerd::Pod, plugins, skipped};
use underpass_tests::prelude::*;

use crate::scene::{Scene, server};

#[test]
fn a_cage_ends_with_all_that_runs_in_it() -> Result<()> {
    if skipped(&["containerd", "ctr", "runc"]) {
        return Ok(());
    }
    let scene = Scene::set()?;
    let cage = scene.cage()?;
    let group = Path::new("/sys/fs/cgroup").join(cage.cgroup().trim_start_matches('/'));
    let by_controller =
        Path::new("/sys/fs/cgroup/memory").join(cage.cgroup().trim_start_matches('/'));
    let containerd = Containerd::start(cage)?;
    containerd.join(&plugins::with_ports())?;
    let command = server("web");
    let _pod = Pod::start(
        &containerd,
        "web",
        Vec::new(),
        &command.each_ref().map(String::as_str),
    )?;
    let exists = || group.exists() || by_controller.exists();
    ensure!(exists(), "the pod is in no control group of the cage");
    // The daemon, its shim, the pod and its container are all there.
    containerd.destroy()?;
    ensure!(!exists(), "control groups are left");
    Ok(())
}

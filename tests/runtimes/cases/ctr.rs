//! containerd's own client, which calls the plugin by itself.

use serde_json::json;
use underpass_runtimes::{Containerd, containerd::Task, skipped};
use underpass_tests::prelude::*;

use crate::{
    reach,
    scene::{Scene, port_mappings, server},
};

/// `ctr` has no words for host ports, so the network has them: the plugin gets them all the same.
#[test]
fn a_container_of_ctr_is_reached_from_everywhere() -> Result<()> {
    if skipped(&["containerd", "ctr", "runc"]) {
        return Ok(());
    }
    let scene = Scene::set()?;
    let containerd = Containerd::start(scene.cage()?)?;
    containerd.add_network(&json!({ "runtimeConfig": { "portMappings": port_mappings() } }))?;
    let command = server("web");
    let task = Task::start(&containerd, "web", &command.each_ref().map(String::as_str))?;
    reach::everywhere(&scene.lab, &task.running(&containerd)?, "web")?;
    scene.has(1)?;
    // Its DEL names no namespace: `ctr` forgets the path once the process is gone.
    task.remove(&containerd)?;
    reach::is_gone(&scene.lab)?;
    scene.is_clean()?;
    containerd.destroy()
}

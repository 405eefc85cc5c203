//! podman, with networks by CNI.

use underpass_runtimes::{Podman, skipped, wait_until};
use underpass_tests::{prelude::*, privilege};

use crate::{
    reach,
    scene::{Scene, server},
};

const PORTS: [&str; 6] = ["-p", "8080:80", "-p", "9000:90", "-p", "9000:90/udp"];

/// A node with podman; `None` if this machine's can't do it, for a reason that is printed.
fn set() -> Result<Option<(Scene, Podman)>> {
    if skipped(&["podman", "conmon", "runc"]) {
        return Ok(None);
    }
    let scene = Scene::set()?;
    let podman = Podman::start(scene.cage()?)?;
    if let Some(reason) = podman.refusal()? {
        privilege::skip(&reason);
        return Ok(None);
    }
    Ok(Some((scene, podman)))
}

fn run(podman: &Podman, name: &str, options: &[&str]) -> Result<()> {
    podman.run(name, options, &server(name).each_ref().map(String::as_str))
}

#[test]
fn a_container_with_host_ports_is_reached_from_everywhere() -> Result<()> {
    let Some((scene, podman)) = set()? else {
        return Ok(());
    };
    run(&podman, "web", &PORTS)?;
    reach::everywhere(&scene.lab, &podman.running("web")?, "web")?;
    scene.has(1)?;
    podman.remove("web")?;
    reach::is_gone(&scene.lab)?;
    scene.is_clean()?;
    podman.destroy()
}

#[test]
fn a_container_is_reached_after_each_restart() -> Result<()> {
    let Some((scene, podman)) = set()? else {
        return Ok(());
    };
    run(&podman, "web", &PORTS)?;
    run(&podman, "other", &[])?;
    reach::is_serving(&podman.running("web")?, "web")?;
    podman.podman(&["restart", "--time", "0", "web"])?;
    reach::everywhere(&scene.lab, &podman.running("web")?, "web")?;
    scene.has(2)?;
    podman.podman(&["stop", "--time", "0", "web"])?;
    scene.has(1)?;
    podman.podman(&["start", "web"])?;
    reach::everywhere(&scene.lab, &podman.running("web")?, "web")?;
    podman.remove("web")?;
    podman.remove("other")?;
    scene.is_clean()?;
    podman.destroy()
}

/// Nobody is there to make the DEL but the command that `conmon` runs at the end.
#[test]
fn a_container_that_ends_by_itself_leaves_nothing() -> Result<()> {
    let Some((scene, podman)) = set()? else {
        return Ok(());
    };
    run(&podman, "web", &PORTS)?;
    reach::is_serving(&podman.running("web")?, "web")?;
    scene.has(1)?;
    podman.cage().kill_all("busybox")?;
    wait_until("conmon has cleaned up", || scene.has(0))?;
    scene.is_clean()?;
    podman.remove("web")?;
    podman.destroy()
}

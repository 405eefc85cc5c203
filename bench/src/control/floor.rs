//! What the kernel costs by itself: a veth pair, made and deleted by a process that does nothing else.

use std::{
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use underpass_tests::{Node, netns::Netns};

/// The caller's name in tables.
pub(super) const NAME: &str = "ip link";

/// Milliseconds to make a pair with one end in a container, and to delete it.
pub(super) fn veth(node: &Node, container: &Netns) -> Result<(f64, f64)> {
    node.netns().run(|| {
        let peer = container.name();
        let made = ip(&format!(
            "link add floor up type veth peer name eth0 netns {peer}"
        ))?;
        let deleted = ip("link delete floor")?;
        Ok((made, deleted))
    })
}

fn ip(arguments: &str) -> Result<f64> {
    let start = Instant::now();
    let status = Command::new("ip")
        .args(arguments.split(' '))
        .stdin(Stdio::null())
        .status()
        .context("start ip")?;
    let elapsed = start.elapsed();
    ensure!(status.success(), "`ip {arguments}` failed ({status})");
    Ok(elapsed.as_secs_f64() * 1e3)
}

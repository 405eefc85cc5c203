//! The node's switches for forwarding: turned on where they are off, and otherwise not touched.

use std::process::Command;

use rstest::rstest;
use underpass_tests::prelude::*;

const fn switch(family: Family) -> &'static str {
    match family {
        V4 => "net/ipv4/ip_forward",
        V6 => "net/ipv6/conf/all/forwarding",
    }
}

/// Makes the switch unwritable in the node's mount namespace, and nowhere else.
fn seal(lab: &Lab, family: Family) -> Result<()> {
    let file = format!("/proc/sys/{}", switch(family));
    for options in ["bind", "remount,bind,ro"] {
        let mut mount = Command::new("mount");
        mount.args(["-o", options, &file, &file]);
        lab.node.netns().expect(&mut mount, &[])?;
    }
    Ok(())
}

#[rstest]
fn a_node_that_forwards_is_not_written_to(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.node.netns().set_sysctl(switch(family), "1")?;
    seal(&lab, family)?;
    lab.pod("a")?.del()
}

#[rstest]
fn a_switch_that_cannot_be_turned_on_is_named(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.node.netns().set_sysctl(switch(family), "0")?;
    seal(&lab, family)?;
    let Err(error) = lab.pod("a") else {
        anyhow::bail!("an ADD on a node that can't forward");
    };
    let error = format!("{error:#}");
    ensure!(error.contains(switch(family)), "{error}");
    ensure!(error.contains("Read-only file system"), "{error}");
    Ok(())
}

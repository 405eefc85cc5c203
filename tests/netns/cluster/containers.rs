//! An agent in a container: what it has of its host is what was mounted when the container began.

use std::{fs, io, path::Path};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rstest::rstest;
use underpass_tests::prelude::*;

use super::{
    commands::runs,
    fixture::Cluster,
    member::{BIN, NET},
};

/// What the host has, and the agent's container gets.
const HOST: &str = "/run/host";

/// Somebody resets the node, and does not know of the agent: it would write to a folder that has no name any more, and say that all is well.
#[rstest]
fn an_agent_whose_folder_was_removed_ends_so_that_the_next_one_has_it(
    #[values(NET, BIN, "/var/lib/cni", "/run/underpass")] folder: &str,
) -> Result<()> {
    needs_root!();
    ends_without(folder, || fs::remove_dir_all(HOST))
}

/// He keeps the old one by another name, and that has all that the agent made.
#[rstest]
fn an_agent_whose_folder_was_renamed_ends_so_that_the_next_one_has_it(
    #[values(NET, BIN, "/var/lib/cni", "/run/underpass")] folder: &str,
) -> Result<()> {
    needs_root!();
    ends_without(folder, || fs::rename(HOST, "/run/host.bak"))
}

/// Gives the agent's container the host's folder, as it is now.
fn mount_host(folder: &str) -> Result<()> {
    fs::create_dir_all(HOST)?;
    fs::create_dir_all(folder)?;
    // Nothing can be mounted on what is removed.
    let _ = umount2(folder, MntFlags::MNT_DETACH);
    let none: Option<&str> = None;
    mount(Some(HOST), folder, none, MsFlags::MS_BIND, none)?;
    Ok(())
}

fn ends_without(folder: &str, take_away: fn() -> io::Result<()>) -> Result<()> {
    let mut cluster = Cluster::idle(&[0])?;
    let netns = cluster.members[0].node.netns().clone();
    netns.run(|| mount_host(folder))?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    member.is_ready()?;
    netns.run(|| {
        take_away()?;
        ensure!(Path::new(folder).exists(), "the mount is gone as well");
        Ok(())
    })?;
    member.await_end()?;
    let log = member.log()?;
    ensure!(
        log.contains(&format!("the folder {folder} is not the host's any more")),
        "{log}"
    );

    netns.run(|| mount_host(folder))?;
    cluster.members[0].start_agent()?;
    let member = &cluster.members[0];
    let pod = member.pod("later")?;
    ping::ping(pod.netns(), member.gateway(V4))?;
    ping::ping(pod.netns(), member.gateway(V6))?;
    pod.del()
}

/// What runs is brought to its end, which may take minutes: meanwhile nobody takes the agent for one that looks after anything.
#[test]
fn an_agent_that_ends_says_why_before_its_command_has_ended() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let netns = cluster.members[0].node.netns().clone();
    netns.run(|| mount_host(NET))?;
    cluster.members[0].interpose(
        "[ \"$1\" != gc ] || { echo >> /run/gc-runs; while [ ! -e /run/go ]; do sleep 0.1; done; }",
    )?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    eventually("a command that runs", || {
        ensure!(runs(member, "gc")? == 1);
        Ok(())
    })?;
    netns.run(|| fs::remove_dir_all(HOST))?;
    eventually("it says why it ends", || {
        let said = member.get("/readyz")?;
        let why = format!("the folder {NET} is not the host's any more");
        ensure!(
            said.starts_with("HTTP/1.1 503") && said.contains(&why),
            "{said}"
        );
        let log = member.log()?;
        ensure!(log.contains(&why), "{log}");
        Ok(())
    })?;
    ensure!(
        !member.running()?.commands()?.is_empty(),
        "the command has ended"
    );
    netns.run(|| fs::write("/run/go", []))?;
    member.await_end()
}

/// The host's root is an overlay, as a machine's from an image that nobody writes to, or a container's: whether a folder of both layers was removed
/// can't be seen by its links.
#[test]
fn a_folder_of_two_layers_that_was_removed_is_missed() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let netns = cluster.members[0].node.netns().clone();
    netns.run(|| -> Result<()> {
        for folder in ["lower/net", "upper/net", "work", "merged"] {
            fs::create_dir_all(format!("/run/host/{folder}"))?;
        }
        fs::create_dir_all(NET)?;
        let none: Option<&str> = None;
        let layers = "lowerdir=/run/host/lower,upperdir=/run/host/upper,workdir=/run/host/work";
        mount(
            none,
            "/run/host/merged",
            Some("overlay"),
            MsFlags::empty(),
            Some(layers),
        )?;
        mount(
            Some("/run/host/merged/net"),
            NET,
            none,
            MsFlags::MS_BIND,
            none,
        )?;
        Ok(())
    })?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    member.is_ready()?;
    netns.run(|| {
        fs::remove_dir_all("/run/host/merged/net")?;
        fs::create_dir("/run/host/merged/net")
    })?;
    member.await_end()?;
    let log = member.log()?;
    ensure!(log.contains("is not the host's any more"), "{log}");
    Ok(())
}

//! Agents end, start again, and bring another build, node by node, while pods of all nodes talk.

use std::{fs, io, net::SocketAddr};

use nix::{
    mount::{MsFlags, mount},
    sys::signal::Signal,
};
use rstest::rstest;
use underpass_tests::{another_build, prelude::*};

use super::{fixture::Cluster, member::NET};
use crate::upgrade::{
    expect_exchanged, programs,
    traffic::{Path, while_talking},
    widen,
};

/// Where numbered datagrams go, and connections.
const NUMBERED: u16 = 8_090;
const CONNECTED: u16 = 80;

/// Has every agent end and start again, with the build that is meant for its node.
fn roll(cluster: &mut Cluster, is_other: bool) -> Result<()> {
    for member in &mut cluster.members {
        let before = programs(&member.node)?;
        let was_other = member.build.is_some();
        member.stop_agent(Signal::SIGTERM);
        member.build = if is_other {
            Some(another_build::make(&member.node)?)
        } else {
            None
        };
        member.start_agent()?;
        member.is_ready()?;
        if was_other == is_other {
            continue;
        }
        eventually("the agent's build has taken over", || {
            expect_exchanged(&member.node, &before, &[])
        })?;
    }
    cluster.settle()
}

/// Which build every agent starts again with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Build {
    /// That which it had.
    Same,
    /// One that brings other programs.
    Other,
    /// That of before, after another one.
    Former,
}

#[rstest]
fn pods_do_not_notice(
    #[values(Build::Same, Build::Other, Build::Former)] build: Build,
) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::new(&[0, 0, 1])?;
    cluster.settle()?;
    if build == Build::Former {
        roll(&mut cluster, true)?;
    }
    let pods = cluster.pods()?;
    let mut servers = Vec::new();
    let mut paths = Vec::new();
    for family in Family::BOTH {
        for (name, from, to) in [("direct", 0, 1), ("by VXLAN", 2, 0)] {
            let [numbered, connected] = [NUMBERED, CONNECTED].map(|port| {
                let at: SocketAddr = pods[to].at(family, port);
                Path {
                    name,
                    client: pods[from].netns(),
                    server: pods[to].netns(),
                    listens: at,
                    asked: at,
                }
            });
            servers.push(tcp::Server::start(connected.server, connected.listens)?);
            paths.push((numbered, connected));
        }
    }
    while_talking(&paths, &[], || roll(&mut cluster, build == Build::Other))?;
    cluster.all_bypass()
}

/// The new build's maps have more in them, so that it can install nothing before its programs have taken over.
#[test]
fn an_agent_whose_build_knows_more_of_a_container_takes_over() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::new(&[0])?;
    let member = &mut cluster.members[0];
    let pod = member.pod("of-before")?;
    member.stop_agent(Signal::SIGTERM);
    widen(&member.node)?;
    let before = programs(&member.node)?;
    // Where it can't put its plugin, the one that is there goes on with what it knows.
    let full = "/run/full";
    let netns = member.node.netns();
    netns.run(|| {
        let none: Option<&str> = None;
        fs::create_dir(full)?;
        mount(
            none,
            full,
            Some("tmpfs"),
            MsFlags::empty(),
            Some("size=64k"),
        )
        .map_err(io::Error::from)
    })?;
    let said = member.node.underpass_error(&[
        "install",
        "--upgrade",
        "--bin-dir",
        full,
        "--net-dir",
        NET,
        "--range",
        &member.range(V4),
    ])?;
    ensure!(said.contains("No space left on device"), "{said}");
    ensure!(programs(&member.node)? == before, "it has upgraded");
    let left = member.names(full)?;
    ensure!(left.is_empty(), "{left:?}");
    member.start_agent()?;
    member.is_ready()?;
    expect_exchanged(&member.node, &before, &[&pod])?;
    for family in Family::BOTH {
        ping::ping(pod.netns(), member.gateway(family))?;
    }
    member.pod("later")?.del()
}

//! The kernel's limits: what no plugin with veth pairs can beat.

use std::{net::IpAddr, path::Path as File, process::Command};

use anyhow::{Context as _, Result};
use nix::net::if_::if_nametoindex;
use underpass_tests::netns::Netns;

use super::{Address, Carrier, Path, Route};
use crate::redirect::{self, Redirect};

/// L1: one veth pair between two namespaces.
pub(super) fn one_pair() -> Result<Path> {
    let root = Netns::isolated("limit1")?;
    let (client, server) = (root.sibling("client")?, root.sibling("server")?);
    client.cable("near", &server, "far", 1500)?;
    finish(Route::PodToPod, Carrier::Limit, root, client, server)
}

/// L2: two veth pairs, joined on a node without addresses by tc programs that redirect everything.
pub(super) fn two_pairs(route: Route) -> Result<Path> {
    joined(route, Carrier::Limit, Redirect::Out)
}

/// Two veth pairs, joined by tc programs that hand everything to the other container: the least that a program at the host's end costs.
pub(super) fn handed_over() -> Result<Path> {
    joined(Route::PodToPod, Carrier::HandedOver, Redirect::Peer)
}

fn joined(route: Route, carrier: Carrier, how: Redirect) -> Result<Path> {
    let node = Netns::isolated("limit2")?;
    let (client, server) = (node.sibling("client")?, node.sibling("server")?);
    node.cable("left", &client, "near", 1500)?;
    node.cable("right", &server, "far", 1500)?;
    join(&node, "left", "right", how)?;
    join(&node, "right", "left", how)?;
    finish(route, carrier, node, client, server)
}

/// Sends all that comes in by one device by another.
fn join(node: &Netns, from: &str, to: &str, how: Redirect) -> Result<()> {
    let pin = File::new("/sys/fs/bpf").join(from);
    node.run(|| {
        let ifindex = if_nametoindex(to).with_context(|| format!("find the device {to}"))?;
        redirect::pin_redirect(how, ifindex, &pin)
    })?;
    node.expect(
        Command::new("tc").args(["qdisc", "add", "dev", from, "clsact"]),
        &[],
    )?;
    node.expect(
        Command::new("tc")
            .args(["filter", "add", "dev", from, "ingress"])
            .args(["bpf", "direct-action", "object-pinned"])
            .arg(&pin),
        &[],
    )?;
    Ok(())
}

fn finish(
    route: Route,
    carrier: Carrier,
    node: Netns,
    client: Netns,
    server: Netns,
) -> Result<Path> {
    for (netns, device, host) in [(&client, "near", 1), (&server, "far", 2)] {
        netns.rtnl(|rtnl| {
            rtnl.add_address(device, format!("10.99.0.{host}").parse()?, 24)?;
            rtnl.add_address(device, format!("fd00:99::{host}").parse()?, 64)
        })?;
    }
    Ok(Path {
        route,
        carrier,
        client,
        server,
        _node: node,
        v4: ip("10.99.0.2")?,
        v6: ip("fd00:99::2")?,
    })
}

fn ip(text: &str) -> Result<Address> {
    let ip: IpAddr = text
        .parse()
        .with_context(|| format!("parse the address {text}"))?;
    Ok(ip.into())
}

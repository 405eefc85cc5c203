//! What a node's own Node lacks or gets wrong: what works stays as it is.

use std::{collections::BTreeSet, thread::sleep, time::Duration};

use serde_json::Value;
use underpass_tests::prelude::*;

use super::{
    fixture::Cluster,
    member::{Member, TUNNEL},
};

/// A Node that was deleted and registered again has other ranges, and another node gets those of before: a pod that is left has its
/// gateway in them.
#[test]
fn a_pod_that_is_left_keeps_its_range_from_nobody() -> Result<()> {
    needs_root!();
    let cluster = Cluster::new(&[0, 0])?;
    cluster.settle()?;
    let (member, other) = (&cluster.members[0], &cluster.members[1]);
    let _pod = member.pod("left")?;
    let moved = ["10.244.77.0/24", "fd00:244:77::/64"].map(str::to_owned);
    cluster.api.set(&member.name, &member.addresses(), &moved);
    cluster
        .api
        .set(&other.name, &other.addresses(), &member.ranges());
    eventually("routes to the ranges of before", || {
        let routes = member.routes()?;
        for family in Family::BOTH {
            let (range, via) = (member.range(family), other.address(family));
            let route = format!("{range} via {via} dev {}", Node::UPLINK);
            ensure!(routes.contains(&route), "{routes:?}, {}", member.log()?);
        }
        Ok(())
    })
}

/// What the agent has made of the node: its routes, and its device with the addresses.
fn made(member: &Member) -> Result<(BTreeSet<String>, u32, Value)> {
    let netns = member.node.netns();
    let device = netns.ip_json(&["address", "show", "dev", TUNNEL])?;
    let addresses = device[0]["addr_info"].as_array().into_iter().flatten();
    let addresses = addresses.map(|address| address["local"].clone()).collect();
    Ok((member.routes()?, netns.ifindex(TUNNEL)?, addresses))
}

fn says(member: &Member, what: &str) -> Result<()> {
    eventually(&format!("{} says {what:?}", member.name), || {
        let log = member.log()?;
        ensure!(log.contains(what), "{log}");
        Ok(())
    })
}

/// A kubelet with a cloud registers its Node with a host name alone, and a controller adds addresses and ranges, each at its time.
#[test]
fn a_node_that_lacks_something_for_a_while_keeps_what_it_has() -> Result<()> {
    needs_root!();
    let cluster = Cluster::new(&[0, 0, 1])?;
    cluster.settle()?;
    let member = &cluster.members[0];
    let pods = cluster.pods()?;
    let before = made(member)?;
    cluster.api.delete(&member.name);
    cluster.api.set(&member.name, &[], &member.ranges());
    says(member, "no InternalIP")?;
    let after = made(member)?;
    ensure!(after == before, "{before:?} became {after:?}");
    cluster.api.set(&member.name, &member.addresses(), &[]);
    says(member, "has no podCIDRs")?;
    member.compares()?;
    let after = made(member)?;
    ensure!(after == before, "{before:?} became {after:?}");
    cluster.register(member);
    cluster.settle()?;
    let after = made(member)?;
    ensure!(after == before, "{before:?} became {after:?}");
    Cluster::all_reach_all(&pods)
}

/// To whom nobody knows the way has no network yet.
#[test]
fn a_node_without_an_address_waits_for_one() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0])?;
    let young = &cluster.members[0];
    cluster.api.set(&young.name, &[], &young.ranges());
    cluster.start_agents()?;
    let (young, other) = (&cluster.members[0], &cluster.members[1]);
    says(young, "no InternalIP")?;
    other.is_ready()?;
    // It would have been as fast.
    sleep(Duration::from_secs(3));
    let said = young.get("/readyz")?;
    ensure!(said.starts_with("HTTP/1.1 503"), "{said}");
    ensure!(said.contains("no InternalIP"), "{said}");
    ensure!(young.conflist()?.is_none(), "there is a network");
    let log = young.log()?;
    ensure!(log.matches("no InternalIP").count() == 1, "{log}");
    cluster.register(young);
    young.is_ready()?;
    cluster.settle()
}

//! What a node's own Node lacks or gets wrong: what works stays as it is.

use std::{collections::BTreeSet, thread::sleep, time::Duration};

use rstest::rstest;
use serde_json::Value;
use underpass_tests::prelude::*;

use super::{
    fixture::Cluster,
    heals,
    member::{Member, TUNNEL, outside},
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

/// What was desired stays desired: somebody who removes some of it meanwhile does no more harm than ever.
#[rstest]
#[case::deleted("the API has no Node")]
#[case::without_an_address("no InternalIP")]
fn a_node_that_is_not_believed_keeps_its_routes(#[case] why: &str) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0, 1])?;
    for member in &mut cluster.members {
        // No comparison comes by itself.
        member.start_agent_with(&["--resync", "3600"])?;
    }
    cluster.settle()?;
    let member = &cluster.members[0];
    let pods = cluster.pods()?;
    let conflist = member.conflist()?;
    if why == "no InternalIP" {
        cluster.api.set(&member.name, &[], &member.ranges());
    } else {
        cluster.api.delete(&member.name);
    }
    says(member, why)?;
    // What another Node becomes counts when its own is believed again.
    let later = [V4, V6].map(|family| outside(family, 0, 97).to_string());
    let ranges = ["10.244.97.0/24", "fd00:244:97::/64"].map(str::to_owned);
    cluster.api.set("later", &later, &ranges);
    heals(&cluster)?;
    member.is_ready()?;
    ensure!(member.conflist()? == conflist, "another network");
    ensure!(member.metric("sync_failures_total")? == 0);
    let log = member.log()?;
    ensure!(log.matches(why).count() == 1, "{log}");
    cluster.register(member);
    member.learns(&ranges, &later)?;
    cluster.api.delete("later");
    cluster.settle()?;
    Cluster::all_reach_all(&pods)
}

/// Of what an agent before it desired nothing is known to one that starts meanwhile.
#[test]
fn an_agent_that_was_never_told_of_its_node_changes_nothing() -> Result<()> {
    const LEFT: &str = "10.244.66.0/24";
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0])?;
    let member = &cluster.members[0];
    cluster.api.delete(&member.name);
    let left = format!("route add unreachable {LEFT} proto 117 metric 2000");
    member.node.netns().ip(&[left])?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    says(member, "the API has no Node")?;
    // It looks again by then.
    sleep(Duration::from_secs(3));
    let routes = member.routes()?;
    let left = BTreeSet::from([format!("{LEFT} unreachable")]);
    ensure!(routes == left, "{routes:?}");
    let said = member.get("/readyz")?;
    ensure!(
        said.starts_with("HTTP/1.1 503") && said.contains("the API has no Node"),
        "{said}"
    );
    Ok(())
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

/// The address of the node, and those of all whom it knows, would be unreachable.
#[rstest]
fn a_nodes_own_range_does_not_cut_it_off(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0])?;
    let member = &cluster.members[0];
    let bad = match family {
        V4 => "198.18.10.0/25",
        V6 => "2001:db8:a::/96",
    };
    let mut ranges = member.ranges();
    for range in &mut ranges {
        if range.contains(':') == (family == V6) {
            bad.clone_into(range);
        }
    }
    cluster.api.set(&member.name, &member.addresses(), &ranges);
    cluster.start_agents()?;
    let (member, other) = (&cluster.members[0], &cluster.members[1]);
    eventually("it says what is wrong", || {
        let said = member.get("/readyz")?;
        ensure!(
            said.starts_with("HTTP/1.1 503") && said.contains(bad),
            "{said}"
        );
        Ok(())
    })?;
    member.compares()?;
    let routes = member.routes()?;
    ensure!(
        !routes.iter().any(|route| route.starts_with(bad)),
        "{routes:?}"
    );
    ensure!(member.conflist()?.is_none(), "there is a network");
    let log = member.log()?;
    ensure!(log.matches(bad).count() == 1, "{log}");
    ping::ping(member.node.netns(), other.address(family))?;
    cluster.register(member);
    member.is_ready()?;
    cluster.settle()
}

/// Pods keep their own addresses towards the ranges of pods alone, whatever a Node says, also where a cloud makes the routes.
#[rstest]
fn what_is_not_believed_is_masqueraded(#[values("auto", "cloud")] routing: &str) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0])?;
    let bad = ["198.18.10.0/24", "2001:db8:a::/64"].map(str::to_owned);
    let good = ["10.244.98.0/24", "fd00:244:98::/64"].map(str::to_owned);
    let ranges = [&bad[..], &good[..]].concat();
    let addresses = ["198.18.11.98", "2001:db8:b::98"].map(str::to_owned);
    cluster.api.set("odd", &addresses, &ranges);
    let member = &mut cluster.members[0];
    member.start_agent_with(&["--resync", "2", "--routing", routing])?;
    let member = &cluster.members[0];
    member.is_ready()?;
    let conflist = member.conflist()?.context("a conflist")?;
    let kept = &conflist["plugins"][0]["nonMasqueradeCIDRs"];
    let kept = kept.as_array().context("a list")?;
    for range in good {
        ensure!(kept.contains(&range.as_str().into()), "{kept:?}");
    }
    for range in bad {
        ensure!(!kept.contains(&range.as_str().into()), "{kept:?}");
    }
    Ok(())
}

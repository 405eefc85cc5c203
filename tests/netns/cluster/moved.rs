//! What has become of nodes while an agent was down: its first look at them puts all right, and touches nothing of others.

use nix::sys::signal::Signal;
use rstest::rstest;
use serde_json::Value;
use underpass_tests::prelude::*;

use super::{
    fixture::Cluster,
    made::{address_line, expect, should_be},
    member::Member,
};

/// Routes of others on the first node, some of them to ranges of pods, by the addresses that the nodes had before.
const FOREIGN: [&str; 9] = [
    "10.99.0.0/16 via 198.18.10.254 proto 118",
    "fd00:99::/64 via 2001:db8:a::fe proto 118",
    "10.244.2.0/24 via 198.18.10.2 proto 118",
    "fd00:244:2::/64 via 2001:db8:a::2 proto 118 metric 1024",
    "unreachable 10.244.1.0/24 proto 118 metric 3000",
    "unreachable fd00:244:1::/64 proto 118 metric 3000",
    "unreachable 10.244.4.0/25 proto 118",
    // The agent's number, and not its table.
    "10.244.2.0/24 via 198.18.10.2 proto 117 metric 2000 table 118",
    "fd00:244:2::/64 via 2001:db8:a::2 proto 117 metric 2000 table 118",
];

/// Routes of others, in whatever table.
fn foreign(member: &Member) -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for family in ["-4", "-6"] {
        for of in [&["proto", "118"][..], &["proto", "117", "table", "118"]] {
            let arguments = [&[family, "-d", "route", "show"], of].concat();
            let list = member.node.netns().ip_json(&arguments)?;
            all.extend(list.as_array().context("a list")?.iter().cloned());
        }
    }
    Ok(all)
}

/// A number that the agent has said.
fn number(said: &str, name: &str) -> Result<u64> {
    let start = format!("underpass_agent_{name} ");
    let value = said.lines().find_map(|line| line.strip_prefix(&start));
    Ok(value
        .with_context(|| format!("no {name}: {said}"))?
        .parse()?)
}

/// Waits for an agent's first comparison, after which there is exactly what is expected: it is the only one that changes anything. No other
/// comes by itself; the agent hears of its own changes, and compares again.
fn is_right_at_once(member: &Member, expected: &[String]) -> Result<()> {
    let mut said = String::new();
    eventually("a comparison", || {
        said = member.get("/metrics")?;
        ensure!(number(&said, "syncs_total")? > 0, "{}", member.log()?);
        Ok(())
    })?;
    let looks = number(&said, "syncs_total")?;
    expect(member, expected).with_context(|| format!("after {looks} comparisons"))?;
    member.rests()?;
    let changes = number(&said, "changes_total")?;
    let now = member.metric("changes_total")?;
    ensure!(
        now == changes,
        "{changes} changes after {looks} comparisons became {now}: {}",
        member.log()?
    );
    expect(member, expected)
}

/// Starts the agent of the first node, and sees that it puts all right at once, and leaves the routes of others alone.
fn finds_all(cluster: &mut Cluster, expected: &[String]) -> Result<()> {
    let member = &mut cluster.members[0];
    let routes = FOREIGN.map(|route| format!("route add {route}"));
    member.node.netns().ip(&routes)?;
    let before = foreign(member)?;
    ensure!(before.len() == FOREIGN.len(), "{before:#?}");
    member.start_agent_with(&["--resync", "3600"])?;
    is_right_at_once(member, expected)?;
    let after = foreign(member)?;
    ensure!(after == before, "{before:#?} became {after:#?}");
    Ok(())
}

/// A neighbour, and a node beyond the router, come back with other addresses and ranges, and a node does not come back.
#[rstest]
fn nodes_that_moved_meanwhile(#[values(V4, V6)] outside: Family) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0, 1, 1])?;
    cluster.put_outside(outside);
    cluster.start_agents()?;
    cluster.settle()?;
    cluster.members[0].stop_agent(Signal::SIGKILL);
    for name in ["node2", "node3", "node4"] {
        cluster.api.delete(name);
    }
    let _gone = cluster.members.remove(3);
    cluster.move_to(1, 2)?;
    cluster.move_to(2, 3)?;
    for other in &cluster.members[1..] {
        cluster.settle_one(other)?;
    }
    let expected = should_be(&cluster, &cluster.members[0])?;
    finds_all(&mut cluster, &expected)?;
    Cluster::all_reach_all(&cluster.pods()?)
}

/// The agent's own node has another address and other ranges: its device is another one. A pod of before stays where it is.
#[rstest]
fn the_own_node_that_moved_meanwhile(#[values(V4, V6)] outside: Family) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0, 1])?;
    cluster.put_outside(outside);
    cluster.start_agents()?;
    cluster.settle()?;
    let left = cluster.members[0].pod("left")?;
    cluster.members[0].stop_agent(Signal::SIGKILL);
    cluster.api.delete("node1");
    cluster.move_to(0, 1)?;
    let expected = should_be(&cluster, &cluster.members[0])?;
    finds_all(&mut cluster, &expected)?;
    cluster.settle()?;
    let member = &cluster.members[0];
    for family in Family::BOTH {
        ping::ping(member.node.netns(), left.ip(family))?;
    }
    Cluster::all_reach_all(&cluster.pods()?)
}

/// The agent's own node has other ranges, and a neighbour has those of before.
#[test]
fn the_own_range_that_went_to_a_neighbour_meanwhile() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::new(&[0, 0])?;
    cluster.settle()?;
    cluster.members[0].stop_agent(Signal::SIGKILL);
    let [member, other] = &cluster.members[..] else {
        anyhow::bail!("two members");
    };
    let ranges = ["10.244.77.0/24", "fd00:244:77::/64"].map(str::to_owned);
    cluster.api.set(&member.name, &member.addresses(), &ranges);
    let taken = member.ranges();
    cluster.api.set(&other.name, &other.addresses(), &taken);
    let mut expected = vec![address_line("10.244.77.0"), address_line("fd00:244:77::")];
    expected.extend(ranges.iter().map(|range| format!("{range} unreachable")));
    for family in Family::BOTH {
        let (range, via) = (member.range(family), other.address(family));
        expected.push(format!("{range} via {via} dev {}", Node::UPLINK));
    }
    expected.sort();
    finds_all(&mut cluster, &expected)?;
    let member = &cluster.members[0];
    eventually("the network has the other ranges", || {
        let conflist = member.conflist()?.context("a conflist")?;
        let said = conflist["plugins"][0]["ipam"]["ranges"].to_string();
        ensure!(ranges.iter().all(|range| said.contains(range)), "{said}");
        Ok(())
    })
}

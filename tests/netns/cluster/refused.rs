//! Routes that the kernel refuses, or that others have taken: one node's trouble is not that of all.

use std::{collections::BTreeSet, net::IpAddr, process::Command};

use rstest::rstest;
use underpass_tests::prelude::*;

use super::{
    fixture::Cluster,
    member::{Member, TUNNEL},
};

/// A device that leads nowhere.
const OTHER: &str = "other";
const ODD_RANGES: [&str; 2] = ["10.244.99.0/24", "fd00:244:99::/64"];

/// Gives the node a device of somebody else, with routes.
fn lead_away(member: &Member, ranges: &[&str]) -> Result<()> {
    let mut lines = vec![
        format!("link add {OTHER} type bridge"),
        format!("link set {OTHER} up"),
    ];
    lines.extend(
        ranges
            .iter()
            .map(|range| format!("route add {range} dev {OTHER} metric 10")),
    );
    member.node.netns().ip(&lines)
}

/// The gateway of one range is a broadcast address, that of the other one is the node's own. (One to which another route leads is a gateway since 7.x.)
#[test]
fn a_node_that_is_out_of_reach_keeps_no_other_from_its_network() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0, 1])?;
    let broadcast = "198.18.10.255";
    let odd = |addresses: &[&str]| {
        let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        cluster
            .api
            .set("odd", &addresses, &ODD_RANGES.map(str::to_owned));
    };
    odd(&[broadcast]);
    let own = |member: &Member, verb: &str| {
        let line = format!("address {verb} fd00:244:99::/128 dev lo");
        member.node.netns().ip(&[line])
    };
    own(&cluster.members[0], "add")?;
    for member in &mut cluster.members {
        member.start_agent()?;
    }
    let member = &cluster.members[0];
    member.is_ready()?;
    member.conflist()?.context("a conflist")?;
    let pods = cluster.pods()?;
    Cluster::all_reach_all(&pods)?;
    eventually("it says what is missing", || {
        let said = member.get("/readyz")?;
        ensure!(
            said.contains("2 of the other nodes' routes"),
            "{said}: {:?}, {}",
            member.routes()?,
            member.log()?
        );
        ensure!(member.metric("missing_routes")? == 2);
        Ok(())
    })?;
    member.compares()?;
    let log = member.log()?;
    for range in ODD_RANGES {
        let said = format!("cannot make the route to {range}");
        ensure!(log.matches(&said).count() == 1, "{said}: {log}");
    }

    // It goes on trying.
    odd(&["198.18.10.98"]);
    own(member, "del")?;
    eventually("the routes that were missing", || {
        let routes = member.routes()?;
        let expected = [
            format!("{} via 198.18.10.98 dev {}", ODD_RANGES[0], Node::UPLINK),
            format!("{} via fd00:244:99:: dev {TUNNEL}", ODD_RANGES[1]),
        ];
        ensure!(
            expected.iter().all(|route| routes.contains(route)),
            "{routes:?}"
        );
        let said = member.get("/readyz")?;
        ensure!(said.ends_with("\r\n\r\nok\n"), "{said}");
        Ok(())
    })
}

/// A route of others to all pods' ranges leads to the gateways as well: by IPv6 none of ours could be made beside it.
#[test]
fn a_route_of_others_to_all_pods_does_not_matter() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 1])?;
    for member in &mut cluster.members {
        lead_away(member, &["10.244.0.0/16", "fd00:244::/32"])?;
        member.start_agent()?;
    }
    cluster.settle()?;
    let pods = cluster.pods()?;
    Cluster::all_reach_all(&pods)?;

    // From one side of the router to the other, and back: nothing is in the way of either.
    let member = &cluster.members[0];
    let gateway = |is_expected: bool| {
        eventually("the route to the gateway", || {
            let found =
                member
                    .node
                    .netns()
                    .ip_json(&["-6", "route", "show", "fd00:244:98::/128"])?;
            let there = found.as_array().is_some_and(|routes| !routes.is_empty());
            ensure!(there == is_expected, "{found}");
            Ok(())
        })
    };
    let ranges = ["10.244.98.0/24", "fd00:244:98::/64"].map(str::to_owned);
    let near = ["198.18.10.98".to_owned(), "2001:db8:a::98".to_owned()];
    let far = ["198.18.11.98".to_owned(), "2001:db8:b::98".to_owned()];
    for (addresses, is_far) in [(&near, false), (&far, true), (&near, false)] {
        cluster.api.set("mobile", addresses, &ranges);
        let ways = ranges.iter().zip(addresses).map(|(range, address)| {
            let via: IpAddr = if is_far {
                range.split('/').next().unwrap_or("").parse()?
            } else {
                address.parse()?
            };
            let device = if is_far { TUNNEL } else { Node::UPLINK };
            Ok(format!("{range} via {via} dev {device}"))
        });
        let ways = ways.collect::<Result<Vec<_>>>()?;
        eventually("the routes to a node that moves", || {
            let routes = member.routes()?;
            ensure!(ways.iter().all(|way| routes.contains(way)), "{routes:?}");
            Ok(())
        })?;
        gateway(is_far)?;
    }
    Ok(())
}

/// Nothing is compared by the clock here: a route that takes the place of ours is heard of.
#[test]
fn a_route_that_takes_the_place_of_ours_does_not_stay() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 0, 1])?;
    for member in &mut cluster.members {
        member.start_agent_with(&["--resync", "86400"])?;
    }
    cluster.settle()?;
    let (member, near, far) = (
        &cluster.members[0],
        &cluster.members[1],
        &cluster.members[2],
    );
    member.is_ready()?;
    for family in Family::BOTH {
        let gateway = member.gateway(family);
        for range in [near.range(family), far.range(family), member.range(family)] {
            let line = format!("route replace {range} via {gateway} metric 2000 proto static");
            member.node.netns().ip(&[line])?;
            cluster.settle_one(member)?;
        }
    }
    // It hears of its own changes as well, and that comes to rest.
    member.rests()
}

/// What the node's VXLAN device knows of others that somebody made: neighbours that are routers and their MACs, MACs and where they are.
fn known(member: &Member) -> Result<BTreeSet<[String; 2]>> {
    let netns = member.node.netns();
    let list = ["neighbour", "show", "dev", TUNNEL, "nud", "permanent"];
    let mut neighbours = netns.ip_json(&list)?;
    if let Some(all) = neighbours.as_array_mut() {
        all.retain(|one| one.get("router").is_some());
    }
    let mut list = Command::new("bridge");
    list.args(["-j", "fdb", "show", "dev", TUNNEL]);
    let entries: serde_json::Value = serde_json::from_str(&netns.expect(&mut list, &[])?)?;
    let pairs = |list: serde_json::Value, from, to| -> Result<Vec<[String; 2]>> {
        let list = list.as_array().context("a list")?.clone();
        Ok(list
            .into_iter()
            .map(|one| [&one[from], &one[to]].map(|text| text.as_str().unwrap_or("?").to_owned()))
            .collect())
    };
    let mut known = pairs(neighbours, "dst", "lladdr")?;
    known.extend(pairs(entries, "mac", "dst")?);
    Ok(known.into_iter().collect())
}

/// Nor is it compared by the clock what the VXLAN device knows.
#[rstest]
fn an_entry_that_takes_the_place_of_ours_does_not_stay(
    #[values(V4, V6)] outer: Family,
) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0, 1])?;
    cluster.put_outside(outer);
    for member in &mut cluster.members {
        member.start_agent_with(&["--resync", "86400"])?;
    }
    cluster.settle()?;
    let (member, far) = (&cluster.members[0], &cluster.members[1]);
    member.is_ready()?;
    member.rests()?;
    let before = known(member)?;
    // By IPv4 and by IPv6, and where the device of both is.
    let gateways = Family::BOTH.map(|family| far.tunnel_address(family));
    let gateways = gateways.into_iter().collect::<Result<Vec<_>>>()?;
    let outside = far.address(outer).to_string();
    let entry = before.iter().find(|[_, at]| *at == outside);
    let [mac, _] = entry.with_context(|| format!("no entry for {outside}: {before:?}"))?;
    ensure!(before.len() == 3, "{before:?}");
    let elsewhere = member.gateway(outer);
    let mut commands = vec![(
        "bridge",
        format!("fdb replace {mac} dev {TUNNEL} dst {elsewhere} self permanent"),
    )];
    for gateway in gateways {
        for state in ["permanent", "reachable"] {
            commands.push((
                "ip",
                format!(
                    "neighbour replace {gateway} lladdr 02:00:00:00:00:01 dev {TUNNEL} nud {state}"
                ),
            ));
        }
        // As an agent of before made it.
        commands.push((
            "ip",
            format!("neighbour replace {gateway} lladdr {mac} dev {TUNNEL} nud permanent"),
        ));
    }
    for (program, line) in &commands {
        let mut command = Command::new(program);
        command.args(line.split(' '));
        // It does nothing before we have seen what is changed.
        member.running()?.hold(true)?;
        member.node.netns().expect(&mut command, &[])?;
        let changed = known(member)?;
        ensure!(changed != before, "{line} changes nothing: {before:?}");
        member.running()?.hold(false)?;
        eventually(line, || {
            let now = known(member)?;
            ensure!(now == before, "{before:?} became {now:?}");
            Ok(())
        })?;
        // It hears of its own changes as well, and that comes to rest.
        member.rests().with_context(|| line.clone())?;
    }
    Ok(())
}

//! Routes of others that go before those of a cluster's agent.

use std::process::Command;

use rstest::rstest;
use underpass_tests::prelude::*;

use super::{Said, ask, lab};

/// The range of another node's pods.
const fn range(family: Family) -> &'static str {
    match family {
        V4 => "10.244.2.0/24",
        V6 => "fd00:244:2::/64",
    }
}

/// Puts the routes there that an agent makes: to its own range, and to that of a node on the link.
fn be_an_agent(lab: &Lab) -> Result<()> {
    let mut lines = Vec::new();
    for family in Family::BOTH {
        let own = range(family).replace("2.0/", "1.0/").replace("2::", "1::");
        let ours = "proto 117 metric 2000";
        lines.push(format!("route add unreachable {own} {ours}"));
        let (range, via) = (range(family), family.gateway());
        lines.push(format!("route add {range} via {via} {ours}"));
    }
    lab.node.netns().ip(&lines)
}

fn only(said: &Said, words: &[&str]) -> Result<()> {
    said.expect(&["foreign-route"])?;
    said.expect_words(words)?;
    let findings = said.report["findings"].as_array().map_or(0, Vec::len);
    ensure!(findings == 1, "{:#}", said.report);
    Ok(())
}

/// Each is found, and what the doctor says mends it.
#[rstest]
fn a_route_before_the_agents_is_found_and_mended(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    be_an_agent(&lab)?;
    let _pod = lab.pod("a")?;
    ask(&lab)?.expect(&[])?;
    let (range, via, uplink) = (range(family), family.gateway(), Node::UPLINK);
    let (part, one, second, default) = match family {
        V4 => ("10.244.2.128/25", "10.244.2.7", "192.0.2.77", 0),
        V6 => ("fd00:244:2::/96", "fd00:244:2::7", "2001:db8:1::77", 1024),
    };
    let by = format!("via {via} dev {uplink}");
    for (route, number, words) in [
        // As a daemon has it, and by hand: with the metric that the kernel gives.
        (
            format!("{range} {by} proto bird"),
            "12 (bird)",
            format!("{range} {by} metric {default} before"),
        ),
        (
            format!("{range} {by}"),
            "3 (boot)",
            format!("{range} {by} metric {default} before"),
        ),
        (
            format!("{range} {by} proto 99 metric 1999"),
            "protocol 99",
            format!("{range} {by} metric 1999 before"),
        ),
        // A part of it, whatever the metric.
        (
            format!("{part} {by} proto static metric 5000"),
            "4 (static)",
            format!("{part} {by} metric 5000 before"),
        ),
        (
            format!("{one} dev {uplink} proto zebra"),
            "11 (zebra)",
            format!(
                "{one}/{} dev {uplink} metric {default} before",
                family.host_bits()
            ),
        ),
        // To nowhere, and by two ways.
        (
            format!("blackhole {range} proto bird"),
            "12 (bird)",
            format!("blackhole {range} metric {default} before"),
        ),
        (
            format!("{part} proto bird nexthop {by} nexthop via {second} dev {uplink}"),
            "12 (bird)",
            format!("{part} {by} via {second} dev {uplink} metric {default} before"),
        ),
    ] {
        let node = lab.node.netns();
        node.ip(&[format!("route add {route}")])?;
        let said = ask(&lab)?;
        let ours = format!("before {range} {by} metric 2000");
        only(&said, &[number, &words, &ours]).with_context(|| route.clone())?;
        let commands = said.first("fix").split(';').next().unwrap_or_default();
        node.expect(Command::new("sh").args(["-ec", commands]), &[])
            .with_context(|| commands.to_owned())?;
        ask(&lab)?
            .expect(&[])
            .with_context(|| commands.to_owned())?;
        let flag = if family == V4 { "-4" } else { "-6" };
        let left = node.ip_json(&[flag, "route", "show", range, "proto", "117"])?;
        ensure!(left[0]["dst"] == range, "ours is gone: {left}");
    }
    Ok(())
}

#[rstest]
fn a_route_that_is_not_before_the_agents_is_no_finding(
    #[values(V4, V6)] family: Family,
) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let pod = lab.pod("a")?;
    let node = lab.node.netns();
    let (range, via, uplink) = (range(family), family.gateway(), Node::UPLINK);
    let by = format!("via {via} dev {uplink}");
    let (wide, own, left) = match family {
        V4 => ("10.244.0.0/16", "10.244.1.0/25", "10.244.2.9"),
        V6 => ("fd00:244::/48", "fd00:244:1::/96", "fd00:244:2::9"),
    };
    // Where there is no agent, nobody's routes are before its own.
    let same = format!("{range} {by} proto bird");
    node.ip(&[format!("route add {same}")])?;
    ask(&lab)?.expect(&[])?;
    node.ip(&[format!("route del {same}")])?;
    be_an_agent(&lab)?;
    let pods = pod.host_veth();
    node.ip(&[
        format!("route add {range} {by} proto bird metric 3000"),
        format!("route add {wide} {by} proto bird"),
        // In this node's own range, and to a pod of before in another node's.
        format!("route add {own} {by} proto bird"),
        format!("route add {left} dev {pods}"),
        format!("route add {range} {by} proto bird table 100"),
    ])?;
    ask(&lab)?.expect(&[])
}

/// One that is locked is told to the programs, and IPv4's where the node forwards by path MTUs.
#[rstest]
fn an_mtu_that_is_not_locked_is_found_and_mended(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let _pod = lab.pod("a")?;
    let node = lab.node.netns();
    let by = format!("via {} dev {}", family.gateway(), Node::UPLINK);
    let (all, part) = (family.everywhere(), range(family));
    let change = |lock: &str| {
        node.ip(&[
            format!("route replace {all} {by} mtu {lock} 1400"),
            format!("route replace {part} {by} mtu {lock} 1300"),
        ])
    };
    node.ip(&[format!("route add {part} {by} mtu 1500")])?;
    ask(&lab)?.expect(&[])?;
    change("lock")?;
    ask(&lab)?.expect(&[])?;
    change("")?;
    let said = ask(&lab)?;
    said.expect(&["route-mtu"])?;
    said.expect_words(&[Node::UPLINK, part, "1400", "1300", "mtu lock"])?;
    if family == V6 {
        change("lock")?;
    } else {
        let command = said.first("fix").split(';').next().unwrap_or_default();
        node.expect(Command::new("sh").args(["-ec", command]), &[])?;
    }
    ask(&lab)?.expect(&[])
}

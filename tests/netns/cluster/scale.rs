//! A cluster of a thousand nodes, of which one is there: what its kernel has, and what its agent takes for it.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use underpass_tests::prelude::*;

use super::{
    fixture::Cluster,
    member::{Member, nodad},
};

/// So many Nodes, ours included.
const NODES: u16 = 1000;
/// How much memory the agent may have had at once, in KiB.
const MEMORY: u64 = 30 * 1024;
/// How long the idle agent is watched: it compares a few times meanwhile.
const IDLE: Duration = Duration::from_secs(10);
/// How often it does, in seconds.
const RESYNC: &str = "3";
/// The uplink's prefixes: every second node is in them.
const OURS: [&str; 2] = ["198.18.0.1/16", "2001:db8:a::1/64"];

/// A Node that no machine is behind.
#[derive(Clone, Copy)]
struct Other {
    number: u16,
    /// What its address follows from: another one when it has moved.
    place: u16,
}

impl Other {
    fn new(number: u16) -> Self {
        Self {
            number,
            place: number,
        }
    }

    fn name(self) -> String {
        format!("other{}", self.number)
    }

    fn is_on_link(self) -> bool {
        self.place.is_multiple_of(2)
    }

    fn address(self, family: Family) -> IpAddr {
        let [high, low] = self.place.to_be_bytes();
        let (v4, v6) = if self.is_on_link() {
            (18, 0xa)
        } else {
            (19, 0xb)
        };
        match family {
            V4 => Ipv4Addr::new(198, v4, 10 + high, low).into(),
            V6 => Ipv6Addr::new(0x2001, 0xdb8, v6, 0, 0, 0, 1, self.place).into(),
        }
    }

    /// The first address of its pods' range, and the range.
    fn range(self, family: Family) -> (String, String) {
        let [high, low] = self.number.to_be_bytes();
        let (first, length) = match family {
            V4 => (format!("10.{}.{low}.0", 128 + high), 24),
            V6 => (format!("fd00:128:{:x}::", self.number), 64),
        };
        let range = format!("{first}/{length}");
        (first, range)
    }

    /// Its route, as [`Member::routes`] says it.
    fn route(self, family: Family) -> String {
        let (first, range) = self.range(family);
        if self.is_on_link() {
            format!("{range} via {} dev {}", self.address(family), Node::UPLINK)
        } else {
            format!("{range} via {first} dev underpass-vxlan")
        }
    }

    /// A Node as large as one of a cluster in use: most of it is nothing to the agent.
    fn node(self) -> Value {
        let addresses = Family::BOTH
            .map(|family| json!({"type": "InternalIP", "address": self.address(family)}));
        let images: Vec<Value> = (0..50)
            .map(|image| {
                let name = format!("registry.example/team/service-{image}");
                let digest = format!("{image:064x}");
                json!({"names": [format!("{name}@sha256:{digest}"), format!("{name}:1.{image}.0")], "sizeBytes": 1_000_000 + image})
            })
            .collect();
        let ranges = Family::BOTH.map(|family| self.range(family).1);
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {
                "name": self.name(), "uid": self.name(), "creationTimestamp": "2026-01-01T00:00:00Z",
                "labels": {"kubernetes.io/hostname": self.name(), "kubernetes.io/os": "linux"},
                "managedFields": [{"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:status": {"f:images": {}}}}],
            },
            "spec": {"podCIDR": ranges[0], "podCIDRs": ranges},
            "status": {"addresses": addresses, "images": images},
        })
    }
}

/// Waits until the kernel has exactly what these Nodes make necessary.
fn settle(member: &Member, others: &[Other]) -> Result<()> {
    let own = Family::BOTH.map(|family| format!("{} unreachable", member.range(family)));
    let routes = Family::BOTH.map(|family| others.iter().map(move |other| other.route(family)));
    let routes: BTreeSet<String> = routes.into_iter().flatten().chain(own).collect();
    let behind = || others.iter().filter(|other| !other.is_on_link());
    let neighbours: BTreeSet<String> = Family::BOTH
        .iter()
        .flat_map(|family| behind().map(|other| other.range(*family).0))
        .collect();
    let outsides: BTreeSet<String> = behind()
        .map(|other| other.address(V4).to_string())
        .collect();
    eventually("routes, neighbours and forwarding entries", || {
        expect_same("routes", &member.routes()?, &routes)?;
        let device = ["show", "dev", "underpass-vxlan"];
        let netns = member.node.netns();
        let list = netns.ip_json(&[&["neighbour"], &device[..], &["nud", "permanent"]].concat())?;
        expect_same("neighbours", &every("dst", &list)?, &neighbours)?;
        let mut command = Command::new("bridge");
        command.args(["-json", "fdb"]).args(device);
        let list = serde_json::from_str(&netns.expect(&mut command, &[])?)?;
        expect_same("forwarding entries", &every("dst", &list)?, &outsides)
    })
}

fn expect_same(what: &str, found: &BTreeSet<String>, wanted: &BTreeSet<String>) -> Result<()> {
    let some = |one: &BTreeSet<String>, other: &BTreeSet<String>| {
        one.difference(other)
            .take(3)
            .cloned()
            .collect::<Vec<String>>()
    };
    ensure!(
        found == wanted,
        "{} {what} instead of {}: too many as {:?}, missing as {:?}",
        found.len(),
        wanted.len(),
        some(found, wanted),
        some(wanted, found)
    );
    Ok(())
}

/// The values of a key in a list of objects, each once.
fn every(key: &str, list: &Value) -> Result<BTreeSet<String>> {
    let list = list.as_array().context("a list")?;
    let values: Vec<&str> = list
        .iter()
        .filter_map(|entry| entry[key].as_str())
        .collect();
    let set: BTreeSet<String> = values.iter().map(ToString::to_string).collect();
    ensure!(set.len() == values.len(), "some {key} is there twice");
    Ok(set)
}

/// What is printed of time is for people: `docs/kubernetes.md` says what it was somewhere.
#[test]
fn a_thousand_nodes() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let member = &cluster.members[0];
    let mut lines = vec![format!("address flush dev {} scope global", Node::UPLINK)];
    for (family, net) in Family::BOTH.into_iter().zip(OURS) {
        let nodad = nodad(family);
        lines.push(format!("address add {net} dev {} {nodad}", Node::UPLINK));
    }
    member.node.netns().ip(&lines)?;
    let own = OURS.map(|net| net.split('/').next().unwrap_or("").to_owned());
    cluster.api.set(&member.name, &own, &member.ranges());
    let mut others: Vec<Other> = (2..=NODES).map(Other::new).collect();
    for other in &others {
        cluster.api.put(&other.name(), other.node());
    }
    let member = &mut cluster.members[0];
    member.start_agent_with(&["--resync", RESYNC])?;
    let member = &cluster.members[0];
    settle(member, &others)?;
    member.is_ready()?;

    // Half of ten moves from one side of the router to the other, and half is deleted.
    for gone in others.split_off(others.len() - 5) {
        cluster.api.delete(&gone.name());
    }
    for other in others.iter_mut().step_by(100).take(5) {
        other.place += 2001;
        cluster.api.put(&other.name(), other.node());
    }
    settle(member, &others)?;
    let said = member.get("/metrics")?;
    let seconds = said
        .lines()
        .filter(|line| line.contains("_sync_seconds ") && !line.starts_with('#'));
    seconds.for_each(|line| eprintln!("{line}"));
    let peak = member.running()?.peak_memory()?;
    eprintln!("memory of the agent: at most {peak} KiB at once");

    let compared = member.metric("syncs_total")?;
    let (since, before) = (Instant::now(), member.running()?.ticks()?);
    sleep(IDLE);
    // Where all takes longer so does the time between.
    let mut comparisons = 0;
    eventually("a comparison that nothing has caused", || {
        comparisons = member.metric("syncs_total")? - compared;
        ensure!(comparisons > 0);
        Ok(())
    })?;
    let idle = member.running()?.ticks()? - before;
    eprintln!(
        "processor time of the agent in {:?} of idleness, with {comparisons} comparisons: {} ms",
        since.elapsed(),
        idle * 10
    );
    ensure!(peak < MEMORY, "the agent had {peak} KiB at once");
    Ok(())
}

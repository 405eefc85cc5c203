//! Another network comes before the agent's in the folder, and runtimes take that: there is a network, and no pod gets to it.

use std::fs;

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::prelude::*;

use super::{
    fixture::Cluster,
    member::{Member, NET},
};

/// What another plugin has left.
const OTHER: &str = "05-other.conflist";
/// Where Multus puts itself.
const MULTUS: &str = "00-multus.conf";

fn put(member: &Member, file: &str, document: &Value) -> Result<()> {
    member
        .node
        .netns()
        .run(|| {
            fs::create_dir_all(NET)?;
            fs::write(format!("{NET}/{file}"), document.to_string())
        })
        .with_context(|| format!("write {file}"))
}

fn put_other(member: &Member) -> Result<()> {
    let document =
        json!({ "cniVersion": "1.0.0", "name": "other", "plugins": [{ "type": "bridge" }] });
    put(member, OTHER, &document)
}

fn put_multus(member: &Member) -> Result<()> {
    let document = json!({ "cniVersion": "1.0.0", "name": "multus-cni-network", "type": "multus" });
    put(member, MULTUS, &document)
}

fn remove(member: &Member, file: &str) -> Result<()> {
    Ok(member
        .node
        .netns()
        .run(|| fs::remove_file(format!("{NET}/{file}")))?)
}

/// Waits until `/readyz` says that runtimes take the other network, and what to do.
fn is_hidden(member: &Member) -> Result<()> {
    eventually("no pod gets to the network", || {
        let said = member.get("/readyz")?;
        ensure!(
            said.starts_with("HTTP/1.1 503 ")
                && said.contains("no pod gets to it")
                && said.contains(&format!("mv {NET}/{OTHER}")),
            "{said}"
        );
        Ok(())
    })
}

/// Waits until `/readyz` says that all is well, and nothing else.
fn is_well(member: &Member) -> Result<()> {
    eventually("all is well", || {
        let said = member.get("/readyz")?;
        ensure!(
            said.starts_with("HTTP/1.1 200 ") && said.ends_with("\r\n\r\nok\n"),
            "{said}"
        );
        Ok(())
    })
}

/// Whoever removes the file has the network, whether it was there before the other one or not.
#[rstest]
fn a_network_behind_anothers_is_none(#[values(true, false)] before: bool) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    if before {
        put_other(&cluster.members[0])?;
    }
    cluster.start_agents()?;
    let member = &cluster.members[0];
    if !before {
        is_well(member)?;
        put_other(member)?;
    }
    is_hidden(member)?;
    ensure!(member.conflist()?.is_some(), "it is not installed");
    member.compares()?;
    is_hidden(member)?;
    let log = member.log()?;
    let said = log.matches("install: hidden by").count();
    ensure!(said == 1, "it is said {said} times: {log}");
    remove(member, OTHER)?;
    is_well(member)?;
    member.pod("a")?.del()
}

/// Multus has our network attach pods.
#[test]
fn a_network_behind_multus_is_one() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    put_multus(&cluster.members[0])?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    is_well(member)?;
    // What comes behind Multus is as if it were not there: that alone is taken.
    put_other(member)?;
    member.compares()?;
    is_well(member)
}

/// A Node whose pods would be given to another network is not said to have one. What was said before is not taken back, and not said again.
#[test]
fn a_network_that_no_pod_gets_to_is_not_announced() -> Result<()> {
    const OPTIONS: [&str; 3] = ["--resync", "2", "--node-condition"];
    const WRITE: &str = "patch status";
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let member = &mut cluster.members[0];
    // As a cloud's controller writes it, again and again.
    let unavailable = |member: &Member| {
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": member.name, "uid": "a" },
            "spec": { "podCIDRs": member.ranges() },
            "status": {
                "addresses": [{ "type": "InternalIP", "address": member.address(V4).to_string() }],
                "conditions": [{ "type": "NetworkUnavailable", "status": "True" }],
            },
        })
    };
    cluster.api.put(&member.name, unavailable(member));
    put_other(member)?;
    member.start_agent_with(&OPTIONS)?;
    let member = &cluster.members[0];
    is_hidden(member)?;
    member.compares()?;
    ensure!(cluster.api.count(WRITE) == 0, "it is announced");
    remove(member, OTHER)?;
    is_well(member)?;
    eventually("it is announced", || {
        ensure!(cluster.api.count(WRITE) == 1);
        Ok(())
    })?;

    put_other(member)?;
    is_hidden(member)?;
    cluster.api.put(&member.name, unavailable(member));
    member.compares()?;
    ensure!(cluster.api.count(WRITE) == 1, "it is announced again");
    remove(member, OTHER)?;
    eventually("it is announced again", || {
        ensure!(cluster.api.count(WRITE) == 2);
        Ok(())
    })
}

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
/// The network that another plugin has left.
const BRIDGE: &str =
    r#"{ "cniVersion": "1.0.0", "name": "other", "plugins": [{ "type": "bridge" }] }"#;

fn put(member: &Member, file: &str, text: &str) -> Result<()> {
    member
        .node
        .netns()
        .run(|| {
            fs::create_dir_all(NET)?;
            fs::write(format!("{NET}/{file}"), text)
        })
        .with_context(|| format!("write {file}"))
}

fn put_other(member: &Member) -> Result<()> {
    put(member, OTHER, BRIDGE)
}

/// Puts the network of Multus, with these keys beside its own.
fn put_multus(member: &Member, keys: &Value) -> Result<()> {
    let mut document = keys.clone();
    document["cniVersion"] = json!("1.0.0");
    document["name"] = json!("multus-cni-network");
    document["type"] = json!("multus");
    put(member, MULTUS, &document.to_string())
}

fn remove(member: &Member, file: &str) -> Result<()> {
    Ok(member
        .node
        .netns()
        .run(|| fs::remove_file(format!("{NET}/{file}")))?)
}

/// Waits until `/readyz` says that runtimes take the other network, and what to do.
fn is_hidden(member: &Member) -> Result<()> {
    is_hidden_by(member, &[&format!("mv {NET}/{OTHER}")])
}

/// Waits until `/readyz` says that no pod gets to the network, in words that have all these in them.
fn is_hidden_by(member: &Member, words: &[&str]) -> Result<()> {
    eventually("no pod gets to the network", || {
        let said = member.get("/readyz")?;
        ensure!(
            said.starts_with("HTTP/1.1 503 ")
                && said.contains("no pod gets to it: hidden by ")
                && words.iter().all(|word| said.contains(word)),
            "{words:?}: {said}"
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

/// Multus has our network attach pods, or another one: which it is can't be known here where its config does not say so.
#[test]
fn a_network_behind_multus_is_one() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    put_multus(&cluster.members[0], &json!({}))?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    is_well(member)?;
    put_other(member)?;
    member.compares()?;
    is_well(member)?;
    member.pod("a")?.del()
}

/// What Multus' config names it takes, whatever comes first in the folder: by a path as its daemon's container has it, by a name, or as a whole
/// network.
#[rstest]
#[case::our_file(&json!({ "clusterNetwork": format!("/host{NET}/10-underpass.conflist") }), true)]
#[case::a_name_of_the_api(&json!({ "clusterNetwork": "other" }), true)]
#[case::its_daemon_knows(&json!({}), true)]
#[case::ours_as_a_whole(&json!({ "delegates": [{ "name": "pods", "plugins": [{ "type": "underpass" }] }] }), true)]
#[case::another_file(&json!({ "clusterNetwork": format!("/host{NET}/20-other.conflist") }), false)]
#[case::another_as_a_whole(&json!({ "delegates": [{ "name": "other", "type": "bridge" }, { "name": "pods", "type": "underpass" }] }), false)]
fn multus_has_a_network_of_its_choice(#[case] keys: &Value, #[case] is_ours: bool) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let member = &cluster.members[0];
    put_multus(member, keys)?;
    let other = if is_ours { OTHER } else { "20-other.conflist" };
    put(member, other, BRIDGE)?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    if is_ours {
        is_well(member)?;
        member.compares()?;
        return is_well(member);
    }
    let key = keys.as_object().and_then(|keys| keys.keys().next());
    let key = key.context("a key")?.as_str();
    is_hidden_by(member, &[&format!("{NET}/{MULTUS}"), "other", key])?;
    remove(member, MULTUS)?;
    is_well(member)
}

/// Who serves host ports behind another plugin attaches nothing; who is called by another one does.
#[rstest]
#[case::in_a_chain(&json!([{ "type": "bridge" }, { "type": "underpass", "capabilities": { "portMappings": true } }]), true)]
#[case::as_a_delegate(&json!([{ "type": "flannel", "delegate": { "type": "underpass" } }, { "type": "portmap" }]), false)]
fn a_network_that_calls_our_plugin(#[case] plugins: &Value, #[case] hides: bool) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    let list = json!({ "cniVersion": "1.0.0", "name": "other", "plugins": plugins });
    put(&cluster.members[0], OTHER, &list.to_string())?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    if !hides {
        return is_well(member);
    }
    is_hidden(member)?;
    remove(member, OTHER)?;
    is_well(member)
}

/// containerd has no network where it comes to such a file first, as a power failure leaves one, or a plugin of which one half is gone.
#[rstest]
#[case::nothing("", "it is no JSON")]
#[case::half(r#"{ "name": "other", "plugins": ["#, "it is no JSON")]
#[case::no_plugin(r#"{ "name": "other", "plugins": [] }"#, "it has no plugin")]
fn a_network_behind_a_broken_file_is_none(#[case] text: &str, #[case] why: &str) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::idle(&[0])?;
    cluster.start_agents()?;
    let member = &cluster.members[0];
    is_well(member)?;
    let path = format!("{NET}/{OTHER}");
    put(member, OTHER, text)?;
    is_hidden_by(member, &["containerd stops at it", &path, why])?;
    remove(member, OTHER)?;
    is_well(member)?;
    // Behind ours nobody comes to it.
    put(member, "20-broken.conflist", "{")?;
    member.compares()?;
    ensure!(
        member.get("/readyz")?.starts_with("HTTP/1.1 200 "),
        "it is hidden"
    );
    Ok(())
}

/// A Node whose pods would be given to another network, or to none, is not said to have one. What was said before is not taken back, and not said again.
#[rstest]
#[case::behind_another(BRIDGE, "mv ")]
#[case::behind_a_broken_file("{", "containerd stops at it")]
fn a_network_that_no_pod_gets_to_is_not_announced(
    #[case] first: &str,
    #[case] word: &str,
) -> Result<()> {
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
    put(member, OTHER, first)?;
    member.start_agent_with(&OPTIONS)?;
    let member = &cluster.members[0];
    is_hidden_by(member, &[OTHER, word])?;
    member.compares()?;
    ensure!(cluster.api.count(WRITE) == 0, "it is announced");
    remove(member, OTHER)?;
    is_well(member)?;
    eventually("it is announced", || {
        ensure!(cluster.api.count(WRITE) == 1);
        Ok(())
    })?;

    put(member, OTHER, first)?;
    is_hidden_by(member, &[OTHER, word])?;
    cluster.api.put(&member.name, unavailable(member));
    member.compares()?;
    ensure!(cluster.api.count(WRITE) == 1, "it is announced again");
    remove(member, OTHER)?;
    eventually("it is announced again", || {
        ensure!(cluster.api.count(WRITE) == 2);
        Ok(())
    })
}

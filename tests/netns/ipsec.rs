//! Beside policies of IPsec, which a program can't ask: nothing takes the bypass where there are any.

use std::process::Command;

use rstest::rstest;
use serde_json::Value;
use underpass_tests::{
    node::plugin,
    prelude::*,
    privilege::{Capability::NetAdmin, without},
};

const PORT: u16 = 443;
const SOURCE: u16 = 45_678;

/// Whether this kernel has such policies; that is printed.
fn is_missing(lab: &Lab) -> Result<bool> {
    let mut list = Command::new("ip");
    let output = lab
        .node
        .netns()
        .output(list.args(["xfrm", "policy", "list"]), &[])?;
    if !output.status.success() {
        anstream::eprintln!("not on this kernel: {list:?}");
    }
    Ok(!output.status.success())
}

/// A policy that comes while a flow takes the bypass is obeyed from the next ADD on, and one that goes is forgotten.
#[rstest]
fn a_policy_ends_the_bypass(
    #[values(V4, V6)] family: Family,
    #[values(true, false)] masquerade: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    if is_missing(&lab)? {
        return Ok(());
    }
    lab.world.route_pods()?;
    let conf = lab.conf().with("ipMasq", masquerade);
    let pod = lab.pod_with("a", &conf)?;
    let remote = family.remote_at(PORT);
    let _server = udp::Server::start(lab.world.netns(), remote)?;
    let mut client = udp::Client::open_at(pod.netns(), family, SOURCE)?;
    client.chat(remote, 10)?;
    let meter = Meter::start(&lab.node)?;
    client.chat(remote, 10)?;
    let counted = meter.read()?;
    ensure!(counted.bypassed() > 10, "{counted:?}");
    // The pod's own address: masquerade comes after all of the stack.
    let policy = format!("dir out src {} dst {}", pod.ip(family), remote.ip());
    let xfrm = |what: &str| lab.node.netns().ip(&[format!("xfrm policy {what}")]);
    xfrm(&format!("add {policy} action block"))?;
    let another = lab.pod("b")?;
    let meter = Meter::start(&lab.node)?;
    for _ in 0..3 {
        client.hears_nothing(remote)?;
    }
    meter.expect_no_bypass()?;
    xfrm(&format!("delete {policy}"))?;
    another.del()?;
    let _another = lab.pod("c")?;
    client.chat(remote, 10)?;
    let meter = Meter::start(&lab.node)?;
    client.chat(remote, 10)?;
    let counted = meter.read()?;
    ensure!(counted.bypassed() > 10, "{counted:?}");
    Ok(())
}

/// What a command that may not ask for policies says, and whether it succeeded.
fn blind(lab: &Lab, arguments: &[&str]) -> Result<(bool, String, String)> {
    let mut command = Command::new(plugin());
    let command = without(command.env_clear().args(arguments), &[NetAdmin]);
    let output = lab.node.netns().output(command, &[])?;
    let [out, err] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    Ok((output.status.success(), out, err))
}

/// Who may not know whether there are policies changes nothing, and does not say that there are any.
#[test]
fn who_may_not_ask_leaves_what_is_in_force() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    if is_missing(&lab)? {
        return Ok(());
    }
    lab.node.underpass(&["load"])?;
    let in_force = || -> Result<Value> {
        let said = lab.node.underpass(&["status", "--json"])?;
        let status: Value = serde_json::from_str(&said)?;
        Ok(status["networkStack"]["inForce"].clone())
    };
    ensure!(in_force()? == true);
    for arguments in [&["load"][..], &["apply", "--net-dir", "/run"]] {
        let (succeeded, _, said) = blind(&lab, arguments)?;
        ensure!(
            !succeeded && said.contains("cannot tell whether the node has policies of IPsec"),
            "{arguments:?}: {said}"
        );
        ensure!(in_force()? == true, "{arguments:?}");
    }
    let (_, said, _) = blind(&lab, &["doctor", "--json", "--net-dir", "/run"])?;
    let report: Value = serde_json::from_str(&said).with_context(|| said.clone())?;
    ensure!(!said.contains("xfrm policy flush"), "{report:#}");
    let not_checked = report["notChecked"].as_array().into_iter().flatten();
    let mut ids = not_checked.filter_map(|entry| entry["id"].as_str());
    ensure!(ids.any(|id| id == "ipsec-policies"), "{report:#}");
    let (succeeded, said, _) = blind(&lab, &["status", "--json"])?;
    let status: Value = serde_json::from_str(&said)?;
    ensure!(
        succeeded && status["networkStack"]["ipsecPolicies"].is_null(),
        "{status:#}"
    );
    Ok(())
}

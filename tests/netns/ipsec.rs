//! Beside policies of IPsec, which a program can't ask: nothing takes the bypass where there are any.

use std::{net::SocketAddr, process::Command};

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

/// A policy by which nothing may be sent from a pod to an address.
struct Policy<'a> {
    lab: &'a Lab,
    /// The pod's own address: masquerade comes after all of the stack.
    selector: String,
}

impl<'a> Policy<'a> {
    fn between(lab: &'a Lab, pod: &Pod, remote: SocketAddr) -> Self {
        let own = pod.ip(Family::of(remote.ip()));
        let selector = format!("dir out src {own} dst {}", remote.ip());
        Self { lab, selector }
    }

    fn come(&self) -> Result<()> {
        self.xfrm("add", "action block")
    }

    fn go(&self) -> Result<()> {
        self.xfrm("delete", "")
    }

    fn xfrm(&self, verb: &str, rest: &str) -> Result<()> {
        let line = format!("xfrm policy {verb} {} {rest}", self.selector);
        self.lab.node.netns().ip(&[line])
    }
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
    let policy = Policy::between(&lab, &pod, remote);
    policy.come()?;
    let another = lab.pod("b")?;
    let meter = Meter::start(&lab.node)?;
    for _ in 0..3 {
        client.hears_nothing(remote)?;
    }
    meter.expect_no_bypass()?;
    policy.go()?;
    another.del()?;
    let _another = lab.pod("c")?;
    client.chat(remote, 10)?;
    let meter = Meter::start(&lab.node)?;
    client.chat(remote, 10)?;
    let counted = meter.read()?;
    ensure!(counted.bypassed() > 10, "{counted:?}");
    Ok(())
}

/// None begins, and one that has begun does not go on: where connection tracking is liberal it is the policy alone that stops it.
#[rstest]
fn a_policy_ends_connections(
    #[values(V4, V6)] family: Family,
    #[values(true, false)] masquerade: bool,
    #[values(true, false)] liberal: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    if is_missing(&lab)? {
        return Ok(());
    }
    lab.world.route_pods()?;
    lab.firewall.set_liberal(liberal)?;
    // A strict one does not know the connection again.
    lab.firewall.tolerate_invalid();
    let conf = lab.conf().with("ipMasq", masquerade);
    let pod = lab.pod_with("a", &conf)?;
    let remote = family.remote_at(PORT);
    let _server = tcp::Server::start(lab.world.netns(), remote)?;
    let takes_bypass = || -> Result<tcp::Client> {
        let meter = Meter::start(&lab.node)?;
        let mut client = tcp::Client::connect(pod.netns(), remote)?;
        client.chat(10)?;
        let counted = meter.read()?;
        ensure!(counted.bypassed() > 10, "{counted:?}");
        Ok(client)
    };
    let mut begun = takes_bypass()?;
    let policy = Policy::between(&lab, &pod, remote);
    policy.come()?;
    let another = lab.pod("b")?;
    let meter = Meter::start(&lab.node)?;
    tcp::refuses(pod.netns(), remote)?;
    ensure!(begun.chat(1).is_err(), "what had begun goes on");
    meter.expect_no_bypass()?;
    // To others a connection begins all the same, by the stack.
    let elsewhere = SocketAddr::new(family.other_remote(), PORT);
    let _other = tcp::Server::start(lab.world.netns(), elsewhere)?;
    tcp::visit(pod.netns(), elsewhere)?;
    meter.expect_no_bypass()?;
    policy.go()?;
    another.del()?;
    let _another = lab.pod("c")?;
    takes_bypass().map(drop)
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

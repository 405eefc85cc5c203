//! Beside policies of IPsec, which a program can't ask: nothing takes the bypass where there are any.

use std::process::Command;

use rstest::rstest;
use underpass_tests::prelude::*;

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

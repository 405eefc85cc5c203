//! `ipam.type` names a plugin that is ours and gives no addresses: each call would start the next, for ever.

use rstest::rstest;
use serde_json::json;
use underpass_tests::{leak::Traces, prelude::*};

use super::Witness;

#[rstest]
fn no_interface_plugin_is_asked_for_addresses(
    #[values(
        "underpass",
        "underpass-0.2",
        "ptp",
        "portmap",
        "bandwidth",
        "loopback"
    )]
    name: &str,
) -> Result<()> {
    needs_root!();
    let (lab, before, witness) = Witness::beside()?;
    witness.answers_to(name)?;
    let netns = lab.node.netns().sibling("a")?;
    let conf = lab.conf().with("ipam", json!({ "type": name }));
    // The config was another one when the container came.
    let pod = lab.pod("b")?;
    let remembered = conf.clone().with("prevResult", pod.result().clone());
    let gc = conf.clone().with("cni.dev/valid-attachments", json!([]));
    for call in [
        witness.call("ADD", &netns, &conf),
        witness.call("CHECK", pod.netns(), &remembered),
        witness.call("STATUS", &netns, &conf),
    ] {
        let error = call.run(&lab.node)?.error()?;
        ensure!(error.code == 7, "{error}");
        let said = format!("ipam.type \"{name}\"");
        ensure!(error.msg.contains(&said), "{error}");
    }
    // What else there is goes all the same.
    witness
        .call("DEL", pod.netns(), &conf)
        .run(&lab.node)?
        .silence()?;
    let leases = Traces::of(&lab.node)?.leases;
    pod.del()?;
    ensure!(!leases.is_empty(), "who gave them frees them");
    before.expect_same(&lab.node)?;
    let pod = lab.pod("c")?;
    witness.call("GC", &netns, &gc).run(&lab.node)?.silence()?;
    pod.del()?;
    before.expect_same(&lab.node)?;
    ensure!(witness.calls()?.is_empty(), "it was started");
    Ok(())
}

/// One that the allocator's own executable has is an IPAM plugin like any other.
#[test]
fn a_longer_name_of_the_allocator_is_asked() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let witness = Witness::new()?;
    let name = "underpass-ipam-0.2";
    witness.answers_to(name)?;
    let netns = lab.node.netns().sibling("a")?;
    let conf = lab.conf().with("ipam", json!({ "type": name }));
    witness
        .call("ADD", &netns, &conf)
        .run(&lab.node)?
        .result()?;
    witness
        .call("DEL", &netns, &conf)
        .run(&lab.node)?
        .silence()?;
    ensure!(witness.calls()? == ["ADD a eth0", "DEL a eth0"]);
    Ok(())
}

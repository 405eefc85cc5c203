//! `ipam.type` is `dhcp`. It needs a broadcast domain and an interface that exists; a routed interface has neither when addresses are asked for.

use rstest::rstest;
use serde_json::json;
use underpass_tests::{prelude::*, runtime::CniError};

use super::Witness;

#[rstest]
fn it_is_refused_with_the_reason_and_keeps_nobody_from_cleaning_up(
    #[values("0.4.0", "1.0.0", "1.1.0")] version: &str,
) -> Result<()> {
    needs_root!();
    let (lab, before, witness) = Witness::beside()?;
    witness.answers_to("dhcp")?;
    // As Debian's, where no daemon runs.
    for verb in ["ADD", "CHECK", "DEL", "GC", "STATUS"] {
        witness.fails(verb, 999, "error dialing DHCP daemon")?;
    }
    let netns = lab.node.netns().sibling("a")?;
    let conf = lab
        .conf()
        .with("ipam", json!({ "type": "dhcp" }))
        .with("cniVersion", version);
    let refuses = |error: CniError| {
        ensure!(
            error.code == 2
                && error.msg.contains("\"ipam.type\", value dhcp")
                && error.details.contains("no broadcast domain"),
            "{error}"
        );
        Ok(())
    };
    refuses(witness.call("ADD", &netns, &conf).run(&lab.node)?.error()?)?;
    before.expect_same(&lab.node)?;
    // A runtime keeps a sandbox for as long as the DEL fails, though nothing was ever attached.
    witness
        .call("DEL", &netns, &conf)
        .run(&lab.node)?
        .silence()?;
    // The config was another one when the container came.
    let pod = lab.pod_with("b", &lab.conf().with("cniVersion", version))?;
    let remembered = conf.clone().with("prevResult", pod.result().clone());
    refuses(
        witness
            .call("CHECK", pod.netns(), &remembered)
            .run(&lab.node)?
            .error()?,
    )?;
    witness
        .call("DEL", pod.netns(), &conf)
        .run(&lab.node)?
        .silence()?;
    pod.del()?;
    before.expect_same(&lab.node)?;
    if version == "1.1.0" {
        refuses(
            witness
                .call("STATUS", &netns, &conf)
                .run(&lab.node)?
                .error()?,
        )?;
        let gc = conf.with("cni.dev/valid-attachments", json!([]));
        witness.call("GC", &netns, &gc).run(&lab.node)?.silence()?;
    }
    ensure!(witness.calls()?.is_empty(), "it was started");
    Ok(())
}

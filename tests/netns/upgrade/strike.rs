//! Upgrades that are killed, and upgrades of which a step is refused.

use std::{fs, net::SocketAddr, process::Command};

use rstest::rstest;
use underpass_tests::{
    another_build,
    fault::{self, Fault, Strike},
    node::plugin,
    patience,
    prelude::*,
    traffic::serve,
};

use super::{INSIDE, PORT, upgrade, widen};

/// It is killed at each of its changes after the verifier's work, or one of them fails. Traffic goes on; the next call meets a whole
/// set of pins, and an upgrade can be made.
#[rstest]
fn a_strike(
    // Right before a change is right after the one before it.
    #[values(Fault::Refused, Fault::KilledAfter)] fault: Fault,
    #[values("ADD", "DEL", "upgrade", "unload")] next: &str,
) -> Result<()> {
    const NEXT: [&str; 4] = ["ADD", "DEL", "upgrade", "unload"];
    needs_root!();
    let lab = Lab::unloaded()?;
    let node = &lab.node;
    let builds = [another_build::make(node)?, plugin().to_owned()];
    let witness = lab.pod_with("witness", &lab.conf().with_host_port(PORT, INSIDE))?;
    let _servers = Family::BOTH
        .map(|family| serve(witness.netns(), witness.at(family, INSIDE)))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    let command = |build: usize| {
        let mut command = Command::new(&builds[build]);
        command.env_clear().arg("upgrade");
        command
    };
    let traced = fault::trace(&mut command(0), node)?;
    let complete = traced
        .changes
        .iter()
        .position(|change| change.what.starts_with("rename") && change.what.contains("next-"))
        .context("an upgrade completes a folder of pins")?;
    // The build that is not loaded.
    let mut other = 1;
    // Each of them has another call after it. On slow machines some are left out.
    let stride = usize::try_from(patience::factor())?;
    let turn = NEXT
        .iter()
        .position(|name| *name == next)
        .unwrap_or_default();
    let from = complete.saturating_sub(2);
    for index in (from..traced.changes.len())
        .skip(turn)
        .step_by(NEXT.len() * stride)
    {
        let strike = Strike { index, fault };
        let about = || format!("{strike:?}: {}", traced.changes[index]);
        // What is copied is another case than what is shared; once it is copied, the next call must find it.
        let is_whole = index > complete && fault != Fault::Refused;
        if is_whole && index / NEXT.len() % 2 == 1 {
            widen(node).with_context(about)?;
        }
        fault::strike(&mut command(other), node, strike).with_context(about)?;
        let served = || {
            Family::BOTH.into_iter().try_for_each(|family| {
                let at = SocketAddr::new(family.node(), PORT);
                tcp::visit(lab.world.netns(), at)?;
                ping::ping(witness.netns(), family.remote()).map(drop)
            })
        };
        served().with_context(about)?;
        match next {
            "ADD" => {
                let pod = lab.pod(&format!("guest{index}")).with_context(about)?;
                ping::ping(pod.netns(), V4.remote())?;
                ping::ping(pod.netns(), V6.remote())?;
                pod.del()?;
            }
            "DEL" => {
                let pod = witness.also("net1", &lab.conf());
                pod.with_context(about)?.del()?;
            }
            "upgrade" => {}
            _ => {
                // What the witness still says afterwards belongs to nothing.
                lab.firewall.expect_no_invalid()?;
                node.underpass(&["unload", "--force"]).with_context(about)?;
                let left = node
                    .netns()
                    .run(|| fs::read_dir(node.bpf_root()).map_or(0, Iterator::count));
                ensure!(left == 0, "{left} folders are left: {strike:?}");
                lab.pod("fresh").with_context(about)?.del()?;
                // The witness is cut off, and nothing of the rest is true any more.
                return Ok(());
            }
        }
        // Whoever is loaded now, it can be exchanged for the other, and all is in its place.
        for build in &builds {
            upgrade(node, build).with_context(about)?;
        }
        other = 0;
        served().with_context(about)?;
        witness
            .call_with_result("CHECK")
            .run(node)?
            .silence()
            .with_context(about)?;
    }
    Ok(())
}

//! Two calls for one attachment at the same time.

use std::{sync::Barrier, thread};

use rstest::rstest;
use underpass_tests::{leak::Traces, prelude::*, runtime::Call};

/// One wins; the other says that it is attached already, and takes nothing away from the winner.
#[rstest]
fn two_adds(#[values("host-local", "none")] ipam: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    // What is loaded for host ports stays.
    lab.pod_with("first", &lab.conf().with_host_port(8080, 80))?
        .del()?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("a")?;
    let mut conf = lab.conf().with_host_port(8080, 80);
    if ipam == "none" {
        conf = lab.conf().with("ipam", serde_json::json!({}));
    }
    let path = netns.path().display().to_string();
    let call = |verb| Call::new(verb).attachment("a", &path, Pod::IFNAME);
    for round in 0..20 {
        let start = Barrier::new(2);
        let add = || {
            start.wait();
            call("ADD").conf(&conf).run(&lab.node)
        };
        let [one, other] = thread::scope(|scope| {
            [scope.spawn(add), scope.spawn(add)].map(|thread| thread.join().expect("no panic"))
        });
        let (one, other) = (one?, other?);
        let (winner, loser) = match (one.result(), other.result()) {
            (Ok(result), Err(_)) => (result, other),
            (Err(_), Ok(result)) => (result, one),
            (Ok(_), Ok(_)) => anyhow::bail!("round {round}: both were attached"),
            (Err(first), Err(second)) => anyhow::bail!("round {round}: {first:#}; {second:#}"),
        };
        let error = loser.error()?;
        ensure!(error.code == 101, "round {round}: {error}");
        // Whoever had the lease first, or the interface.
        ensure!(error.msg.contains("another ADD"), "round {round}: {error}");
        let remembered = conf.clone().with("prevResult", winner);
        call("CHECK").conf(&remembered).run(&lab.node)?.silence()?;
        call("DEL").conf(&conf).run(&lab.node)?.silence()?;
        before.expect_same(&lab.node)?;
    }
    Ok(())
}

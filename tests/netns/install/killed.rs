//! An install that is killed at any instant, and what a runtime finds then.

use std::time::Instant;

use rstest::rstest;
use underpass_tests::prelude::*;

use super::fixture::{BIN, Machine, NET};

/// So many instants of an install, and of the time right after it.
const INSTANTS: u32 = 50;

/// What was there before the install: nothing, or a network and executables of earlier.
#[rstest]
fn no_instant_has_a_network_that_does_not_work(#[values(false, true)] earlier: bool) -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    // The verifier would take nearly all of the time.
    machine.lab.node.underpass(&["load"])?;
    let start = Instant::now();
    machine.install(&Family::BOTH, &[])?;
    let lasts = start.elapsed() * 5 / 4;
    let mut killed = [0; 2];
    for instant in 0..INSTANTS {
        machine.clear()?;
        if earlier {
            machine.install(&[V4], &["--no-self-test"])?;
        }
        let after = lasts * instant / INSTANTS;
        let was_killed = machine.kill_install(after)?;
        let found = machine.expect_sound(&format!("{instant}"));
        let found = found.with_context(|| format!("killed after {after:?}"))?;
        killed[usize::from(found)] += u32::from(was_killed);
    }
    eprintln!("killed before there was a conflist, and after: {killed:?}");
    ensure!(killed[usize::from(earlier)] > 0, "{killed:?}");
    machine.install(&Family::BOTH, &[])?;
    ensure!(
        machine.leftovers()?.is_empty(),
        "{:?}",
        machine.leftovers()?
    );
    machine.pod("a")?.del()?;
    machine.run("uninstall", &[])?;
    ensure!(machine.names(BIN)?.is_empty() && machine.names(NET)?.is_empty());
    Ok(())
}

/// The pods of a self-test that was killed are nobody's containers.
#[test]
fn a_killed_self_test_keeps_nobody_from_uninstalling() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&Family::BOTH, &[])?;
    let _left = machine.pod("underpass-selftest-a")?;
    let said = machine.run("uninstall", &[])?;
    ensure!(!said.contains("leased"), "{said}");
    ensure!(machine.files()?.is_empty(), "{:?}", machine.files()?);
    Ok(())
}

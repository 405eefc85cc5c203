//! An install that is killed at any instant, and what a runtime finds then.

use std::{fs, time::Instant};

use rstest::rstest;
use underpass_tests::{node::plugin, prelude::*};

use super::fixture::{BIN, CONFLIST, Machine, NET};

/// So many instants of an install, and of the time right after it.
const INSTANTS: u32 = 50;

/// What was there before the install: nothing, or a network and executables of earlier.
#[rstest]
fn no_instant_has_a_network_that_does_not_work(#[values(false, true)] earlier: bool) -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    let whole = fs::read(plugin()).context("read the plugin")?;
    // The verifier would take nearly all of the time.
    machine.lab.node.underpass(&["load"])?;
    let start = Instant::now();
    machine.install(&Family::BOTH, &[])?;
    let lasts = start.elapsed() * 5 / 4;
    let mut killed = [0; 2];
    for instant in 0..INSTANTS {
        machine.lab.node.netns().run(|| -> Result<()> {
            for folder in [BIN, NET] {
                if fs::exists(folder)? {
                    fs::remove_dir_all(folder)?;
                }
            }
            Ok(())
        })?;
        if earlier {
            machine.install(&[V4], &["--no-self-test"])?;
        }
        let after = lasts * instant / INSTANTS;
        let was_killed = machine.kill_install(after)?;
        let file = machine.read(CONFLIST)?;
        killed[usize::from(file.is_some())] += u32::from(was_killed);
        if let Some(executable) = machine.read(&format!("{BIN}/underpass"))? {
            ensure!(executable == whole, "half an executable after {after:?}");
        }
        if let Some(file) = file {
            ensure!(!file.is_empty(), "an empty file after {after:?}");
            let pod = machine
                .pod(&format!("a{instant}"))
                .with_context(|| format!("after {after:?}"))?;
            pod.del()?;
        }
        for name in machine.leftovers()? {
            ensure!(name.ends_with(".tmp"), "{name} after {after:?}");
        }
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

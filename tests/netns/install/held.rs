//! Locks that somebody holds: one that anybody can take is in nobody's way, and the one that is waited for is named.

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    thread::{scope, sleep},
    time::Duration,
};

use rstest::rstest;
use underpass_tests::{patience, prelude::*};

use super::{
    fixture::{BIN, Machine, NET, ranges},
    meanwhile::await_waiter,
};

/// What an install or uninstall takes for as long as it runs.
pub(super) const TURN: &str = "/run/underpass/installation";

/// Everybody can open a folder of plugins or networks, and a container that has it read-only can; `flock(2)` asks for no more.
#[test]
fn whoever_holds_a_folder_is_in_nobodys_way() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.make_folders()?;
    let hold = |folder| -> Result<File> {
        let file = machine.lab.node.netns().run(|| File::open(folder))?;
        file.lock().with_context(|| format!("lock {folder}"))?;
        Ok(file)
    };
    let _held = [hold(BIN)?, hold(NET)?];
    // Who waits is killed, which is an error.
    machine.install(&Family::BOTH, &[])?;
    machine.pod("a")?.del()?;
    machine.run("uninstall", &[])?;
    ensure!(machine.files()?.is_empty(), "{:?}", machine.files()?);
    let turn = machine.lab.node.netns().run(|| fs::metadata(TURN))?;
    let mode = turn.permissions().mode() & 0o777;
    ensure!(mode == 0o600, "others can hold {TURN}: {mode:o}");
    Ok(())
}

#[rstest]
fn who_waits_says_for_which(
    #[values("install", "uninstall", "selftest")] verb: &str,
) -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&Family::BOTH, &[])?;
    let path = match verb {
        "selftest" => selftest_lock(&machine)?,
        _ => TURN.into(),
    };
    let more = match verb {
        "install" => ranges(&Family::BOTH),
        _ => Vec::new(),
    };
    let held = machine.lab.node.netns().run(|| File::open(&path))?;
    held.lock()?;
    let output = scope(|scope| {
        let mut command = Machine::command(verb, &more);
        let netns = machine.lab.node.netns();
        let waiting = scope.spawn(move || netns.output(&mut command, &[]));
        await_waiter(verb, &held)?;
        sleep(patience::here(Duration::from_millis(2500)));
        drop(held);
        waiting.join().ok().context("it panicked")?
    })?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{said}");
    let expected = format!("waiting for the lock {}, which", path.display());
    ensure!(said.contains(&expected), "{said}");
    Ok(())
}

/// The path of the lock of self-tests, of which the node has one.
fn selftest_lock(machine: &Machine) -> Result<PathBuf> {
    let folder = Path::new(TURN).parent().context("it has a folder")?;
    let names = machine.names(&folder.display().to_string())?;
    let found = names.iter().find(|name| name.ends_with(".selftest"));
    Ok(folder.join(found.context("no self-test has run")?))
}

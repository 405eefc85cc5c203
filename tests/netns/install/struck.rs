//! Every system call by which install and uninstall change something fails once, and is once the last that they make.

use std::process::Command;

use rstest::rstest;
use underpass_tests::{
    fault::{self, Fault, Strike},
    prelude::*,
};

use super::fixture::{BIN, CONFLIST, FILE, Machine, NET, ranges};

/// A self-test has processes of its own, whose faults are the plugin's.
fn install() -> Command {
    let more = [&ranges(&Family::BOTH)[..], &["--no-self-test"]].concat();
    Machine::command("install", &more)
}

/// A node whose programs are loaded, as the verifier takes longer than all the rest.
fn machine() -> Result<Machine> {
    let machine = Machine::new()?;
    machine.lab.node.underpass(&["load"])?;
    Ok(machine)
}

#[test]
fn each_file_waits_for_the_disk_and_the_conflist_is_the_last() -> Result<()> {
    needs_root!();
    let machine = machine()?;
    let traced = fault::trace(&mut install(), &machine.lab.node)?;
    ensure!(traced.reply.status.success(), "{traced:?}");
    let changes: Vec<&str> = traced
        .changes
        .iter()
        .map(|change| change.what.as_str())
        .collect();
    let mut renamed = Vec::new();
    for (at, change) in changes.iter().enumerate() {
        let Some((_, path)) = change
            .split_once('(')
            .filter(|(call, _)| call.starts_with("rename"))
        else {
            continue;
        };
        let path = path.trim_end_matches(')');
        let (folder, name) = path.rsplit_once('/').context("a path")?;
        let before = format!("fsync({folder}/.underpass-install.{name}.tmp)");
        ensure!(changes[at - 1] == before, "{changes:#?}");
        ensure!(
            changes[at + 1] == format!("fsync({folder})"),
            "{changes:#?}"
        );
        renamed.push(path);
    }
    let expected = [
        format!("{BIN}/underpass"),
        format!("{BIN}/underpass-ipam"),
        CONFLIST.to_owned(),
    ];
    ensure!(renamed == expected, "{renamed:?}");
    ensure!(
        changes.last() == Some(&format!("fsync({NET})").as_str()),
        "{changes:#?}"
    );
    Ok(())
}

/// Where an earlier network is, it goes on; where none is, there is none before all the rest is there.
#[rstest]
fn an_install(
    #[values(Fault::Refused, Fault::KilledAfter)] fault: Fault,
    #[values(false, true)] earlier: bool,
) -> Result<()> {
    needs_root!();
    let machine = machine()?;
    for index in 0.. {
        machine.clear()?;
        if earlier {
            machine.install(&[V4], &["--no-self-test"])?;
        }
        let strike = Strike { index, fault };
        let struck = fault::strike(&mut install(), &machine.lab.node, strike)?;
        let what = || format!("{strike:?} of {:?}", struck.struck);
        let found = machine
            .expect_sound(&format!("a{index}"))
            .with_context(what)?;
        ensure!(found || !earlier, "{} lost {FILE}", what());
        let Some(change) = struck.struck else {
            ensure!(index > 5, "it changes {index} things");
            return Ok(());
        };
        if fault == Fault::Refused && !struck.reply.status.success() {
            let said = String::from_utf8_lossy(&struck.reply.stderr).into_owned();
            ensure!(said.contains("error"), "{change}: {said:?}");
        }
        machine.install(&Family::BOTH, &["--no-self-test"])?;
        ensure!(machine.expect_sound(&format!("b{index}"))?);
        ensure!(
            machine.leftovers()?.is_empty(),
            "{change}: {:?}",
            machine.leftovers()?
        );
    }
    Ok(())
}

/// What was begun is ended by the next one.
#[rstest]
fn an_uninstall(#[values(Fault::Refused, Fault::KilledAfter)] fault: Fault) -> Result<()> {
    const SAVED: &str = "/run/saved";
    needs_root!();
    let machine = machine()?;
    machine.install(&Family::BOTH, &["--no-self-test"])?;
    machine.lab.node.underpass(&["unload"])?;
    let copy = |from: &str, to: &str| {
        let mut copy = Command::new("cp");
        machine
            .lab
            .node
            .netns()
            .expect(copy.args(["-a", from, to]), &[])
    };
    copy("/run/opt", SAVED)?;
    for index in 0.. {
        machine.clear()?;
        copy(&format!("{SAVED}/."), "/run/opt")?;
        let strike = Strike { index, fault };
        let mut command = Machine::command("uninstall", &[]);
        let struck = fault::strike(&mut command, &machine.lab.node, strike)?;
        let has_plugin = machine.names(BIN)?.contains("underpass");
        ensure!(
            has_plugin || machine.conflist()?.is_none(),
            "{:?}: a conflist without a plugin",
            struck.struck
        );
        machine.run("uninstall", &[])?;
        ensure!(
            machine.names(BIN)?.is_empty() && machine.names(NET)?.is_empty(),
            "{:?}",
            struck.struck
        );
        if struck.struck.is_none() {
            ensure!(index > 5, "it changes {index} things");
            return Ok(());
        }
    }
    Ok(())
}

//! Every system call by which ADD, DEL and GC change something fails once, and is once the last that the plugin makes.
//!
//! Nobody lists these calls: each test steps through those that it meets ([`underpass_tests::fault`]), until a call of the plugin ends
//! without having made so many. Meanwhile another container is talked to all the time.

mod cold;
mod stage;
mod witness;

use nix::errno::Errno;
use rstest::rstest;
use underpass_tests::{
    fault::{Change, Fault, Strike, Traced},
    patience,
    prelude::*,
    runtime::Reply,
};

use stage::Stage;

/// A call either does without the change, and has done all the same what it should, or it fails and says why. A failed ADD has taken back
/// what it had made; a failed DEL or GC has one that goes on with it.
#[rstest]
fn a_refused_change(#[values("ADD", "DEL", "GC")] verb: &str) -> Result<()> {
    needs_root!();
    let mut stage = Stage::set()?;
    let met = each_change(Fault::Refused, |strike| {
        if verb != "ADD" {
            stage.attach()?;
        }
        let struck = stage.strike(verb, strike)?;
        stage.expect_served()?;
        let failed = is_refusal(&struck)?;
        match verb {
            "ADD" if failed => stage.expect_nothing_left()?,
            "ADD" => stage.check(&struck.reply.result()?)?,
            _ if !failed => struck.reply.silence()?,
            _ => {}
        }
        // The index of leases does without what could not be taken out of it, until a GC makes it anew.
        let is_index = |change: &Change| change.what.contains("/.underpass");
        let in_index = verb != "ADD" && struck.struck.as_ref().is_some_and(is_index);
        if in_index {
            stage.make("GC")?;
        } else if verb == "ADD" || failed {
            // Either is enough.
            stage.make(one_of(&["DEL", "GC"], strike))?;
        }
        stage.expect_nothing_at_all()?;
        if verb == "ADD" {
            stage.attach()?;
            stage.make("DEL")?;
        }
        Ok(struck)
    })?;
    tell(verb, &met);
    stage.end()
}

/// Whatever a killed call leaves goes with a DEL alone, and with a GC alone; and a new ADD works.
#[rstest]
#[case("ADD", &["DEL"])]
#[case("ADD", &["GC"])]
#[case("DEL", &["DEL", "GC"])]
#[case("GC", &["DEL", "GC"])]
fn a_kill(#[case] verb: &str, #[case] remedies: &[&str]) -> Result<()> {
    needs_root!();
    let mut stage = Stage::set()?;
    let mut kill = |strike: Strike| {
        let remedy = one_of(remedies, strike);
        if verb != "ADD" {
            stage.attach()?;
        }
        let struck = stage.strike(verb, strike)?;
        stage.expect_served()?;
        if struck.struck.is_some() || verb == "ADD" {
            stage.make(remedy)?;
        }
        stage.expect_nothing_at_all()?;
        if verb == "ADD" {
            stage.attach()?;
            stage.make("DEL")?;
        }
        Ok(struck)
    };
    // Right after a change is right before the next, so all that is missing is what comes before the first.
    kill(Strike {
        index: 0,
        fault: Fault::KilledBefore,
    })?;
    let met = each_change(Fault::KilledAfter, kill)?;
    tell(verb, &met);
    stage.end()
}

/// CHECK and STATUS look. To look into the container a thread enters its namespace, and that is all.
#[test]
fn who_looks_changes_nothing() -> Result<()> {
    needs_root!();
    let stage = Stage::set()?;
    let result = stage.attach()?;
    for call in stage.looks(&result) {
        let traced = stage.trace(&call)?;
        traced.reply.silence()?;
        for change in traced.changes {
            // To wait for an upgrade leaves nothing behind.
            let passes = ["setns(", "flock("]
                .iter()
                .any(|call| change.what.starts_with(call));
            ensure!(passes, "{change}");
        }
    }
    stage.make("DEL")?;
    stage.end()
}

/// From one change that is struck to the next: on slow machines some are left out.
fn stride() -> usize {
    usize::try_from(patience::factor()).unwrap_or(1)
}

/// Takes turns.
fn one_of<'a>(remedies: &[&'a str], strike: Strike) -> &'a str {
    remedies[strike.index / stride() % remedies.len()]
}

/// Does a trial for each change of a call, until one finds the call without so many: the changes that were struck.
fn each_change(
    fault: Fault,
    mut trial: impl FnMut(Strike) -> Result<Traced>,
) -> Result<Vec<Change>> {
    let mut met: Vec<Change> = Vec::new();
    loop {
        let strike = Strike {
            index: met.len() * stride(),
            fault,
        };
        let traced = trial(strike).with_context(|| {
            let last = met.last().map(ToString::to_string);
            format!("{strike:?}, after {}", last.unwrap_or_default())
        })?;
        let Some(change) = traced.struck else {
            ensure!(!met.is_empty(), "the call changes nothing");
            traced.reply.succeeded()?;
            return Ok(met);
        };
        met.push(change);
    }
}

/// Whether the call failed. If so, it must have answered with one document that tells what the kernel said to the refused change.
fn is_refusal(traced: &Traced) -> Result<bool> {
    let Traced { reply, struck, .. } = traced;
    let Some(change) = struck else {
        return reply.succeeded().map(|()| false);
    };
    if reply.status.success() {
        return Ok(false);
    }
    tells(reply, change).with_context(|| format!("{change} was refused"))?;
    Ok(true)
}

fn tells(reply: &Reply, change: &Change) -> Result<()> {
    let error = reply.error()?;
    let number = format!("os error {}", change.errno as i32);
    // Of memory it may say in its own words which is missing.
    ensure!(
        error.msg.contains(&number)
            || change.errno == Errno::ENOMEM && error.msg.contains("memory"),
        "{error} does not say {number:?}"
    );
    ensure!(error.msg.len() <= 1024, "{error}");
    Ok(())
}

fn tell(verb: &str, met: &[Change]) {
    anstream::println!("{} changes of {verb} were struck", met.len());
}

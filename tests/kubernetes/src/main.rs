//! `cargo xtask test kubernetes`: a Kubernetes of real parts on network namespaces, with ours as its pod network. Root only.

mod checks;
mod cluster;
mod control;
mod credentials;
mod daemon;
mod member;
mod pod;
mod programs;
mod ranges;
mod score;

use std::{
    env,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use underpass_tests::{node::find_plugin, patience, privilege};

use crate::{cluster::Cluster, score::Score};

/// How long anything may take that some part of Kubernetes does by itself. A kubelet looks at some things each minute.
const SOON: Duration = Duration::from_mins(2);

/// Every so often is looked whether it has happened.
const TICK: Duration = Duration::from_millis(200);

fn main() -> ExitCode {
    let obstacle = privilege::missing().or_else(|| find_plugin().err().map(str::to_owned));
    if let Some(reason) = obstacle {
        anstream::eprintln!("Kubernetes can't run here: {reason}");
        return ExitCode::FAILURE;
    }
    let wanted: Vec<String> = env::args().skip(1).collect();
    match play(&wanted) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            anstream::eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the checks: whether all of them passed.
fn play(wanted: &[String]) -> Result<bool> {
    let mut score = Score::default();
    let mut cluster = Cluster::start(&[0, 0, 1])?;
    let outcome = checks::all(&mut cluster, &mut score, wanted);
    if outcome.is_err() || !score.is_clean() {
        anstream::eprintln!("{}", cluster.last_words());
    }
    score.record("nothing is left of the cluster", &cluster.destroy());
    outcome?;
    Ok(score.summary())
}

/// Tries until it holds, or for too long.
fn eventually(what: &str, mut holds: impl FnMut() -> Result<()>) -> Result<()> {
    let end = Instant::now() + patience::here(SOON);
    loop {
        match holds() {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > end => return Err(error.context(what.to_owned())),
            Err(_) => thread::sleep(TICK),
        }
    }
}

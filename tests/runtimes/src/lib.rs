//! Container runtimes on the nodes of the tests: whoever calls the plugin here is no fixture, but what people run.
//!
//! A runtime is in a [`Cage`] on a [`Node`](underpass_tests::Node). Its pods are processes in control groups; their network namespaces are
//! seen as those of any other test.

pub mod cage;
pub mod containerd;
pub mod cri;
pub mod image;
pub mod plugins;
pub mod podman;
pub mod running;

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use underpass_tests::{patience, privilege};

pub use cage::Cage;
pub use containerd::Containerd;
pub use cri::Cri;
pub use podman::Podman;
pub use running::Running;

/// How long anything may take that a runtime does by itself.
const PATIENCE: Duration = Duration::from_secs(20);

/// Every so often is looked whether it has happened.
const TICK: Duration = Duration::from_millis(20);

/// Tries something again and again until it succeeds; the last failure is the one that is told.
pub fn wait_until<T>(what: &str, attempt: impl Fn() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + patience::here(PATIENCE);
    loop {
        let tried = attempt();
        if tried.is_ok() || Instant::now() > deadline {
            return tried.with_context(|| format!("waited in vain until {what}"));
        }
        thread::sleep(TICK);
    }
}

/// True if a test can't run here for lack of one of these programs, or of what every test needs; the reason is printed.
///
/// # Panics
/// With the reason, if the environment says `CI=true`.
#[must_use]
pub fn skipped(programs: &[&str]) -> bool {
    if privilege::skipped() {
        return true;
    }
    let reason = missing(programs);
    if let Some(reason) = &reason {
        privilege::skip(reason);
    }
    reason.is_some()
}

fn missing(programs: &[&str]) -> Option<String> {
    let always = ["nsenter", "tar"];
    let mut needed = always.iter().chain(programs);
    if let Some(program) = needed.find(|program| privilege::find(program).is_none()) {
        return Some(format!(
            "the command `{program}` is missing: run `cargo xtask test runtimes`, which installs it"
        ));
    }
    let busybox = image::busybox();
    (!busybox.is_file()).then(|| {
        format!(
            "there is no busybox at {}: run `cargo xtask test runtimes`, which unpacks one",
            busybox.display()
        )
    })
}

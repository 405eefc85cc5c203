//! One core for each end of a connection.

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::{Context as _, Result};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

/// Which end of a connection a thread is.
#[derive(Clone, Copy)]
pub(crate) enum End {
    /// Sends requests, on core 0. On a veth path its core also does the work of everything in between.
    Client,
    /// Answers, on core 1 where there is one.
    Server,
}

/// Ahead of other processes, ten to one, but not so far that the kernel's own threads, which carry packets too, would starve.
const NICE: libc::c_int = -10;

/// Whether both ends have one core.
static SHARED: AtomicBool = AtomicBool::new(false);

/// From now on both ends have core 0.
pub(crate) fn share() {
    SHARED.store(true, Ordering::Relaxed);
}

/// Keeps the calling thread on the core of its end, ahead of whatever else wants that core.
pub(crate) fn pin(end: End) -> Result<()> {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let core = match end {
        End::Server if !SHARED.load(Ordering::Relaxed) => 1.min(cores - 1),
        End::Client | End::Server => 0,
    };
    let mut set = CpuSet::new();
    set.set(core)
        .and_then(|()| sched_setaffinity(Pid::from_raw(0), &set))
        .with_context(|| format!("pin a thread to core {core}"))?;
    // SAFETY: it takes three integers; 0 is the calling thread.
    if unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) } != 0 {
        return Err(io::Error::last_os_error()).context("put a thread ahead of others");
    }
    Ok(())
}

//! Faults: calls of the plugin in which one system call fails, or at which the plugin dies by SIGKILL.
//!
//! The places are found while the call runs. A seccomp filter stops the plugin at each system call that could change something outside of
//! its own memory; this process traces it (ptrace(2)), looks at the arguments, counts those that do change something, and strikes at the
//! one that it was told. So nobody has to keep a list of places, and a change that is new in the plugin is met as well.
//!
//! ```text
//!   plugin: ... ── sendto ── openat ── bpf ── flock ── linkat ── ...
//!                    │         │       │       │        │
//!   tracer:        reads    reads   0: go   1: go    2: strike
//! ```

mod change;
mod filter;
mod registers;
mod tracer;

use anyhow::{Result, ensure};

use crate::{
    Node,
    runtime::{Call, Reply},
};

pub use change::Change;

/// What becomes of a system call, or of the process that makes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It does nothing, and fails with the error that [`Change::errno`] names.
    Refused,
    /// SIGKILL comes before it has done anything.
    KilledBefore,
    /// SIGKILL comes when it is done.
    KilledAfter,
}

/// A fault and its place: the number of the change in the call, from 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Strike {
    /// The number of the change.
    pub index: usize,
    /// What becomes of it.
    pub fault: Fault,
}

/// A call that was traced.
#[derive(Debug)]
pub struct Traced {
    /// What it changed, in this order.
    pub changes: Vec<Change>,
    /// The change that was struck, if the call had so many.
    pub struck: Option<Change>,
    /// The plugin's answer, also if it was killed.
    pub reply: Reply,
}

impl Call {
    /// Makes the call on a node, and notes what it changes.
    pub fn trace(&self, node: &Node) -> Result<Traced> {
        tracer::run(self, node, None)
    }

    /// Makes the call on a node, with a fault in it unless the call has fewer changes than that.
    pub fn strike(&self, node: &Node, strike: Strike) -> Result<Traced> {
        let traced = tracer::run(self, node, Some(strike))?;
        let killed = traced.reply.status.code().is_none();
        let must_die = traced.struck.is_some() && strike.fault != Fault::Refused;
        ensure!(
            killed == must_die,
            "{strike:?}, and the plugin ended with {}: {traced:?}",
            traced.reply.status
        );
        Ok(traced)
    }
}

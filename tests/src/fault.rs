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

use std::{
    os::unix::process::CommandExt as _,
    process::{Command, ExitStatus, Output},
};

use anyhow::{Result, ensure};

use crate::{
    Node,
    runtime::{Call, Reply},
};

pub use change::Change;
use filter::Filter;
use tracer::Pause;

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

/// A call that was traced, or a command.
#[derive(Debug)]
pub struct Traced<R = Reply> {
    /// What it changed, in this order.
    pub changes: Vec<Change>,
    /// The change that was struck, if the call had so many.
    pub struck: Option<Change>,
    /// The plugin's answer, also if it was killed.
    pub reply: R,
}

impl<R> Traced<R> {
    /// Fails unless it ended as the strike has it.
    fn expect(self, strike: Strike, status: ExitStatus) -> Result<Self> {
        let killed = status.code().is_none();
        let must_die = self.struck.is_some() && strike.fault != Fault::Refused;
        ensure!(
            killed == must_die,
            "{strike:?}, and the plugin ended with {status}; {:?} was struck of {:#?}",
            self.struck,
            self.changes
        );
        Ok(self)
    }
}

/// Runs a command of the command line on a node, and notes what it changes.
pub fn trace(command: &mut Command, node: &Node) -> Result<Traced<Output>> {
    tracer::run(command, &[], node, None)
}

/// Runs a command of the command line on a node, with a fault in it unless it has fewer changes than that.
pub fn strike(command: &mut Command, node: &Node, strike: Strike) -> Result<Traced<Output>> {
    let traced = tracer::run(command, &[], node, Some(strike))?;
    let status = traced.reply.status;
    traced.expect(strike, status)
}

impl Call {
    /// Makes the call on a node, and notes what it changes.
    pub fn trace(&self, node: &Node) -> Result<Traced> {
        self.traced(node, None)
    }

    /// Makes the call on a node, with a fault in it unless the call has fewer changes than that.
    pub fn strike(&self, node: &Node, strike: Strike) -> Result<Traced> {
        let traced = self.traced(node, Some(strike))?;
        let status = traced.reply.status;
        traced.expect(strike, status)
    }

    /// Makes the call on a node, and has it wait before its first change of which `before` is said, while something else is done.
    pub fn run_around(
        &self,
        node: &Node,
        before: &str,
        meanwhile: impl FnOnce() -> Result<()> + Send,
    ) -> Result<Traced> {
        self.run_around_one(node, before, 0, meanwhile)
    }

    /// The same before a later change of that kind, when so many have been made.
    pub fn run_around_one(
        &self,
        node: &Node,
        before: &str,
        after: usize,
        meanwhile: impl FnOnce() -> Result<()> + Send,
    ) -> Result<Traced> {
        let pause = Pause {
            before,
            after,
            meanwhile: Box::new(meanwhile),
        };
        let (command, input) = (&mut self.command(), self.input());
        let traced = tracer::run_with(command, input, node, None, Some(pause))?;
        Ok(Traced {
            changes: traced.changes,
            struck: traced.struck,
            reply: self.reply(traced.reply)?,
        })
    }

    /// Makes the call on a node, where it gets no threads.
    pub fn run_without_threads(&self, node: &Node) -> Result<Reply> {
        let filter = Filter::without_threads();
        let mut command = self.command();
        // SAFETY: prctl is async-signal-safe, and nothing is allocated.
        unsafe { command.pre_exec(move || filter.install()) };
        self.reply(node.netns().output(&mut command, self.input())?)
    }

    fn traced(&self, node: &Node, strike: Option<Strike>) -> Result<Traced> {
        let Traced {
            changes,
            struck,
            reply,
        } = tracer::run(&mut self.command(), self.input(), node, strike)?;
        Ok(Traced {
            changes,
            struck,
            reply: self.reply(reply)?,
        })
    }
}

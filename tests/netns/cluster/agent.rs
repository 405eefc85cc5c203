//! The agent's process on a node of a test.

use std::{
    fs,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread::{self, JoinHandle},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use underpass_tests::{
    netns::{Netns, die_together},
    prelude::*,
};

/// A running agent. It ends with this handle, or with the test.
pub(super) struct Agent {
    id: Pid,
    thread: Option<JoinHandle<()>>,
}

impl Agent {
    pub(super) fn start(mut command: Command, netns: &Netns) -> Result<Self> {
        let (started, id) = mpsc::channel();
        let netns = netns.clone();
        // It dies with the thread that started it.
        let thread = thread::spawn(move || {
            netns.run(|| {
                let child = die_together(&mut command).stdin(Stdio::null()).spawn();
                let id = child.as_ref().map(Child::id).map_err(ToString::to_string);
                let _ = started.send(id);
                let _ = child.map(|mut child| child.wait());
            });
        });
        let id = id.recv()?.map_err(anyhow::Error::msg);
        Ok(Self {
            id: Pid::from_raw(id.context("start the agent")?.cast_signed()),
            thread: Some(thread),
        })
    }

    /// The most memory that it has had at once, in KiB.
    pub(super) fn peak_memory(&self) -> Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.id))?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let words = line.context("no VmHWM")?.split_whitespace().next();
        Ok(words.context("no number")?.parse()?)
    }

    /// The processor time that it has used, in hundredths of a second.
    pub(super) fn ticks(&self) -> Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/stat", self.id))?;
        // The name before has blanks if it likes.
        let (_, rest) = text.rsplit_once(") ").context("no name")?;
        let words: Vec<&str> = rest.split(' ').collect();
        let word = |index: usize| words.get(index).context("no processor time");
        Ok(word(11)?.parse::<u64>()? + word(12)?.parse::<u64>()?)
    }

    /// Stops it from running, or has it run on.
    pub(super) fn hold(&self, is_held: bool) -> Result<()> {
        let signal = if is_held {
            Signal::SIGSTOP
        } else {
            Signal::SIGCONT
        };
        Ok(kill(self.id, signal)?)
    }

    /// Whether it has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Lists the commands that it runs, by their process ids.
    pub(super) fn commands(&self) -> Result<String> {
        children(self.id)
    }

    /// Kills it by SIGKILL, alone or with all that it runs.
    pub(super) fn kill(&self, with_commands: bool) -> Result<()> {
        // Nobody starts another one meanwhile.
        kill(self.id, Signal::SIGSTOP)?;
        if with_commands {
            kill_children(self.id)?;
        }
        Ok(kill(self.id, Signal::SIGKILL)?)
    }

    pub(super) fn end(&mut self, signal: Signal) {
        if let Some(thread) = self.thread.take() {
            // While the thread waits for it the number is its own.
            if !thread.is_finished() {
                let _ = kill(self.id, signal);
            }
            let _ = thread.join();
        }
    }
}

/// Lists what a process of one thread has started, and has not waited for.
fn children(id: Pid) -> Result<String> {
    Ok(fs::read_to_string(format!(
        "/proc/{id}/task/{id}/children"
    ))?)
}

fn kill_children(id: Pid) -> Result<()> {
    let text = children(id)?;
    for child in text.split_whitespace() {
        let child = Pid::from_raw(child.parse()?);
        // One that has just ended is gone, or waits for its parent.
        if kill(child, Signal::SIGSTOP).is_ok() {
            kill_children(child).unwrap_or_default();
            let _ = kill(child, Signal::SIGKILL);
        }
    }
    Ok(())
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.end(Signal::SIGKILL);
    }
}

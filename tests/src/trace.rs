//! `underpass trace` in the background, and what the programs log for it.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    process::{Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, Map, RingBuf};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use underpass_abi::{map, node::State};

use crate::{Node, counter::open, netns::die_together, node::plugin, patience, traffic::PATIENCE};

/// How the command ended, and what it said on standard error.
type End = Result<(ExitStatus, String)>;

/// The running command; it is killed when dropped.
#[derive(Debug)]
pub struct Trace {
    id: Pid,
    lines: Arc<Mutex<Vec<String>>>,
    /// In the node's namespaces as long as the command runs.
    thread: Option<JoinHandle<End>>,
}

impl Trace {
    /// Starts it on a node with these arguments, and waits until the programs log.
    pub fn start(node: &Arc<Node>, arguments: &[&str]) -> Result<Self> {
        let mut command = Command::new(plugin());
        command.env_clear().arg("trace").args(arguments);
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (started, id) = mpsc::channel();
        let (inside, collected) = (Arc::clone(node), Arc::clone(&lines));
        let thread = thread::spawn(move || {
            let run = || collect(command, &started, &collected);
            inside.netns().run(run)
        });
        let Ok(id) = id.recv() else {
            let end = thread.join().ok().context("the thread panicked")?;
            return Err(end.err().context("the command did not start")?);
        };
        let trace = Self {
            id,
            lines,
            thread: Some(thread),
        };
        let end = Instant::now() + patience::here(PATIENCE);
        while state(node)?.trace == 0 {
            ensure!(Instant::now() < end, "the trace does not begin");
            thread::sleep(Duration::from_millis(5));
        }
        Ok(trace)
    }

    /// Waits for a line with all of these words in it.
    pub fn expect(&self, words: &[&str]) -> Result<()> {
        let end = Instant::now() + patience::here(PATIENCE);
        loop {
            let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = |line: &String| words.iter().all(|word| line.contains(word));
            if lines.iter().any(fits) {
                return Ok(());
            }
            ensure!(Instant::now() < end, "no {words:?} in {lines:#?}");
            drop(lines);
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it with a signal: all lines that it printed.
    pub fn stop(mut self, signal: Signal) -> Result<Vec<String>> {
        kill(self.id, signal)?;
        let thread = self.thread.take().context("it runs until it is stopped")?;
        let (status, complaint) = thread.join().ok().context("the thread panicked")??;
        ensure!(status.success(), "{status}: {complaint}");
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut lines))
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // The thread waits for it, so the number is still its own.
            let _ = kill(self.id, Signal::SIGKILL);
            let _ = thread.join();
        }
    }
}

/// Runs the command to its end.
fn collect(mut command: Command, started: &Sender<Pid>, lines: &Mutex<Vec<String>>) -> End {
    die_together(&mut command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().context("run underpass trace")?;
    let output = child.stdout.take().context("a pipe")?;
    let mut errors = child.stderr.take().context("a pipe")?;
    let _ = started.send(Pid::from_raw(child.id().cast_signed()));
    for line in BufReader::new(output).lines() {
        let line = line.context("read the trace")?;
        let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.push(line);
    }
    let mut complaint = String::new();
    errors.read_to_string(&mut complaint)?;
    Ok((child.wait().context("wait for the trace")?, complaint))
}

/// The node's state as the programs see it.
pub fn state(node: &Node) -> Result<State> {
    let states: Array<_, State> = Map::Array(open(node, map::STATE)?).try_into()?;
    Ok(states.get(&0, 0)?)
}

/// Has the programs log up to this level, though nobody listens.
pub fn set_level(node: &Node, level: u32) -> Result<()> {
    let mut states: Array<_, State> = Map::Array(open(node, map::STATE)?).try_into()?;
    let state = states.get(&0, 0)?;
    Ok(states.set(
        0,
        State {
            trace: level,
            ..state
        },
        0,
    )?)
}

/// Takes all records that nobody has read: how many there were.
pub fn take_records(node: &Node) -> Result<usize> {
    let mut records: RingBuf<_> = Map::RingBuf(open(node, map::AYA_LOGS)?).try_into()?;
    let mut count = 0;
    while records.next().is_some() {
        count += 1;
    }
    Ok(count)
}

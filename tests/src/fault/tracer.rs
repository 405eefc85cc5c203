//! The tracer: it starts the plugin, decides at each stop, and has the answer at the end.

use std::{
    io::{Read, Write as _},
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    process::{Child, Command, ExitStatus, Output, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::{
    errno::Errno,
    sys::{
        ptrace::{self, Options},
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

use super::{Change, Fault, Strike, Traced, change, filter::Filter, registers, registers::Request};
use crate::{Node, patience};

/// How long a call may take.
const LIMIT: Duration = Duration::from_mins(1);

/// What the plugin waits for, before a change.
pub(super) struct Pause<'a> {
    /// A part of what is said of the change, the first that has it.
    pub(super) before: &'a str,
    /// How many changes of which that is said come before.
    pub(super) after: usize,
    pub(super) meanwhile: Box<dyn FnOnce() -> Result<()> + Send + 'a>,
}

/// Runs a command on a node, with that input.
pub(super) fn run(
    command: &mut Command,
    input: &[u8],
    node: &Node,
    strike: Option<Strike>,
) -> Result<Traced<Output>> {
    run_with(command, input, node, strike, None)
}

/// Runs a command on a node, with that input, and with a pause in it.
pub(super) fn run_with(
    command: &mut Command,
    input: &[u8],
    node: &Node,
    strike: Option<Strike>,
    pause: Option<Pause<'_>>,
) -> Result<Traced<Output>> {
    // Who starts a process by PTRACE_TRACEME is its tracer, as a thread.
    node.netns().run(|| {
        let mut child = start(command)?;
        let plugin = Pid::from_raw(child.id().cast_signed());
        let mut tracer = Tracer {
            plugin,
            strike,
            pause,
            changes: Vec::new(),
            struck: None,
        };
        let status = tracer.begin().and_then(|()| {
            // Small enough for the pipe. A call that does not read its input closes it.
            let _ = child.stdin.take().map(|mut pipe| pipe.write_all(input));
            tracer.follow()
        });
        if status.is_err() {
            let _ = kill(plugin, Signal::SIGKILL);
        }
        let status = status.with_context(|| format!("trace {command:?}"))?;
        ensure!(
            status.signal() != Some(Signal::SIGALRM as i32),
            "{command:?} took longer than {:?}; changes so far: {:#?}",
            patience::here(LIMIT),
            tracer.changes
        );
        Ok(Traced {
            changes: tracer.changes,
            struck: tracer.struck,
            reply: output(&mut child, status)?,
        })
    })
}

/// Starts a command that waits for its tracer, the calling thread.
fn start(command: &mut Command) -> Result<Child> {
    let filter = Filter::stopping_at(&change::numbers());
    let seconds = u32::try_from(patience::here(LIMIT).as_secs()).unwrap_or(u32::MAX);
    let begin = move || {
        ptrace::traceme()?;
        // Nobody else has an eye on the time.
        nix::unistd::alarm::set(seconds);
        filter.install()
    };
    // SAFETY: ptrace, alarm and prctl are async-signal-safe, and nothing is allocated.
    unsafe { command.pre_exec(begin) }
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("run {command:?}"))
}

/// What the pipes still have of a process that has ended.
fn output(child: &mut Child, status: ExitStatus) -> Result<Output> {
    let read = |pipe: Option<&mut dyn Read>| -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        if let Some(pipe) = pipe {
            pipe.read_to_end(&mut bytes)
                .context("read what it printed")?;
        }
        Ok(bytes)
    };
    Ok(Output {
        status,
        stdout: read(child.stdout.as_mut().map(|pipe| pipe as &mut dyn Read))?,
        stderr: read(child.stderr.as_mut().map(|pipe| pipe as &mut dyn Read))?,
    })
}

struct Tracer<'a> {
    plugin: Pid,
    strike: Option<Strike>,
    pause: Option<Pause<'a>>,
    changes: Vec<Change>,
    struck: Option<Change>,
}

impl Tracer<'_> {
    /// Meets the plugin at its first instruction.
    fn begin(&self) -> Result<()> {
        let first = waitpid(self.plugin, None).context("wait for its start")?;
        ensure!(
            first == WaitStatus::Stopped(self.plugin, Signal::SIGTRAP),
            "it began with {first:?}"
        );
        let options = Options::PTRACE_O_EXITKILL
            | Options::PTRACE_O_TRACESECCOMP
            | Options::PTRACE_O_TRACESYSGOOD
            | Options::PTRACE_O_TRACECLONE
            | Options::PTRACE_O_TRACEFORK
            | Options::PTRACE_O_TRACEVFORK;
        ptrace::setoptions(self.plugin, options)?;
        go_on(ptrace::cont(self.plugin, None))
    }

    /// Follows the plugin, its threads and the processes that it starts to their ends: how the plugin ended.
    fn follow(&mut self) -> Result<ExitStatus> {
        // Other threads of this process have children of their own.
        let mine = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD;
        let mut ended = None;
        loop {
            match waitpid(None, Some(mine)) {
                Err(Errno::ECHILD) => break,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error).context("wait for it"),
                Ok(WaitStatus::Exited(process, code)) if process == self.plugin => {
                    ended = Some(ExitStatus::from_raw(code << 8));
                }
                Ok(WaitStatus::Signaled(process, signal, _)) if process == self.plugin => {
                    ended = Some(ExitStatus::from_raw(signal as i32));
                }
                Ok(stop) => self.decide(stop)?,
            }
        }
        ended.context("it never ended")
    }

    fn decide(&mut self, stop: WaitStatus) -> Result<()> {
        match stop {
            WaitStatus::PtraceEvent(thread, _, libc::PTRACE_EVENT_SECCOMP) => self.stopped(thread),
            // A new thread or process begins with this signal.
            WaitStatus::PtraceEvent(thread, ..) | WaitStatus::Stopped(thread, Signal::SIGSTOP) => {
                go_on(ptrace::cont(thread, None))
            }
            // The end of the system call that was to be done.
            WaitStatus::PtraceSyscall(_) => self.kill(),
            WaitStatus::Stopped(thread, signal) => go_on(ptrace::cont(thread, signal)),
            WaitStatus::Exited(..) | WaitStatus::Signaled(..) => Ok(()),
            other => bail!("it stopped by {other:?}"),
        }
    }

    /// Looks at a system call that is about to be made.
    fn stopped(&mut self, thread: Pid) -> Result<()> {
        let request = match Request::of(thread) {
            // It was killed meanwhile.
            Err(Errno::ESRCH) => return Ok(()),
            request => request.context("read its registers")?,
        };
        let Some(change) = Change::of(thread, &request) else {
            return go_on(ptrace::cont(thread, None));
        };
        let is_it = |pause: &mut Pause<'_>| {
            let is_like_it = change.what.contains(pause.before);
            let is_it = is_like_it && pause.after == 0;
            pause.after -= usize::from(is_like_it && !is_it);
            is_it
        };
        if let Some(pause) = self.pause.take_if(is_it) {
            (pause.meanwhile)()?;
        }
        let fault = self
            .strike
            .filter(|strike| strike.index == self.changes.len())
            .map(|strike| strike.fault);
        self.changes.push(change.clone());
        let Some(fault) = fault else {
            return go_on(ptrace::cont(thread, None));
        };
        let errno = change.errno;
        self.struck = Some(change);
        match fault {
            Fault::Refused => {
                go_on(registers::refuse(thread, errno))?;
                go_on(ptrace::cont(thread, None))
            }
            Fault::KilledBefore => self.kill(),
            Fault::KilledAfter => go_on(ptrace::syscall(thread, None)),
        }
    }

    fn kill(&self) -> Result<()> {
        Ok(kill(self.plugin, Signal::SIGKILL)?)
    }
}

/// A thread that died meanwhile needs nothing.
fn go_on(answer: nix::Result<()>) -> Result<()> {
    match answer {
        Err(Errno::ESRCH) => Ok(()),
        answer => Ok(answer?),
    }
}

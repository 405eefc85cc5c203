//! What the verifier says of the programs that a process loads: the process is traced, and its `bpf(BPF_PROG_LOAD)` calls are made to ask
//! for the verifier's statistics. So what is measured is what the plugin loads, as it loads it; nothing in the plugin knows of it.

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::ptrace::{self, Options};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::frames;
use super::record::Program;

/// Of x86-64, as the guests are.
const SYS_BPF: u64 = 321;
const BPF_PROG_LOAD: u64 = 5;

/// Offsets in the attribute of `BPF_PROG_LOAD`.
mod attribute {
    pub(super) const INSN_CNT: usize = 4;
    pub(super) const INSNS: usize = 8;
    pub(super) const LOG_LEVEL: usize = 24;
    pub(super) const LOG_SIZE: usize = 28;
    pub(super) const LOG_BUF: usize = 32;
    pub(super) const LOG_END: usize = 40;
    pub(super) const NAME: usize = 48;
    pub(super) const NAME_END: usize = 64;
}

/// `BPF_LOG_STATS`: nothing but the figures, since Linux 5.2.
const LOG_STATS: u32 = 4;
/// The program that the plugin asks for the kernel's features with.
const PROBE: &[u8] = b"probe\0";
/// Enough for what 6.12 adds without being asked: a line for each call of a global function.
const LOG_BYTES: u32 = 2 << 20;
/// How far below the first thread's stack pointer the figures go, each program's below those before it. The stack grows there by
/// itself; those of other threads do not.
const LOG_BELOW: u64 = 3 << 20;
/// Room for the logs of all programs, in bytes.
const STACK: u64 = 256 << 20;
/// `ENOSPC`: the program would have been loaded, but its log is too long.
const TOO_LONG: i64 = -28;

/// A load that has begun.
struct Load {
    attribute: u64,
    before: [u8; attribute::NAME_END],
    log: u64,
    start: Instant,
}

/// What has been seen of the process so far.
struct Traced {
    leader: Pid,
    /// Where the next log ends, once the first thread was seen to ask for anything of eBPF.
    room: Option<u64>,
    loads: HashMap<Pid, Load>,
}

/// Runs a command to its end. Returns its exit code and the programs that it loaded.
pub(super) fn trace(command: &mut Command) -> anyhow::Result<(i32, Vec<Program>)> {
    // SAFETY: between fork and exec, system calls that take no lock and no memory.
    unsafe {
        command.pre_exec(|| {
            setrlimit(Resource::RLIMIT_STACK, STACK, RLIM_INFINITY)?;
            ptrace::traceme().map_err(Into::into)
        });
    };
    let child = command.spawn().context("cannot start the plugin")?;
    let leader = Pid::from_raw(child.id().try_into().context("no process number")?);
    waitpid(leader, None).context("the plugin did not stop for its tracer")?;
    ptrace::setoptions(
        leader,
        Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_TRACECLONE | Options::PTRACE_O_EXITKILL,
    )
    .context("the plugin cannot be traced")?;
    ptrace::syscall(leader, None).context("the plugin cannot go on")?;

    let mut traced = Traced {
        leader,
        room: None,
        loads: HashMap::new(),
    };
    let mut programs = Vec::new();
    loop {
        match waitpid(None::<Pid>, Some(WaitPidFlag::__WALL))
            .context("the traced plugin is lost")?
        {
            WaitStatus::Exited(pid, code) if pid == leader => return Ok((code, programs)),
            WaitStatus::Signaled(pid, signal, _) if pid == leader => {
                bail!("the plugin was killed by {signal}")
            }
            WaitStatus::PtraceSyscall(pid) => {
                if let Some(program) = at_system_call(pid, &mut traced)? {
                    programs.push(program);
                }
                resume(pid, None);
            }
            // A new thread begins with a stop that is not for it.
            WaitStatus::Stopped(pid, signal) => {
                resume(pid, (signal != Signal::SIGSTOP).then_some(signal));
            }
            WaitStatus::PtraceEvent(pid, _, _) => resume(pid, None),
            _ => {}
        }
    }
}

fn resume(pid: Pid, signal: Option<Signal>) {
    // One that was killed meanwhile is reported as such next.
    let _ = ptrace::syscall(pid, signal);
}

/// At the entry of a load, asks for figures; at its return, takes them.
fn at_system_call(pid: Pid, traced: &mut Traced) -> anyhow::Result<Option<Program>> {
    let registers = ptrace::getregs(pid).context("a traced thread has no registers")?;
    if let Some(load) = traced.loads.remove(&pid) {
        let took = load.start.elapsed();
        write(pid, load.attribute, &load.before[..attribute::LOG_END])?;
        let returned = registers.rax.cast_signed();
        return if returned >= 0 {
            program(pid, &load, took).map(Some)
        } else if returned == TOO_LONG {
            bail!("the verifier's log is longer than {LOG_BYTES} bytes")
        } else {
            Ok(None)
        };
    }
    if registers.orig_rax != SYS_BPF {
        return Ok(None);
    }
    if pid == traced.leader && traced.room.is_none() {
        traced.room = Some(registers.rsp - LOG_BELOW);
    }
    if registers.rdi != BPF_PROG_LOAD {
        return Ok(None);
    }
    let mut before = [0; attribute::NAME_END];
    read(pid, registers.rsi, &mut before)?;
    // The loader's and the plugin's questions to the kernel have no name or one of their own; a load with a log is the repetition of one that failed.
    let name = &before[attribute::NAME..];
    if name.starts_with(&[0])
        || name.starts_with(b"aya_")
        || name.starts_with(PROBE)
        || field(&before, attribute::LOG_LEVEL) != 0
    {
        return Ok(None);
    }
    let room = traced
        .room
        .as_mut()
        .context("the plugin's first thread did not ask for anything of eBPF")?;
    *room -= u64::from(LOG_BYTES);
    let log = *room;
    let mut asking = before;
    asking[attribute::LOG_LEVEL..attribute::LOG_SIZE].copy_from_slice(&LOG_STATS.to_ne_bytes());
    asking[attribute::LOG_SIZE..attribute::LOG_BUF].copy_from_slice(&LOG_BYTES.to_ne_bytes());
    asking[attribute::LOG_BUF..attribute::LOG_END].copy_from_slice(&log.to_ne_bytes());
    write(pid, registers.rsi, &asking[..attribute::LOG_END])?;
    let load = Load {
        attribute: registers.rsi,
        before,
        log,
        start: Instant::now(),
    };
    traced.loads.insert(pid, load);
    Ok(None)
}

fn program(pid: Pid, load: &Load, took: Duration) -> anyhow::Result<Program> {
    let mut log = vec![0; LOG_BYTES as usize];
    read(pid, load.log, &mut log)?;
    let length = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
    let log = String::from_utf8_lossy(&log[..length]);

    let count = field(&load.before, attribute::INSN_CNT) as usize;
    let mut instructions = vec![0; count * 8];
    let (_, tail) = load.before.split_at(attribute::INSNS);
    let (address, _) = tail.split_first_chunk().context("an attribute has insns")?;
    read(pid, u64::from_ne_bytes(*address), &mut instructions)?;

    let name = &load.before[attribute::NAME..];
    let length = name
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(name.len());
    let name = String::from_utf8_lossy(&name[..length]).into_owned();
    let figures = frames::figures(&log)
        .with_context(|| format!("the verifier's figures for {name} are not understood: {log}"))?;
    Ok(Program {
        stack: frames::deepest(&instructions, &figures.frames)
            .with_context(|| format!("{name}: the verifier lists other functions than it has"))?,
        name,
        verified: figures.verified,
        milliseconds: took.as_millis().try_into().unwrap_or(u64::MAX),
    })
}

fn field(attribute: &[u8], offset: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&attribute[offset..offset + 4]);
    u32::from_ne_bytes(bytes)
}

fn read(pid: Pid, address: u64, buffer: &mut [u8]) -> anyhow::Result<()> {
    let remote = [remote(address, buffer.len())?];
    let length = buffer.len();
    let read = process_vm_readv(pid, &mut [IoSliceMut::new(buffer)], &remote)
        .context("cannot read the traced plugin's memory")?;
    if read != length {
        bail!("only {read} of {length} bytes of the traced plugin's memory could be read");
    }
    Ok(())
}

fn write(pid: Pid, address: u64, bytes: &[u8]) -> anyhow::Result<()> {
    let remote = [remote(address, bytes.len())?];
    let written = process_vm_writev(pid, &[IoSlice::new(bytes)], &remote)
        .context("cannot write to the traced plugin's memory")?;
    if written != bytes.len() {
        bail!("only {written} bytes of the traced plugin's memory could be written");
    }
    Ok(())
}

fn remote(address: u64, len: usize) -> anyhow::Result<RemoteIoVec> {
    let base = usize::try_from(address).context("an address of another machine")?;
    Ok(RemoteIoVec { base, len })
}

//! The demo as a newcomer sees it, and what is left when it is interrupted: nothing.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{BufRead as _, BufReader},
    os::{fd::AsRawFd as _, unix::process::ExitStatusExt as _},
    path::{Path, PathBuf},
    process::{self, Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rstest::rstest;
use underpass_tests::{needs_root, node::plugin, patience};

fn demo() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_demo"));
    command.env("UNDERPASS_BIN", plugin());
    command
}

#[test]
fn it_succeeds_and_is_plain_in_a_pipe() -> Result<()> {
    needs_root!();
    let output = demo().output()?;
    let shown = String::from_utf8(output.stdout)?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{shown}\n{complaint}");
    ensure!(!shown.contains('\u{1b}'), "no colours in a pipe: {shown}");
    ensure!(shown.contains("bypass_peer"), "{shown}");
    Ok(())
}

#[rstest]
fn nothing_stays_when_it_is_interrupted(
    #[values(Signal::SIGINT, Signal::SIGTERM, Signal::SIGKILL)] signal: Signal,
    #[values("1.", "3.", "5.")] step: &str,
) -> Result<()> {
    needs_root!();
    let mut child = demo()
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let held = interrupt(&mut child, signal, step);
    let status = end(&mut child, held.is_ok())?;
    let held = held?;
    ensure!(status.signal() == Some(signal as i32), "{status}");
    let end = Instant::now() + patience::here(Duration::from_secs(5));
    loop {
        let holders = holders(&held.names)?;
        if holders.is_empty() {
            return Ok(());
        }
        ensure!(
            Instant::now() < end,
            "namespaces are still held by {holders:?}"
        );
        thread::sleep(Duration::from_millis(20));
    }
}

/// How the demo ended; it is killed if it was not interrupted, or does not end by that.
///
/// Not at once: a process that is about to start another blocks all signals for that while (`posix_spawn(3)`), and one that finds both
/// waiting then dies of SIGKILL.
fn end(child: &mut Child, was_interrupted: bool) -> Result<ExitStatus> {
    let end = Instant::now() + patience::here(Duration::from_secs(10));
    while was_interrupted && Instant::now() < end {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    Ok(child.wait()?)
}

/// Namespaces of the demo.
struct Held {
    names: BTreeSet<String>,
    /// The kernel gives the number of a namespace that is gone to the next one, most likely to one of a test beside this one:
    /// as long as they are open, their names are theirs.
    _open: Vec<File>,
}

/// Waits for a step, and sends the signal a moment later: the namespaces that the demo held.
fn interrupt(child: &mut Child, signal: Signal, step: &str) -> Result<Held> {
    let output = child.stdout.take().context("a pipe")?;
    let mut lines = BufReader::new(output).lines();
    let begun = lines.any(|line| line.is_ok_and(|line| line.starts_with(step)));
    ensure!(begun, "the demo ended before step {step}");
    thread::sleep(Duration::from_millis(30));
    let own = links(Path::new("/proc/self/ns"))?;
    let folder = Path::new("/proc").join(child.id().to_string()).join("fd");
    let (mut names, mut open) = (BTreeSet::new(), Vec::new());
    for entry in fs::read_dir(&folder)?.flatten() {
        // What it closed meanwhile is nothing that it holds.
        let Some(name) = link(&entry.path()) else {
            continue;
        };
        if !is_namespace(&name) || own.contains(&name) {
            continue;
        }
        let Ok(file) = File::open(entry.path()) else {
            continue;
        };
        names.extend(link(&opened(&file)));
        open.push(file);
    }
    ensure!(
        step == "1." || !names.is_empty(),
        "the demo holds namespaces"
    );
    kill(Pid::from_raw(child.id().cast_signed()), signal)?;
    Ok(Held { names, _open: open })
}

fn opened(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn is_namespace(name: &str) -> bool {
    name.starts_with("net:") || name.starts_with("mnt:")
}

/// Where the links of a folder lead, as far as they can be read.
fn links(folder: &Path) -> Result<BTreeSet<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    Ok(entries
        .flatten()
        .filter_map(|entry| link(&entry.path()))
        .collect())
}

/// Where a link leads, if it can be read.
fn link(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.display().to_string())
}

/// Threads of other processes that are in one of the namespaces, or hold it by a file.
fn holders(namespaces: &BTreeSet<String>) -> Result<Vec<String>> {
    let mut holders = Vec::new();
    for process in fs::read_dir("/proc")?.flatten() {
        // Some entries are none, and one of these is a link to ourselves.
        let id = process.file_name().to_str().and_then(|id| id.parse().ok());
        if id.is_none_or(|id: u32| id == process::id()) {
            continue;
        }
        let Ok(threads) = fs::read_dir(process.path().join("task")) else {
            continue;
        };
        for thread in threads.flatten() {
            let held = ["ns", "fd"].iter().any(|folder| {
                links(&thread.path().join(folder)).is_ok_and(|links| !links.is_disjoint(namespaces))
            });
            if held {
                holders.push(thread.path().display().to_string());
            }
        }
    }
    Ok(holders)
}

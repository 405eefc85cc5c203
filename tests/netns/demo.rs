//! The demo as a newcomer sees it, and what is left when it is interrupted: nothing.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader},
    os::unix::process::ExitStatusExt as _,
    path::Path,
    process::{Child, Command, Stdio},
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
    let namespaces = interrupt(&mut child, signal, step);
    let _ = child.kill();
    let status = child.wait()?;
    let namespaces = namespaces?;
    ensure!(status.signal() == Some(signal as i32), "{status}");
    let end = Instant::now() + patience::here(Duration::from_secs(5));
    loop {
        let held = holders(&namespaces)?;
        if held.is_empty() {
            return Ok(());
        }
        ensure!(
            Instant::now() < end,
            "namespaces are still held by {held:?}"
        );
        thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for a step, and sends the signal a moment later: the namespaces that the demo held.
fn interrupt(child: &mut Child, signal: Signal, step: &str) -> Result<BTreeSet<String>> {
    let output = child.stdout.take().context("a pipe")?;
    let mut lines = BufReader::new(output).lines();
    let begun = lines.any(|line| line.is_ok_and(|line| line.starts_with(step)));
    ensure!(begun, "the demo ended before step {step}");
    thread::sleep(Duration::from_millis(30));
    let own = links(Path::new("/proc/self/ns"))?;
    let mut namespaces = links(&Path::new("/proc").join(child.id().to_string()).join("fd"))?;
    namespaces.retain(|name| is_namespace(name) && !own.contains(name));
    ensure!(
        step == "1." || !namespaces.is_empty(),
        "the demo holds namespaces"
    );
    kill(Pid::from_raw(child.id().cast_signed()), signal)?;
    Ok(namespaces)
}

fn is_namespace(name: &str) -> bool {
    name.starts_with("net:") || name.starts_with("mnt:")
}

/// Where the links of a folder lead, as far as they can be read.
fn links(folder: &Path) -> Result<BTreeSet<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    Ok(entries
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .map(|target| target.display().to_string())
        .collect())
}

/// Threads that are in one of the namespaces, or hold it by a file.
fn holders(namespaces: &BTreeSet<String>) -> Result<Vec<String>> {
    let mut holders = Vec::new();
    for process in fs::read_dir("/proc")?.flatten() {
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

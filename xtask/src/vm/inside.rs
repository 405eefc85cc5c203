//! What a guest does: loads the programs and listens to the verifier, asks for the kernel's features, runs the tests one by one.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Condvar, Mutex};
use std::thread;

use anyhow::{Context as _, bail};

use super::record::{Record, Writer};

mod load;
mod test;

/// Where a guest has the folder that it shares with its host.
const SHARED: &str = "/guest";
/// A file there that the host makes when it is time to come to an end.
pub(super) const STOP: &str = "stop";

/// A file there with the names of tests, a line each, in the order of their turns. Those that it does not name come first; then, in the same order,
/// those that take more than one place: they take longest.
pub(super) const ORDER: &str = "order";

/// Tests that run at the same time where all are run: most wait most of the time. A choice of them runs one by one, so
/// that none is late because of another.
const AT_ONCE: usize = 5;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The folder of executables.
    bin: PathBuf,
    /// Run only tests whose name has one of these in it.
    #[arg(long)]
    only: Vec<String>,
    /// A file of tests; none, and none is run.
    #[arg(long)]
    tests: Vec<String>,
    /// What the tests give to containers.
    #[arg(long)]
    device: Option<String>,
    /// Which rules of kube-proxy nodes have.
    #[arg(long)]
    proxy: Option<String>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let shared = Path::new(SHARED);
    if !shared.join("boot.sh").exists() {
        bail!("this is what a guest of `cargo xtask test vm` runs: run that");
    }
    let mut results = Writer::create(shared)?;
    let plugin = arguments.bin.join("underpass");
    let measured = load::measure(&plugin)?;
    for record in &measured {
        results.write(record)?;
    }
    // Every test would say it again.
    let loaded = !measured
        .iter()
        .any(|record| matches!(record, Record::NotLoaded { .. }));
    let files = if loaded { &arguments.tests[..] } else { &[] };
    let logs = shared.join("logs");
    fs::create_dir_all(&logs).with_context(|| format!("cannot create {}", logs.display()))?;
    let mut tests = tests(&arguments.bin, files)?;
    tests.retain(|test| {
        let name = test.full_name();
        arguments.only.is_empty() || arguments.only.iter().any(|part| name.contains(part))
    });
    if let Ok(order) = fs::read_to_string(shared.join(ORDER)) {
        let turns: HashMap<&str, usize> = order.lines().zip(1..).collect();
        // Those that have no turn come first, of them those that need few places.
        tests.sort_by_key(|test| {
            let name = test.full_name();
            (turns.get(&*name).copied(), weight(&name, AT_ONCE))
        });
    }
    let bench = test::Bench {
        stop: shared.join(STOP),
        logs,
        device: arguments.device.as_deref(),
        proxy: arguments.proxy.as_deref(),
    };
    let places = if arguments.only.is_empty() {
        AT_ONCE
    } else {
        1
    };
    fs::create_dir_all(test::LOADED.1)
        .with_context(|| format!("cannot create {}", test::LOADED.1))?;
    run_all(&bench, &tests, places, &mut results)?;
    for record in complaints()? {
        results.write(&record)?;
    }
    results.write(&Record::Complete)
}

/// The names of all tests, those of these executables.
pub(super) fn names(bin: &Path, files: &[&str]) -> anyhow::Result<Vec<String>> {
    let tests = tests(bin, files)?;
    Ok(tests.iter().map(test::Test::full_name).collect())
}

/// The tests of these files.
fn tests(bin: &Path, files: &[impl AsRef<str>]) -> anyhow::Result<Vec<test::Test>> {
    let mut tests = Vec::new();
    for file in files {
        tests.append(&mut test::list(bin, file.as_ref())?);
    }
    Ok(tests)
}

/// Parts of the names of tests that limit how long an exchange or many of them may take, that fill a table before the first of its entries is old, or that
/// have the programs of several nodes verified one after the other: beside others they are late.
const ALONE: [&str; 8] = [
    "::cluster::rolling::",
    "::heals::an_address_that_comes_back_soon",
    "::full_table::",
    "bpf::accounting::",
    "bpf::ports::",
    "::next_hops::answers_come_by_another_uplink",
    "::openings::connections_outlive_a_stricter_connection_tracking",
    "::forged::an_opening_forged_by_others",
];

/// Parts of the names of tests that make several nodes, each with an agent, or have programs loaded again and again.
const HEAVY: [&str; 2] = ["::cluster::", "::upgrade::"];

/// How many of so many places a test takes.
fn weight(name: &str, places: usize) -> usize {
    if ALONE.iter().any(|part| name.contains(part)) {
        places
    } else if HEAVY.iter().any(|part| name.contains(part)) {
        places.min(2)
    } else {
        1
    }
}

/// Places for tests that run at the same time.
struct Places {
    free: Mutex<usize>,
    more: Condvar,
}

impl Places {
    fn new(number: usize) -> Self {
        Self {
            free: Mutex::new(number),
            more: Condvar::new(),
        }
    }

    /// Waits until so many are free, and has them until it is dropped.
    fn take(&self, number: usize) -> Taken<'_> {
        // Nothing that holds the lock panics.
        let free = self.free.lock().expect("a lock");
        let mut free = self
            .more
            .wait_while(free, |free| *free < number)
            .expect("a lock");
        *free -= number;
        Taken { of: self, number }
    }
}

/// Places that somebody has.
struct Taken<'a> {
    of: &'a Places,
    number: usize,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.of.free.lock().expect("a lock") += self.number;
        self.of.more.notify_all();
    }
}

/// Runs tests, some at once, each as soon as there are places for it; writes what becomes of them in the order in which they end.
/// Those that fail have a second try after all others, one by one.
fn run_all(
    bench: &test::Bench<'_>,
    tests: &[test::Test],
    places: usize,
    results: &mut Writer,
) -> anyhow::Result<()> {
    let waiting = Mutex::new(tests.iter());
    let failed = Mutex::new(Vec::new());
    let shared = Mutex::new(&mut *results);
    let all = Places::new(places);
    let work = || -> anyhow::Result<()> {
        loop {
            // Nothing that holds one of these locks panics.
            let Some(test) = waiting.lock().expect("a lock").next() else {
                return Ok(());
            };
            let name = test.full_name();
            let taken = all.take(weight(&name, places));
            let end = test.run(bench)?;
            drop(taken);
            let record = if let Some(failure) = end.failure(&name) {
                failed.lock().expect("a lock").push(test);
                failure
            } else {
                end.record(name)
            };
            shared.lock().expect("a lock").write(&record)?;
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..places).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| {
            worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })?;
    for test in failed.into_inner().expect("a lock") {
        let name = test.full_name();
        let end = test.run(bench)?;
        if let Some(failure) = end.failure(&name) {
            results.write(&failure)?;
        }
        results.write(&end.second().record(name))?;
    }
    Ok(())
}

/// What the kernel itself found wrong meanwhile.
fn complaints() -> anyhow::Result<Vec<Record>> {
    let output = Command::new("dmesg")
        .output()
        .context("cannot start dmesg")?;
    let log = String::from_utf8_lossy(&output.stdout).into_owned();
    fs::write(Path::new(SHARED).join("kernel.log"), &log)
        .context("cannot keep the kernel's log")?;
    Ok(log
        .lines()
        .filter(|line| is_complaint(line))
        .map(|line| Record::Complaint {
            line: line.to_owned(),
        })
        .collect())
}

fn is_complaint(line: &str) -> bool {
    [
        "WARNING: ",
        "BUG: ",
        "Oops",
        "possible recursive locking",
        "unregister_netdevice: waiting",
    ]
    .iter()
    .any(|sign| line.contains(sign))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_wrong_is_a_complaint() {
        assert!(is_complaint(
            "[ 1.0] WARNING: CPU: 0 PID: 1 at net/core/dev.c:1 f+0x1/0x2"
        ));
        assert!(is_complaint(
            "[ 1.0] BUG: kernel NULL pointer dereference, address: 0"
        ));
        assert!(!is_complaint(
            "[ 1.0] IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready"
        ));
    }
}

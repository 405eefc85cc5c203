//! `cargo xtask test vm`: the tests that need a kernel, on Debian's kernels, in emulated machines.
//!
//! A guest runs on this machine's own root (read-only, with what it writes kept in memory) and on a kernel of Debian, so the same
//! executables run inside and outside. It reports line by line into a folder that it shares with its host.

use std::collections::VecDeque;
use std::env::consts::ARCH;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use crate::build;
use crate::emulator::Emulator;
use crate::report;
use crate::setup::{self, Need};
use crate::workspace::Workspace;

mod executables;
mod frames;
mod guest;
mod initramfs;
pub(crate) mod inside;
mod kept;
mod kernel;
mod page;
mod record;
mod results;
mod verifier;

use executables::{Executables, TESTS};
use guest::Guest;
use kept::Kept;
use kernel::{Kernel, Kernels, NEWEST};
use record::Record;
use results::Results;

/// The kernels of Debian's releases, the oldest that is supported first, and the newest of any suite.
const KERNELS: [&str; 4] = ["5.10", "6.1", "6.12", NEWEST];

/// What `--short` runs: each program on each of its paths, what kernels are known to differ in, and what the machine outside may have no
/// modules for.
const SHORT: [&str; 19] = [
    "features::the_plugin_knows_what_the_kernel_can_do",
    "from_pod::a_learned_packet_is_rewritten_and_redirected",
    "leftovers::del_without_namespace",
    "lifecycle::the_result_has_the_shape_of_ptp",
    "masquerade::a_source_port_in_use_is_changed",
    "masquerade::rewritten_checksums_are_right",
    "routes::a_connection_takes_the_bypass_after_its_first_packets",
    "routes::what_the_firewall_drops_never_arrives::route_1",
    "sctp::sockets_talk_through_masquerade_and_host_ports",
    "kube_proxy::a_pod_reaches_another_by_a_cluster_ip",
    "others_nat::who_connects_again_takes_nothing_from_netfilter",
    "shared_entries::a_pod_that_goes_takes_nothing_from_the_host",
    "spoofing::a_foreign_address",
    "translated::ipvs",
    "translated::rules::associations_to_a_service",
    "translated::world::the_world_reaches_a_pod_by_a_node_port",
    "uplinks::a_queue_that_paces",
    "uplinks::masquerade_and_host_ports_work",
    "uplinks::probes_agree",
];

/// Time for a guest to start, and to come to an end when told to.
const AROUND: Duration = Duration::from_mins(5);

#[derive(clap::Args)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a flag of the command line"
)]
pub(crate) struct Arguments {
    /// Kernels by their version or its beginning, or `newest`; all if none is named.
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,
    /// Fetch newer packages of these kernels.
    #[arg(long)]
    update: bool,
    /// Load the programs and measure them, but run no test.
    #[arg(long, conflicts_with = "only")]
    programs: bool,
    /// Run only tests whose name contains this (repeatable).
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Run a small choice of tests: a few minutes, and docs/kernels.md is left alone.
    #[arg(long, conflicts_with_all = ["only", "programs"])]
    short: bool,
    /// Begin with tests that have no result in docs/kernels.md or failed, then those whose result is the oldest; what the minutes do not suffice
    /// for is left to the next time, and no failure.
    #[arg(long, conflicts_with_all = ["short", "programs"])]
    resume: bool,
    /// Give containers this device (`netkit`, `auto`) in all tests that do not say which; docs/kernels.md is left alone.
    #[arg(long, conflicts_with = "programs", value_parser = ["veth", "netkit", "auto"])]
    device: Option<String>,
    /// Have these rules of kube-proxy on every node beside its firewall (default: `iptables`); docs/kernels.md is left alone.
    #[arg(long, conflicts_with = "programs", value_parser = ["iptables", "nftables", "none"])]
    proxy: Option<String>,
    /// Minutes for the tests of one kernel; those that it does not reach are reported as not run, and count as failed.
    #[arg(long, default_value_t = 60)]
    minutes: u64,
    /// Guests at a time.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    guests: u8,
}

impl Arguments {
    /// Whether containers and nodes have what they usually have.
    const fn is_usual(&self) -> bool {
        self.device.is_none() && self.proxy.is_none()
    }

    /// Whether docs/kernels.md gets what this run says of the programs.
    fn tells_of_programs(&self) -> bool {
        self.programs || self.chosen().is_empty() && !self.resume && self.is_usual()
    }

    /// Whether docs/kernels.md gets what this run says of tests.
    const fn tells_of_tests(&self) -> bool {
        !self.programs && !self.short && self.is_usual()
    }

    /// Parts of the names of the tests to run; empty for all.
    fn chosen(&self) -> Vec<&str> {
        if self.short {
            SHORT.to_vec()
        } else {
            self.only.iter().map(String::as_str).collect()
        }
    }
}

pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> anyhow::Result<()> {
    if ARCH != "x86_64" {
        bail!("guests are x86-64 machines that run this machine's executables, which are {ARCH}");
    }
    setup::require_root("test vm", "a guest reads all of this machine's root")?;
    setup::ensure(workspace, Need::Vm)?;
    let emulator =
        Emulator::find(Emulator::folder(&workspace.tools())).context("set-up left no emulator")?;
    build::executables(workspace)?;
    let executables = Executables::build(workspace)?;
    // Before anybody commits something else meanwhile.
    let revision = arguments
        .tells_of_tests()
        .then(|| tested(workspace))
        .flatten();
    let kernels = kernels(workspace, arguments)?;
    let kind: Vec<&str> = ["vm"]
        .into_iter()
        .chain(arguments.device.as_deref())
        .chain(arguments.proxy.as_deref())
        .collect();
    let folder = workspace.target.join(kind.join("-"));
    let _alone = hold(&folder)?;

    let queue: Mutex<VecDeque<&Kernel>> = Mutex::new(kernels.iter().collect());
    let next = || {
        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.pop_front()
    };
    let faults: Mutex<Vec<String>> = Mutex::default();
    thread::scope(|scope| {
        for _ in 0..arguments.guests {
            scope.spawn(|| {
                while let Some(kernel) = next() {
                    if let Err(error) = one(
                        workspace,
                        kernel,
                        &emulator,
                        &folder,
                        &executables,
                        arguments,
                    ) {
                        let mut faults = faults.lock().unwrap_or_else(PoisonError::into_inner);
                        faults.push(format!("kernel {}: {error:#}", kernel.version));
                    }
                }
            });
        }
    });

    let mut faults = faults.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut all = Vec::new();
    for kernel in kernels {
        let results = Results::read(&kernel, &results_of(&folder, &kernel))?;
        report::step(&kernel.version, &results.summary());
        faults.extend(results.faults(!arguments.resume));
        faults.extend(results.unknown(&arguments.chosen()));
        all.push(results);
    }
    if let Some(revision) = revision {
        keep(workspace, &folder, &all, &revision)?;
    }
    if arguments.tells_of_programs() {
        let others = KERNELS
            .iter()
            .filter_map(|name| Kernels::at(&workspace.tools()).cached(name))
            .filter(|kernel| !all.iter().any(|results| results.version == kernel.version))
            // Results of an earlier run count if they are those of the same executables.
            .filter(|kernel| executables.are_those_in(&results_of(&folder, kernel)))
            .collect::<Vec<_>>();
        for kernel in others {
            all.push(Results::read(&kernel, &results_of(&folder, &kernel))?);
        }
        page::write_programs(&workspace.root, &mut all)?;
    }
    if !faults.is_empty() {
        bail!(
            "{}\n(output of failed tests, consoles and kernels' logs: {}/<kernel>)",
            faults.join("\n"),
            folder.display()
        );
    }
    Ok(())
}

/// Keeps others out of the folder of the guests until the file is closed: a guest that finds its files exchanged goes down, and what its
/// tests have said is lost.
fn hold(folder: &Path) -> anyhow::Result<fs::File> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let path = folder.join("lock");
    let file =
        fs::File::create(&path).with_context(|| format!("cannot open {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => bail!(
            "another `cargo xtask test vm` has its guests in {}: wait until it has ended",
            folder.display()
        ),
        Err(fs::TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("cannot lock {}", path.display()))
        }
    }
}

fn kernels(workspace: &Workspace, arguments: &Arguments) -> anyhow::Result<Vec<Kernel>> {
    let mut kernels = Kernels::at(&workspace.tools());
    let named: Vec<&str> = if arguments.kernels.is_empty() {
        KERNELS.to_vec()
    } else {
        arguments.kernels.iter().map(String::as_str).collect()
    };
    let mut found: Vec<Kernel> = Vec::new();
    for name in named {
        let kernel = if arguments.update {
            kernels.fetch(name)?
        } else {
            kernels.get(name)?
        };
        if !found.iter().any(|known| known.version == kernel.version) {
            found.push(kernel);
        }
    }
    Ok(found)
}

fn results_of(folder: &Path, kernel: &Kernel) -> PathBuf {
    folder.join(&kernel.version)
}

/// The commit that is tested. None, and results can't be kept: the reason is told.
fn tested(workspace: &Workspace) -> Option<String> {
    // What no test looks at.
    let but = [":(exclude)docs", ":(exclude)bench", ":(exclude)*.md"];
    let status = ["status", "--porcelain", "--untracked-files=no", "--", "."];
    let changed = workspace.git(&[&status[..], &but].concat());
    let commit = workspace.git(&["rev-parse", "--short=7", "HEAD"]);
    let reason = match (changed.as_deref(), commit) {
        (Some(""), Some(commit)) => return Some(commit),
        (Some(_), Some(_)) => "the sources are not those of a commit",
        _ => "git knows no commit here",
    };
    report::step("not kept", &format!("what the tests will say: {reason}"));
    None
}

/// Joins what the tests said with what is known of them.
fn keep(
    workspace: &Workspace,
    folder: &Path,
    all: &[Results],
    revision: &str,
) -> anyhow::Result<()> {
    let Some(any) = all.first() else {
        return Ok(());
    };
    // All kernels have the same executables.
    let bin = folder.join(&any.version).join(executables::BIN);
    let names = inside::names(&bin, &TESTS)?;
    for results in all {
        let mut kept = Kept::read(&workspace.root, &page::short(&results.version))?;
        kept.join(results, revision)?;
        kept.keep_only(&names);
        kept.write(&workspace.root)?;
    }
    page::write_tests(&workspace.root, &names)
}

/// Runs everything on one kernel.
fn one(
    workspace: &Workspace,
    kernel: &Kernel,
    emulator: &Emulator,
    folder: &Path,
    executables: &Executables,
    arguments: &Arguments,
) -> anyhow::Result<()> {
    let folder = results_of(folder, kernel);
    if folder.exists() {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove the old {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let bin = executables.copy_to(&folder)?;
    if arguments.resume {
        let kept = Kept::read(&workspace.root, &page::short(&kernel.version))?;
        let order = folder.join(inside::ORDER);
        fs::write(&order, kept.oldest_first().join("\n"))
            .with_context(|| format!("cannot write {}", order.display()))?;
    }

    let tests = Duration::from_mins(arguments.minutes);
    let mut job = format!("'{0}/xtask' vm-guest '{0}'", bin.display());
    let files = if arguments.programs {
        &[][..]
    } else {
        &TESTS[..]
    };
    for file in files {
        job.extend([" --tests ", file]);
    }
    for part in arguments.chosen() {
        job.extend([" --only '", &part.replace('\'', ""), "'"]);
    }
    if let Some(device) = &arguments.device {
        job.extend([" --device ", device]);
    }
    if let Some(proxy) = &arguments.proxy {
        job.extend([" --proxy ", proxy]);
    }
    job.push('\n');

    report::step("booting", &format!("kernel {}", kernel.version));
    let guest = Guest {
        emulator,
        kernel,
        limit: tests + AROUND,
        folder: folder.clone(),
    };
    let mut reported = 0;
    let start = Instant::now();
    let code = guest.run(&job, || {
        reported += progress(kernel, &folder, reported);
        if start.elapsed() > tests {
            // If it cannot be told, it is ended a little later.
            let _ = fs::write(folder.join(inside::STOP), []);
        }
    })?;
    if code != 0 {
        let output = fs::read_to_string(folder.join("output")).unwrap_or_default();
        bail!(
            "what ran in the guest failed with {code}: {}",
            output.trim()
        );
    }
    Ok(())
}

/// Tells of the results that came in since; returns how many.
fn progress(kernel: &Kernel, folder: &Path, reported: usize) -> usize {
    let text = fs::read_to_string(folder.join(record::FILE)).unwrap_or_default();
    let records = record::parse(&text).unwrap_or_default();
    let news = records.get(reported..).unwrap_or_default();
    for record in news {
        match record {
            Record::Test {
                name,
                outcome,
                seconds,
            } => {
                let verb = results::word(outcome);
                report::step(verb, &format!("{} {name} ({seconds:.1} s)", kernel.name));
            }
            Record::Failure { name, said } => {
                let said = said.replace('\n', "\n             | ");
                report::warn(&format!(
                    "{} {name} fails:\n             | {said}",
                    kernel.name
                ));
            }
            _ => {}
        }
    }
    news.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_runs_have_no_folder_in_common() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("vm");
        let first = hold(&folder).expect("nobody else is there");
        let error = hold(&folder).expect_err("the first is there");
        assert!(
            error.to_string().contains("wait until it has ended"),
            "{error}"
        );
        drop(first);
        hold(&folder).expect("the first has gone");
    }
}

//! `cargo xtask fuzz`: every fuzz target for a while, with instrumentation that needs neither a nightly compiler nor a tool of its own.

use std::fmt::{self, Display, Formatter};
use std::fs::{self, File};
use std::num::NonZero;
use std::panic::resume_unwind;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use anyhow::{Context as _, bail};

use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{process, report};

/// The binaries of the folder `fuzz`.
const TARGETS: [&str; 4] = ["config", "arguments", "previous_result", "lease_directory"];

/// How many inputs each gets in a repeatable run: about half a minute of one core. A lease directory is one of files.
const INPUTS: [u64; TARGETS.len()] = [4_000_000, 4_000_000, 6_000_000, 40_000];

/// What every repeatable run begins with; libFuzzer takes 0 for "a random one".
const SEED: u32 = 1;

/// What libFuzzer needs to see which ways an input took.
const INSTRUMENTATION: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
     -Cllvm-args=-sanitizer-coverage-trace-compares";

/// How long a target may take to end after its time.
const GRACE: Duration = Duration::from_secs(30);

/// How long a target may take for the inputs that it was asked to try.
const REPEATABLE_LIMIT: Duration = Duration::from_mins(10);

/// How many lines of a target that found something are shown.
const LINES: usize = 40;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// For how long each target is run, in seconds.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
    /// Gives each target the same inputs every time, whatever an earlier run has found.
    #[arg(long, conflicts_with = "seconds")]
    repeatable: bool,
    /// One target, not all.
    #[arg(value_parser = TARGETS)]
    target: Option<String>,
}

/// How much of a target is run.
#[derive(Clone, Copy)]
enum Extent {
    /// Other inputs each time, which build upon those that an earlier run found.
    Time(Duration),
    /// So many inputs, the same ones each time: a change is not refused for a fault that was there before it.
    Inputs(u64),
}

impl Display for Extent {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Time(time) => write!(f, "for {} s", time.as_secs()),
            Self::Inputs(inputs) => write!(f, "with {inputs} inputs"),
        }
    }
}

pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> anyhow::Result<()> {
    setup::ensure(workspace, Need::Test)?;
    let target = workspace.target.join("fuzz");
    // With a target named, the flags reach what is fuzzed, and not the build scripts.
    let host = host(workspace)?;
    report::step("building", "the fuzz targets");
    let mut build = workspace.cargo();
    build
        .current_dir(workspace.root.join("fuzz"))
        .env("CARGO_TARGET_DIR", &target)
        .env("RUSTFLAGS", INSTRUMENTATION)
        .args(["build", "--release", "--locked", "--quiet"])
        .args(["--target", &host]);
    process::run(&mut build)?;

    let one = arguments.target.as_deref();
    let targets: Vec<(&str, Extent)> = TARGETS
        .into_iter()
        .zip(INPUTS)
        .filter(|(name, _)| one.is_none_or(|one| one == *name))
        .map(|(name, inputs)| {
            let extent = if arguments.repeatable {
                Extent::Inputs(inputs)
            } else {
                Extent::Time(Duration::from_secs(arguments.seconds))
            };
            (name, extent)
        })
        .collect();
    let folder = target.join(&host).join("release");
    // One target for each core: none waits for another.
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    for targets in targets.chunks(cores) {
        let outcomes: Vec<_> = thread::scope(|scope| {
            let runs: Vec<_> = targets
                .iter()
                .map(|(name, extent)| {
                    report::step("fuzzing", &format!("{name} {extent}"));
                    let program = folder.join(name);
                    scope.spawn(move || fuzz(workspace, &program, *extent))
                })
                .collect();
            runs.into_iter().map(ScopedJoinHandle::join).collect()
        });
        for ((name, _), outcome) in targets.iter().zip(outcomes) {
            match outcome {
                Ok(runs) => report::step("survived", &format!("{name}: {} inputs", runs?)),
                Err(panic) => resume_unwind(panic),
            }
        }
    }
    Ok(())
}

/// Runs a target: how many inputs it was given.
fn fuzz(workspace: &Workspace, program: &Path, extent: Extent) -> anyhow::Result<u64> {
    let name = program.file_name().context("a target without a name")?;
    let folder = |what: &str| {
        let path = workspace.target.join("fuzz").join(what).join(name);
        fs::create_dir_all(&path)
            .map(|()| path.clone())
            .with_context(|| format!("cannot make {}", path.display()))
    };
    let findings = folder("findings")?;
    let log = folder("log")?.join("output");
    let output =
        File::create(&log).with_context(|| format!("cannot write to {}", log.display()))?;
    let mut fuzzer = Command::new(program);
    fuzzer
        .arg(format!("-artifact_prefix={}/", findings.display()))
        .arg(format!(
            "-dict={}",
            workspace.root.join("fuzz/words.dict").display()
        ))
        .args(["-timeout=10", "-print_final_stats=1"])
        .stdout(Stdio::null())
        .stderr(output);
    let limit = match extent {
        Extent::Time(time) => {
            fuzzer
                .arg(format!("-max_total_time={}", time.as_secs()))
                .arg(folder("corpus")?);
            time + GRACE
        }
        Extent::Inputs(inputs) => {
            fuzzer.args([format!("-runs={inputs}"), format!("-seed={SEED}")]);
            REPEATABLE_LIMIT
        }
    };
    let outcome = process::run_within(&mut fuzzer, limit);
    let said = fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
    let said = String::from_utf8_lossy(&said);
    outcome.with_context(|| {
        format!(
            "{} found something: the input is in {}; give that file to the same program to see it again. It ended with\n{}",
            program.display(),
            findings.display(),
            ending(&said)
        )
    })?;
    // A target that stops before its time without a word would be taken for one that found nothing.
    executed(&said).with_context(|| {
        format!(
            "{} does not say what it did:\n{}",
            program.display(),
            ending(&said)
        )
    })
}

/// How many inputs libFuzzer says that it tried.
fn executed(said: &str) -> Option<u64> {
    said.lines()
        .find_map(|line| line.strip_prefix("stat::number_of_executed_units:"))?
        .trim()
        .parse()
        .ok()
}

/// The last lines of a text.
fn ending(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// The triple of this machine.
fn host(workspace: &Workspace) -> anyhow::Result<String> {
    let output = workspace
        .cargo()
        .args(["--version", "--verbose"])
        .output()
        .context("cannot ask cargo for its host")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    match text.lines().find_map(|line| line.strip_prefix("host: ")) {
        Some(host) => Ok(host.to_owned()),
        None => bail!("cargo does not say its host: {text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_libfuzzer_did_is_read_from_its_last_words() {
        let said = "#2 INITED\nstat::number_of_executed_units: 9005\nstat::average_exec_per_sec:     1500\n";
        assert_eq!(executed(said), Some(9005));
        assert_eq!(executed("killed"), None);
    }

    #[test]
    fn every_target_of_the_folder_is_run() {
        let manifest = include_str!("../../fuzz/Cargo.toml");
        assert_eq!(manifest.matches("[[bin]]").count(), TARGETS.len());
        for target in TARGETS {
            assert!(
                manifest.contains(&format!("name = \"{target}\"")),
                "{target}"
            );
        }
    }
}

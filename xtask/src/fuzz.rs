//! `cargo xtask fuzz`: every fuzz target for a while, with instrumentation that needs neither a nightly compiler nor a tool of its own.

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

/// What libFuzzer needs to see which ways an input took.
const INSTRUMENTATION: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
     -Cllvm-args=-sanitizer-coverage-trace-compares";

/// How long a target may take to end after its time.
const GRACE: Duration = Duration::from_secs(30);

/// How many lines of a target that found something are shown.
const LINES: usize = 40;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// For how long each target is run, in seconds.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
    /// One target, not all.
    #[arg(value_parser = TARGETS)]
    target: Option<String>,
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
    let names: Vec<&str> = TARGETS
        .into_iter()
        .filter(|name| one.is_none_or(|one| one == *name))
        .collect();
    let folder = target.join(&host).join("release");
    // One target for each core: none waits for another.
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    for names in names.chunks(cores) {
        report::step(
            "fuzzing",
            &format!("{} for {} s", names.join(" and "), arguments.seconds),
        );
        let outcomes: Vec<_> = thread::scope(|scope| {
            let runs: Vec<_> = names
                .iter()
                .map(|name| {
                    let program = folder.join(name);
                    scope.spawn(move || fuzz(workspace, &program, arguments.seconds))
                })
                .collect();
            runs.into_iter().map(ScopedJoinHandle::join).collect()
        });
        for (name, outcome) in names.iter().zip(outcomes) {
            match outcome {
                Ok(runs) => report::step("survived", &format!("{name}: {} inputs", runs?)),
                Err(panic) => resume_unwind(panic),
            }
        }
    }
    Ok(())
}

/// Runs a target for its time: how many inputs it was given.
fn fuzz(workspace: &Workspace, program: &Path, seconds: u64) -> anyhow::Result<u64> {
    let name = program.file_name().context("a target without a name")?;
    let folder = |what: &str| {
        let path = workspace.target.join("fuzz").join(what).join(name);
        fs::create_dir_all(&path)
            .map(|()| path.clone())
            .with_context(|| format!("cannot make {}", path.display()))
    };
    let (corpus, findings) = (folder("corpus")?, folder("findings")?);
    let log = folder("log")?.join("output");
    let output =
        File::create(&log).with_context(|| format!("cannot write to {}", log.display()))?;
    let mut fuzzer = Command::new(program);
    fuzzer
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/", findings.display()))
        .arg(format!(
            "-dict={}",
            workspace.root.join("fuzz/words.dict").display()
        ))
        .args(["-timeout=10", "-print_final_stats=1"])
        .arg(&corpus)
        .stdout(Stdio::null())
        .stderr(output);
    let outcome = process::run_within(&mut fuzzer, Duration::from_secs(seconds) + GRACE);
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

//! `cargo xtask fuzz`: every fuzz target for a while, with instrumentation that needs neither a nightly compiler nor a tool of its own.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};

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
    let target = workspace.target.join("fuzz");
    // With a target named, the flags reach what is fuzzed, and not the build scripts.
    let host = host(workspace)?;
    report::step("building", "the fuzz targets");
    process::run(
        workspace
            .cargo()
            .current_dir(workspace.root.join("fuzz"))
            .env("CARGO_TARGET_DIR", &target)
            .env("RUSTFLAGS", INSTRUMENTATION)
            .args([
                "build",
                "--release",
                "--locked",
                "--quiet",
                "--target",
                &host,
            ]),
    )?;
    let one = arguments.target.as_deref();
    for name in TARGETS
        .into_iter()
        .filter(|name| one.is_none_or(|one| one == *name))
    {
        report::step("fuzzing", &format!("{name} for {} s", arguments.seconds));
        let corpus = target.join("corpus").join(name);
        let findings = target.join("findings").join(name);
        for folder in [&corpus, &findings] {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let mut fuzzer = Command::new(target.join(&host).join("release").join(name));
        fuzzer
            .arg(format!("-max_total_time={}", arguments.seconds))
            .arg(format!("-artifact_prefix={}/", findings.display()))
            .arg(format!(
                "-dict={}",
                workspace.root.join("fuzz/words.dict").display()
            ))
            .args(["-timeout=10", "-verbosity=0", "-print_final_stats=1"])
            .arg(&corpus);
        let limit = Duration::from_secs(arguments.seconds) + GRACE;
        process::run_within(&mut fuzzer, limit).with_context(|| {
            format!(
                "{name} found something: the input is in {}; give that file to the same program to see it again",
                findings.display()
            )
        })?;
    }
    Ok(())
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

//! One test in a process of its own, as nextest runs it outside; so one that hangs or crashes takes no other with it.

use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::test::FLANNEL;
use crate::vm::executables;
use crate::vm::record::{Outcome, Record};

/// How long one test may take. Emulation makes everything about ten times slower, and others run beside it; some have the programs of three nodes verified, twice.
const LIMIT: Duration = Duration::from_mins(20);

/// How many times longer than elsewhere the fixtures wait for what must come, by the variable that they look at.
const PATIENCE: (&str, &str) = ("UNDERPASS_TEST_PATIENCE", "4");

/// Which device containers get where a test does not say it.
const DEVICE: &str = "UNDERPASS_TEST_DEVICE";

/// Which rules of kube-proxy nodes have beside their firewall.
const PROXY: &str = "UNDERPASS_TEST_PROXY";

/// What was loaded before the test, in a folder of the guest's bpffs.
pub(super) const LOADED: (&str, &str) = ("UNDERPASS_TEST_LOADED", "/sys/fs/bpf/loaded");

/// What a test prints at the start of a line, with the reason behind it, before it ends early because the kernel lacks what it is about.
const NOT_HERE: &str = "not on this kernel: ";

/// How many of the last lines of a failing test's output are reported.
const LAST: usize = 12;

/// What all tests are run with.
pub(super) struct Bench<'a> {
    /// A file: once it is there, no test is begun.
    pub(super) stop: PathBuf,
    /// The folder where the output of those that fail is kept.
    pub(super) logs: PathBuf,
    /// None, and tests have their own default; so for the next.
    pub(super) device: Option<&'a str>,
    pub(super) proxy: Option<&'a str>,
}

/// A test of a file of tests.
pub(super) struct Test {
    bin: PathBuf,
    file: String,
    name: String,
}

/// How a try of a test ended.
pub(super) struct End {
    outcome: Outcome,
    seconds: f64,
    /// The last lines that it printed, if it failed.
    said: String,
}

impl End {
    /// What is reported of a try that failed.
    pub(super) fn failure(&self, name: &str) -> Option<Record> {
        (self.outcome == Outcome::Failed).then(|| Record::Failure {
            name: name.to_owned(),
            said: self.said.clone(),
        })
    }

    /// The same end, of the second try after one that failed.
    pub(super) fn second(mut self) -> Self {
        self.outcome = match self.outcome {
            Outcome::Passed => Outcome::Unsteady,
            // There was no time left for it, so the first try counts.
            Outcome::NotRun => Outcome::Failed,
            other => other,
        };
        self
    }

    /// What is reported of the test.
    pub(super) fn record(self, name: String) -> Record {
        Record::Test {
            name,
            outcome: self.outcome,
            seconds: self.seconds,
        }
    }
}

/// The tests of a file.
pub(super) fn list(bin: &Path, file: &str) -> anyhow::Result<Vec<Test>> {
    let output = Command::new(bin.join(file))
        .args(["--list", "--format", "terse"])
        .output()
        .with_context(|| format!("cannot start {file}"))?;
    if !output.status.success() {
        bail!(
            "{file} does not list its tests: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    let list = String::from_utf8_lossy(&output.stdout);
    Ok(list
        .lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(|name| Test {
            bin: bin.to_path_buf(),
            file: file.to_owned(),
            name: name.to_owned(),
        })
        .collect())
}

impl Test {
    /// With the name of its file in front.
    pub(super) fn full_name(&self) -> String {
        format!("{}::{}", self.file, self.name)
    }

    pub(super) fn run(&self, bench: &Bench<'_>) -> anyhow::Result<End> {
        let start = Instant::now();
        let mut said = String::new();
        let outcome = if bench.stop.exists() {
            Outcome::NotRun
        } else {
            let log = self.full_name().replace("::", ".");
            let log = bench.logs.join(format!("{log}.log"));
            let status = self.execute(&log, bench)?;
            let printed =
                fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
            let printed = String::from_utf8_lossy(&printed);
            let outcome = judge(status, &printed);
            if outcome == Outcome::Failed {
                said = last_lines(&printed);
            } else {
                fs::remove_file(&log)
                    .with_context(|| format!("cannot remove {}", log.display()))?;
            }
            outcome
        };
        Ok(End {
            outcome,
            seconds: start.elapsed().as_secs_f64(),
            said,
        })
    }

    /// `None` if it was ended because of its time.
    fn execute(&self, log: &Path, bench: &Bench<'_>) -> anyhow::Result<Option<ExitStatus>> {
        let output =
            File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
        let mut child = Command::new(self.bin.join(&self.file))
            .args(["--exact", &self.name, "--nocapture"])
            .env("UNDERPASS_BIN", self.bin.join("underpass"))
            .env("UNDERPASS_IPAM_BIN", self.bin.join("underpass-ipam"))
            .env(FLANNEL, self.bin.join(executables::FLANNEL))
            .env("CI", "true")
            .env(PATIENCE.0, PATIENCE.1)
            .env(LOADED.0, LOADED.1)
            .envs(bench.device.map(|device| (DEVICE, device)))
            .envs(bench.proxy.map(|proxy| (PROXY, proxy)))
            .stdin(Stdio::null())
            .stdout(output.try_clone().context("cannot share a log")?)
            .stderr(output)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", self.file))?;
        let start = Instant::now();
        loop {
            if let Some(status) = child.try_wait().context("cannot wait for a test")? {
                return Ok(Some(status));
            }
            if start.elapsed() > LIMIT {
                let group = Pid::from_raw(child.id().try_into().context("no process number")?);
                // It may have ended in between; either way it is reaped.
                let _ = killpg(group, Signal::SIGKILL);
                child.wait().context("cannot wait for a test")?;
                return Ok(None);
            }
            sleep(Duration::from_millis(20));
        }
    }
}

fn judge(status: Option<ExitStatus>, printed: &str) -> Outcome {
    let reason = printed.lines().find_map(|line| line.strip_prefix(NOT_HERE));
    match (status, reason) {
        (Some(status), _) if !status.success() => Outcome::Failed,
        (None, _) => Outcome::Failed,
        (_, Some(reason)) => Outcome::NotHere(reason.to_owned()),
        // An ignored test succeeds without being one that passed.
        _ if printed.contains("test result: ok. 1 passed") => Outcome::Passed,
        _ => Outcome::NotRun,
    }
}

/// The last lines with something in them: a failing test says there why.
fn last_lines(printed: &str) -> String {
    let lines: Vec<&str> = printed.lines().filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(LAST)..].join("\n")
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    const PASSED: &str = "test result: ok. 1 passed; 0 failed; 0 ignored;";

    #[test]
    fn a_reason_given_is_no_pass_and_a_failure_stays_one() {
        let (success, failure) = (ExitStatus::from_raw(0), ExitStatus::from_raw(101 << 8));
        let excused = format!("running 1 test\nnot on this kernel: no tcx before 6.6\n{PASSED}");
        assert_eq!(judge(Some(success), PASSED), Outcome::Passed);
        assert_eq!(
            judge(Some(success), &excused),
            Outcome::NotHere("no tcx before 6.6".to_owned())
        );
        assert_eq!(judge(Some(failure), &excused), Outcome::Failed);
        assert_eq!(judge(None, PASSED), Outcome::Failed);
        assert_eq!(
            judge(
                Some(success),
                "test result: ok. 0 passed; 0 failed; 1 ignored;"
            ),
            Outcome::NotRun
        );
    }

    #[test]
    fn a_second_try_hides_no_failure() {
        let end = |outcome| End {
            outcome,
            seconds: 1.0,
            said: String::new(),
        };
        for (second, expected) in [
            (Outcome::Passed, Outcome::Unsteady),
            (Outcome::NotRun, Outcome::Failed),
            (Outcome::Failed, Outcome::Failed),
        ] {
            assert_eq!(end(second).second().outcome, expected);
        }
    }

    #[test]
    fn the_last_lines_are_those_with_something_in_them() {
        let printed: Vec<String> = (1..20).map(|n| n.to_string()).collect();
        let printed = printed.join("\n\n");
        let lines = last_lines(&printed);
        assert!(lines.starts_with("8\n9\n"), "{lines}");
        assert!(lines.ends_with("\n19"), "{lines}");
        assert_eq!(last_lines("one"), "one");
    }
}

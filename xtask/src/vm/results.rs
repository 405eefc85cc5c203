//! The results of one kernel, and what is wrong with them.

use std::fs;
use std::path::Path;

use anyhow::Context as _;

use super::kernel::Kernel;
use super::record::{self, Outcome, Program, Record};

/// Instructions that a program may cost the verifier: half of its limit, so that a little more does not break an upgrade.
const VERIFIED: u64 = 500_000;
/// Bytes of stack that kernels allow, reckoned as 5.10 and 6.1 do.
const STACK: u64 = 512;

/// Everything a guest reported.
#[derive(Debug)]
pub(super) struct Results {
    /// Of the kernel's package.
    pub(super) version: String,
    records: Vec<Record>,
}

/// The verb of a report about a test.
pub(super) fn word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Passed => "passed",
        Outcome::Unsteady => "passed then",
        Outcome::Failed => "FAILED",
        Outcome::NotHere(_) => "not here",
        Outcome::NotRun => "not run",
    }
}

impl Results {
    /// Reads what a guest left. One that left nothing has no results.
    pub(super) fn read(kernel: &Kernel, folder: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(folder.join(record::FILE)).unwrap_or_default();
        let records = record::parse(&text)
            .with_context(|| format!("{} is not understood", folder.display()))?;
        Ok(Self {
            version: kernel.version.clone(),
            records,
        })
    }

    /// Those of a guest that reported this.
    #[cfg(test)]
    pub(super) fn of(version: &str, records: &[Record]) -> Self {
        Self {
            version: version.to_owned(),
            records: records.to_vec(),
        }
    }

    pub(super) fn programs(&self) -> impl Iterator<Item = &Program> {
        self.records.iter().filter_map(|record| match record {
            Record::Program(program) => Some(program),
            _ => None,
        })
    }

    /// Name, whether it is there, what it is good for.
    pub(super) fn features(&self) -> impl Iterator<Item = (&str, bool, &str)> {
        self.records.iter().filter_map(|record| match record {
            Record::Feature {
                name,
                present,
                purpose,
                ..
            } => Some((name.as_str(), *present, purpose.as_str())),
            _ => None,
        })
    }

    /// What was to be run and is the name of no test.
    pub(super) fn unknown(&self, chosen: &[&str]) -> Vec<String> {
        let is_known = |text: &&str| self.tests().any(|(name, _)| name.contains(*text));
        let unknown = chosen.iter().filter(|text| !is_known(text));
        unknown
            .map(|text| format!("kernel {}: no test has {text:?} in its name", self.version))
            .collect()
    }

    pub(super) fn tests(&self) -> impl Iterator<Item = (&str, &Outcome)> {
        self.records.iter().filter_map(|record| match record {
            Record::Test { name, outcome, .. } => Some((name.as_str(), outcome)),
            _ => None,
        })
    }

    /// In one line.
    pub(super) fn summary(&self) -> String {
        let count = |wanted: fn(&Outcome) -> bool| {
            self.tests().filter(|(_, outcome)| wanted(outcome)).count()
        };
        format!(
            "{} programs, {} tests passed, {} more at the second try, {} failed, {} not on this kernel, {} not run",
            self.programs().count(),
            count(|outcome| *outcome == Outcome::Passed),
            count(|outcome| *outcome == Outcome::Unsteady),
            count(|outcome| *outcome == Outcome::Failed),
            count(|outcome| matches!(outcome, Outcome::NotHere(_))),
            count(|outcome| *outcome == Outcome::NotRun),
        )
    }

    /// What is not as it must be, a sentence each; with `all`, every test must have run.
    pub(super) fn faults(&self, all: bool) -> Vec<String> {
        let mut faults: Vec<String> = self
            .records
            .iter()
            .filter_map(|record| match record {
                Record::NotLoaded { message } => {
                    Some(format!("the programs do not load: {message}"))
                }
                Record::Complaint { line } => Some(format!("the kernel complains: {line}")),
                Record::Test { name, outcome, .. } => match outcome {
                    Outcome::Failed => Some(format!("{name} failed")),
                    Outcome::NotRun if all => Some(format!("{name} was not run")),
                    Outcome::NotRun | Outcome::Passed | Outcome::Unsteady | Outcome::NotHere(_) => {
                        None
                    }
                },
                Record::Program(program) => over_budget(program),
                Record::Feature { .. } | Record::Failure { .. } | Record::Complete => None,
            })
            .collect();
        if !self.records.contains(&Record::Complete) {
            faults.push("the guest did not get to the end".to_owned());
        }
        faults
            .into_iter()
            .map(|fault| format!("kernel {}: {fault}", self.version))
            .collect()
    }
}

fn over_budget(program: &Program) -> Option<String> {
    let Program {
        name,
        verified,
        stack,
        ..
    } = program;
    if *verified > VERIFIED {
        return Some(format!(
            "{name} costs the verifier {verified} instructions, its budget is {VERIFIED}"
        ));
    }
    (*stack > STACK).then(|| format!("{name} takes {stack} bytes of stack, its budget is {STACK}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(verified: u64, stack: u64) -> Record {
        Record::Program(Program {
            name: "to_wire".to_owned(),
            verified,
            stack,
            milliseconds: 1,
        })
    }

    fn test(outcome: Outcome) -> Record {
        Record::Test {
            name: "netns::hops::one".to_owned(),
            outcome,
            seconds: 1.0,
        }
    }

    fn faults(records: &[Record]) -> Vec<String> {
        Results::of("5.10-1", records).faults(true)
    }

    #[test]
    fn a_complete_run_within_budgets_has_no_fault() {
        let excused = test(Outcome::NotHere("no tcx".to_owned()));
        let records = [
            program(VERIFIED, STACK),
            test(Outcome::Passed),
            test(Outcome::Unsteady),
            excused,
            Record::Complete,
        ];
        assert_eq!(faults(&records), [""; 0]);
    }

    #[test]
    fn whatever_is_wrong_is_a_fault_that_names_the_kernel() {
        for (record, expected) in [
            (program(VERIFIED + 1, 0), "500001 instructions"),
            (program(0, STACK + 1), "513 bytes"),
            (test(Outcome::Failed), "netns::hops::one failed"),
            (test(Outcome::NotRun), "netns::hops::one was not run"),
        ] {
            let found = faults(&[record, Record::Complete]);
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].contains(expected), "{found:?}");
            assert!(found[0].starts_with("kernel 5.10-1: "), "{found:?}");
        }
        assert_eq!(
            faults(&[test(Outcome::Passed)]),
            ["kernel 5.10-1: the guest did not get to the end"]
        );
    }
}

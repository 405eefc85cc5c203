//! What a guest reports: a JSON document a line, each written when it is known, so that a guest that dies has told all up to there.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

/// The file of a guest's folder that has them.
pub(super) const FILE: &str = "results.jsonl";

/// One thing known.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Record {
    Program(Program),
    /// The plugin could not load its programs: what it said.
    NotLoaded {
        message: String,
    },
    Feature {
        name: String,
        present: bool,
        reason: String,
        purpose: String,
    },
    Test {
        name: String,
        outcome: Outcome,
        /// How long it took.
        seconds: f64,
    },
    /// A try of a test that failed. The test itself has its record after its last try.
    Failure {
        name: String,
        /// The end of what it printed.
        said: String,
    },
    /// The kernel logged a warning or worse.
    Complaint {
        line: String,
    },
    /// All that was to be done was done.
    Complete,
}

/// What the verifier said of a program.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Program {
    pub(super) name: String,
    /// Instructions that the verifier went through; its limit is a million.
    pub(super) verified: u64,
    /// Bytes of the deepest chain of calls, each frame rounded to 32 as 5.10 and 6.1 do; their limit is 512.
    pub(super) stack: u64,
    /// From the system call to its return: verification and compilation.
    pub(super) milliseconds: u64,
}

/// How a test ended, after a second try where the first one failed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Outcome {
    Passed,
    /// It failed beside others and passed alone, after all of them.
    Unsteady,
    Failed,
    /// This kernel lacks something that the test is about.
    NotHere(String),
    /// The time for all tests was over before its turn.
    NotRun,
}

/// Where a guest writes.
pub(super) struct Writer(File);

impl Writer {
    pub(super) fn create(folder: &Path) -> anyhow::Result<Self> {
        let path = folder.join(FILE);
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self(file))
    }

    pub(super) fn write(&mut self, record: &Record) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(record).context("a record is no JSON")?;
        line.push(b'\n');
        self.0.write_all(&line).context("cannot write a result")
    }
}

/// The complete lines of a text. The last one may be about to be written.
pub(super) fn parse(text: &str) -> anyhow::Result<Vec<Record>> {
    let end = text.rfind('\n').map_or(0, |end| end + 1);
    text[..end]
        .lines()
        .map(|line| serde_json::from_str(line).with_context(|| format!("no result: {line}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again_up_to_the_last_whole_line() {
        let folder = tempfile::tempdir().expect("a folder for the file");
        let known = Record::Test {
            name: "netns::hops::one".to_owned(),
            outcome: Outcome::NotHere("no tcx".to_owned()),
            seconds: 1.5,
        };
        let mut writer = Writer::create(folder.path()).expect("the file can be made");
        writer.write(&known).expect("the record can be written");
        writer
            .write(&Record::Complete)
            .expect("the record can be written");
        let mut text =
            std::fs::read_to_string(folder.path().join(FILE)).expect("the file can be read");
        text.push_str("{\"test\":{\"na");
        assert_eq!(
            parse(&text).expect("all lines are records"),
            [known, Record::Complete]
        );
    }
}

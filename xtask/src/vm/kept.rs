//! docs/kernels/*.jsonl: what each test said on a kernel when it ran there last, and of which revision that was.
//!
//! All tests take hours on one emulated kernel. So they are run in parts, and what is known is joined here.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::record::Outcome;
use super::results::Results;

/// Where the files are, one for each kernel, named by it.
const FOLDER: &str = "docs/kernels";
/// What follows the kernel in the name of its file.
const SUFFIX: &str = ".jsonl";

/// What is known of a test on a kernel.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Known {
    /// With the name of its file in front.
    pub(super) name: String,
    pub(super) outcome: Outcome,
    /// The commit that was tested.
    pub(super) revision: String,
    /// The version of the kernel's package.
    pub(super) package: String,
    /// When it was run: seconds since 1970.
    pub(super) at: u64,
}

/// What is known of a kernel.
pub(super) struct Kept {
    /// As `5.10`.
    pub(super) kernel: String,
    tests: BTreeMap<String, Known>,
}

impl Kept {
    /// Reads what is known of all kernels that ever ran, in any order.
    pub(super) fn all(root: &Path) -> anyhow::Result<Vec<Self>> {
        let folder = root.join(FOLDER);
        let entries =
            fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
        let mut all = Vec::new();
        for entry in entries {
            let file = entry.context("cannot read a folder")?.file_name();
            if let Some(kernel) = file.to_str().and_then(|file| file.strip_suffix(SUFFIX)) {
                all.push(Self::read(root, kernel)?);
            }
        }
        Ok(all)
    }

    /// Reads what is known of a kernel, by its name in the page's tables. Of one that never ran, that is nothing.
    pub(super) fn read(root: &Path, kernel: &str) -> anyhow::Result<Self> {
        let path = file(root, kernel);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        };
        let known = text.lines().map(serde_json::from_str::<Known>);
        let tests = known
            .map(|known| known.map(|known| (known.name.clone(), known)))
            .collect::<Result<_, _>>()
            .with_context(|| format!("{} has a line that is no result", path.display()))?;
        Ok(Self {
            kernel: kernel.to_owned(),
            tests,
        })
    }

    pub(super) fn write(&self, root: &Path) -> anyhow::Result<()> {
        let path = file(root, &self.kernel);
        let mut text = String::new();
        for known in self.tests.values() {
            text += &serde_json::to_string(known).context("a result is no JSON")?;
            text.push('\n');
        }
        let folder = path.parent().context("a file without a folder")?;
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Takes over what a run found. A test that it did not reach keeps what was known of it.
    pub(super) fn join(&mut self, results: &Results, revision: &str) -> anyhow::Result<()> {
        let at = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .context("the clock is before 1970")?
            .as_secs();
        for (name, outcome) in results.tests() {
            if *outcome == Outcome::NotRun {
                continue;
            }
            let known = Known {
                name: name.to_owned(),
                outcome: outcome.clone(),
                revision: revision.to_owned(),
                package: results.version.clone(),
                at,
            };
            self.tests.insert(known.name.clone(), known);
        }
        Ok(())
    }

    /// Forgets tests that there are no longer.
    pub(super) fn keep_only(&mut self, names: &[String]) {
        self.tests.retain(|name, _| names.contains(name));
    }

    pub(super) fn get(&self, name: &str) -> Option<&Known> {
        self.tests.get(name)
    }

    pub(super) fn tests(&self) -> impl Iterator<Item = &Known> {
        self.tests.values()
    }

    /// The names of the tests that have no need to be run again, those that ran longest ago first.
    pub(super) fn oldest_first(&self) -> Vec<&str> {
        let mut tests: Vec<&Known> = self
            .tests
            .values()
            .filter(|known| known.outcome != Outcome::Failed)
            .collect();
        tests.sort_by_key(|known| known.at);
        tests.into_iter().map(|known| known.name.as_str()).collect()
    }
}

fn file(root: &Path, kernel: &str) -> PathBuf {
    root.join(FOLDER).join(format!("{kernel}{SUFFIX}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::record::Record;

    fn ran(name: &str, outcome: Outcome) -> Record {
        Record::Test {
            name: name.to_owned(),
            outcome,
            seconds: 1.0,
        }
    }

    #[test]
    fn a_later_run_replaces_what_it_reached() {
        let root = tempfile::tempdir().expect("a folder");
        let mut kept = Kept::read(root.path(), "5.10").expect("nothing is known");
        let first = Results::of(
            "5.10-1",
            &[ran("a", Outcome::Failed), ran("b", Outcome::Passed)],
        );
        kept.join(&first, "one").expect("a clock");
        let second = Results::of(
            "5.10-2",
            &[ran("a", Outcome::Passed), ran("b", Outcome::NotRun)],
        );
        kept.join(&second, "two").expect("a clock");
        kept.write(root.path()).expect("it can be written");

        let mut again = Kept::read(root.path(), "5.10").expect("it can be read");
        let of = |kept: &Kept, name| {
            let known = kept.get(name)?;
            Some((
                known.outcome.clone(),
                known.revision.clone(),
                known.package.clone(),
            ))
        };
        let passed = |revision: &str, package: &str| {
            Some((Outcome::Passed, revision.to_owned(), package.to_owned()))
        };
        assert_eq!(of(&again, "a"), passed("two", "5.10-2"));
        assert_eq!(of(&again, "b"), passed("one", "5.10-1"));

        again.keep_only(&["a".to_owned()]);
        assert_eq!(of(&again, "b"), None);
    }

    /// What failed has no turn: it is as if it had never run.
    #[test]
    fn what_ran_longest_ago_comes_first() {
        let known = |name: &str, outcome, at| Known {
            name: name.to_owned(),
            outcome,
            revision: "one".to_owned(),
            package: "5.10-1".to_owned(),
            at,
        };
        let tests = [
            known("a", Outcome::Passed, 3),
            known("b", Outcome::Unsteady, 1),
            known("c", Outcome::Passed, 2),
            known("d", Outcome::Failed, 0),
        ];
        let kept = Kept {
            kernel: "5.10".to_owned(),
            tests: tests.map(|known| (known.name.clone(), known)).into(),
        };
        assert_eq!(kept.oldest_first(), ["b", "c", "a"]);
    }
}

//! What was checked and how it went, a line each.

use anstream::println;
use anstyle::{AnsiColor, Style};
use anyhow::Result;

const GOOD: Style = AnsiColor::Green.on_default().bold();
const BAD: Style = AnsiColor::Red.on_default().bold();

/// How many checks went well, and which did not.
#[derive(Debug, Default)]
pub(crate) struct Score {
    passed: usize,
    failed: Vec<String>,
}

impl Score {
    /// Counts and tells the outcome of a check.
    pub(crate) fn record(&mut self, what: &str, outcome: &Result<()>) {
        match outcome {
            Ok(()) => {
                self.passed += 1;
                println!("{GOOD}PASS{GOOD:#} {what}");
            }
            Err(error) => {
                self.failed.push(what.to_owned());
                println!("{BAD}FAIL{BAD:#} {what}: {error:#}");
            }
        }
    }

    /// Whether nothing has failed so far.
    pub(crate) fn is_clean(&self) -> bool {
        self.failed.is_empty()
    }

    /// Tells the end of it: whether nothing failed, and something passed.
    pub(crate) fn summary(&self) -> bool {
        println!();
        for what in &self.failed {
            println!("{BAD}FAIL{BAD:#} {what}");
        }
        println!("{} passed, {} failed", self.passed, self.failed.len());
        self.failed.is_empty() && self.passed > 0
    }
}

//! How long each step of a call took: for the log, and the last ADD's for `underpass status`.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use tracing::{debug, warn};
use underpass_dataplane::lock::file_of;

/// What the file of the last ADD is for, see [`file_of`].
const PURPOSE: &str = "add";
/// An ADD that takes longer says why, whether somebody asks or not.
const LONG: Duration = Duration::from_secs(1);

/// Runs from the start of a call to its end.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    start: Instant,
    last: Instant,
    steps: Vec<Step>,
}

/// A step and its time.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Step {
    pub(crate) step: String,
    /// Microseconds.
    pub(crate) us: u64,
}

/// The times of a whole call.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Times {
    /// Microseconds.
    pub(crate) total_us: u64,
    /// In the order in which they were taken.
    pub(crate) steps: Vec<Step>,
}

impl Stopwatch {
    /// Starts.
    pub(crate) fn start() -> Self {
        let now = Instant::now();
        Self {
            start: now,
            last: now,
            steps: Vec::new(),
        }
    }

    /// Notes and logs the time since the last lap.
    pub(crate) fn lap(&mut self, step: &'static str) {
        let now = Instant::now();
        let us = micros(now - self.last);
        debug!(step, us, total_us = micros(now - self.start));
        self.last = now;
        let step = step.to_owned();
        self.steps.push(Step { step, us });
    }

    /// Ends an ADD on the node whose pins are at `root`: the times are kept for [`Times::of_last_add`], and
    /// an ADD that took long says where.
    pub(crate) fn keep(self, root: &Path) {
        let times = Times {
            total_us: micros(self.last - self.start),
            steps: self.steps,
        };
        if times.total_us > micros(LONG)
            && let Some(slowest) = times.by_length().first()
        {
            warn!(
                "this ADD took {} ms, {} of them in the step {:?}{}",
                times.total_us / 1000,
                slowest.us / 1000,
                slowest.step,
                if slowest.step == "pins" {
                    ": the first one since boot loads the programs, unless `underpass load` did it before"
                } else {
                    ""
                }
            );
        }
        // Nobody depends on it.
        if let Err(error) = times.write(&file_of(root, PURPOSE)) {
            debug!("cannot keep the times of this ADD: {error}");
        }
    }
}

impl Times {
    /// Reads those of the last ADD on the node whose pins are at `root`, if there was one since boot.
    pub(crate) fn of_last_add(root: &Path) -> Option<Self> {
        let text = fs::read(file_of(root, PURPOSE)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Lists the steps, the longest first.
    pub(crate) fn by_length(&self) -> Vec<&Step> {
        let mut steps: Vec<_> = self.steps.iter().collect();
        steps.sort_by_key(|step| std::cmp::Reverse(step.us));
        steps
    }

    /// Always as long, so that the file need not be emptied first: what another ADD writes at the same time is in it as a whole, or not at all, and a file system
    /// that keeps a journal (of an ext4 that holds `/run`) does not hurry to write what was emptied.
    fn write(&self, file: &Path) -> io::Result<()> {
        const LENGTH: usize = 4096;
        let mut text = serde_json::to_vec(self)?;
        text.resize(text.len().next_multiple_of(LENGTH), b' ');
        let mut options = File::options();
        options.create(true).truncate(false).write(true).mode(0o600);
        options.open(file)?.write_all(&text)
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_step_comes_first() {
        let step = |step: &str, us| Step {
            step: step.to_owned(),
            us,
        };
        let times = Times {
            total_us: 6,
            steps: vec![step("one", 1), step("three", 3), step("two", 2)],
        };
        let names: Vec<_> = times
            .by_length()
            .into_iter()
            .map(|step| step.step.as_str())
            .collect();
        assert_eq!(names, ["three", "two", "one"]);
    }
}

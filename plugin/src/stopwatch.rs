//! How long each step of a call took, for `UNDERPASS_LOG=debug`.

use std::time::{Duration, Instant};

/// Runs from the start of a call to its end.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    start: Instant,
    last: Instant,
}

impl Stopwatch {
    /// Starts.
    pub(crate) fn start() -> Self {
        let now = Instant::now();
        Self {
            start: now,
            last: now,
        }
    }

    /// Logs the time since the last lap, and since the start.
    pub(crate) fn lap(&mut self, step: &'static str) {
        let now = Instant::now();
        let micros = |duration: Duration| duration.as_micros();
        tracing::debug!(
            step,
            us = micros(now - self.last),
            total_us = micros(now - self.start)
        );
        self.last = now;
    }
}

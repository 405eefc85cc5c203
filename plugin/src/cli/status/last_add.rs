//! The part of the status that says where the time of the last ADD went.

use std::io;

use super::{FAINT, HEADING};
use crate::stopwatch::Times;

/// How many steps are printed; `--json` has them all.
const SHOWN: usize = 5;

pub(super) fn print(times: &Times, out: &mut impl io::Write) -> io::Result<()> {
    writeln!(
        out,
        "\n{HEADING}Last ADD{HEADING:#}\n  {} ms, most of it in:",
        milliseconds(times.total_us)
    )?;
    for step in times.by_length().into_iter().take(SHOWN) {
        writeln!(
            out,
            "  {:>12} ms  {FAINT}{}{FAINT:#}",
            milliseconds(step.us),
            step.step
        )?;
    }
    Ok(())
}

fn milliseconds(us: u64) -> String {
    format!("{}.{:02}", us / 1000, us % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn microseconds_are_printed_as_milliseconds() {
        assert_eq!(milliseconds(0), "0.00");
        assert_eq!(milliseconds(4_709), "4.70");
        assert_eq!(milliseconds(1_234_567), "1234.56");
    }
}

//! What a person reads: all of it on stderr, coloured on a terminal only.

use anstream::eprintln;
use anstyle::{AnsiColor, Style};

const DONE: Style = AnsiColor::Green.on_default().bold();
const WARN: Style = AnsiColor::Yellow.on_default().bold();
const FAIL: Style = AnsiColor::Red.on_default().bold();

/// Something begins or was done: a verb, and what it is done to.
pub(crate) fn step(verb: &str, what: &str) {
    eprintln!("{DONE}{verb:>12}{DONE:#} {what}");
}

/// Something was left out or is not as it should be.
pub(crate) fn warn(what: &str) {
    eprintln!("{WARN}{:>12}{WARN:#} {what}", "warning");
}

/// Why the command failed, outermost reason first.
pub(crate) fn error(error: &anyhow::Error) {
    eprintln!("{FAIL}error:{FAIL:#} {error:#}");
}

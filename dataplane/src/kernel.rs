//! Which kernel runs, and what it lets this process load.

use std::fs;

/// Asks for the release of the running kernel, as `uname -r` prints it.
#[must_use]
pub fn release() -> String {
    nix::sys::utsname::uname()
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// Asks for the first two numbers of the release; they are zero if it has none.
#[must_use]
pub fn version() -> (u32, u32) {
    numbers(&release())
}

fn numbers(release: &str) -> (u32, u32) {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next())
}

/// Tells whether this process has the capabilities with which programs of any kind are loaded: `CAP_SYS_ADMIN`, or
/// `CAP_BPF` and `CAP_PERFMON` (Linux 5.8). If that can't be read, it may.
#[must_use]
pub fn lets_load() -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    const PERFMON_AND_BPF: u64 = 1 << 38 | 1 << 39;
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok());
    effective.is_none_or(|has| has & SYS_ADMIN != 0 || has & PERFMON_AND_BPF == PERFMON_AND_BPF)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_begins_with_two_numbers() {
        assert_eq!(numbers("5.10.0-33-amd64"), (5, 10));
        assert_eq!(numbers("7.3-rc1"), (7, 3));
        assert_eq!(numbers(""), (0, 0));
    }
}

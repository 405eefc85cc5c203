//! Which kernel runs, and what it lets this process load.

use std::fs;

use crate::Error;

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
    let (major, minor, _) = all_numbers(release);
    (major, minor)
}

fn all_numbers(release: &str) -> (u32, u32, u32) {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next(), next())
}

/// Tells whether the kernel has IPv6, or may come to have it before it is started anew. With `ipv6.disable=1` it never does (`disable_ipv6_mod` of
/// `net/ipv6/af_inet6.c`: nobody may write that parameter, 2.6.30 to 6.18).
pub(crate) fn may_have_ipv6() -> bool {
    let disabled = fs::read_to_string("/sys/module/ipv6/parameters/disable");
    disabled.map_or(true, |text| text.trim() != "1")
}

/// Tells whether a program at tc may be interrupted by another one of the same CPU, in the middle of what both keep for this CPU. So it is with
/// `PREEMPT_RT` since 6.18 and 6.12.57 (3253cb49cbad), unless the kernel was built with `PREEMPT_RT_NEEDS_BH_LOCK`.
#[must_use]
pub fn interrupts_programs() -> bool {
    let Ok(name) = nix::sys::utsname::uname() else {
        return false;
    };
    let (version, release) = (
        name.version().to_string_lossy(),
        name.release().to_string_lossy(),
    );
    may_interrupt(&version, &release, || {
        let files = [
            format!("/boot/config-{release}"),
            format!("/lib/modules/{release}/config"),
        ];
        files
            .into_iter()
            .find_map(|file| fs::read_to_string(file).ok())
    })
}

/// Fails on such a kernel.
pub fn require_uninterrupted() -> Result<(), Error> {
    if interrupts_programs() {
        return Err(Error::Interrupted(release()));
    }
    Ok(())
}

/// The same for a kernel of that version (`uname -v`) and release, whose configuration may be found.
fn may_interrupt(version: &str, release: &str, config: impl FnOnce() -> Option<String>) -> bool {
    const UNLOCKED: (u32, u32, u32) = (6, 12, 57);
    const LOCK: &str = "CONFIG_PREEMPT_RT_NEEDS_BH_LOCK";
    if !version.contains("PREEMPT_RT") || all_numbers(release) < UNLOCKED {
        return false;
    }
    // A configuration without a word of it is of a kernel that has no other way.
    config().is_none_or(|config| config.contains(LOCK) && !config.contains(&format!("{LOCK}=y")))
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

    #[test]
    fn a_real_time_kernel_may_interrupt_programs() {
        const DYNAMIC: &str = "#1 SMP PREEMPT_DYNAMIC Debian 6.12.57-1 (2025-11-05)";
        const RT: &str = "#1 SMP PREEMPT_RT Debian 6.12.57-1 (2025-11-05)";
        const UNLOCKED: &str =
            "CONFIG_PREEMPT_RT=y\n# CONFIG_PREEMPT_RT_NEEDS_BH_LOCK is not set\n";
        const LOCKED: &str = "CONFIG_PREEMPT_RT=y\nCONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y\n";
        const EARLIER: &str = "CONFIG_PREEMPT_RT=y\n";
        let cases = [
            (DYNAMIC, "6.18.1-amd64", None, false),
            (RT, "6.18.1-rt-amd64", None, true),
            (RT, "6.18.1-rt-amd64", Some(UNLOCKED), true),
            (RT, "6.18.1-rt-amd64", Some(LOCKED), false),
            (RT, "6.12.57+deb13-rt-amd64", None, true),
            (RT, "6.12.57+deb13-rt-amd64", Some(EARLIER), false),
            (RT, "6.12.56+deb13-rt-amd64", None, false),
            (RT, "5.14.0-570.el9.x86_64+rt", None, false),
        ];
        for (version, release, config, expected) in cases {
            let config = || config.map(str::to_owned);
            assert_eq!(
                may_interrupt(version, release, config),
                expected,
                "{release}"
            );
        }
    }
}

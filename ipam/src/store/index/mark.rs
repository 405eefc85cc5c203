//! The mark: when, in which boot and on which machine the index was complete.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;

use super::super::error::{Attempt, StoreError};
use super::super::file::text;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const MACHINE_ID: &str = "/etc/machine-id";

/// How far in the past the mark is.
const MARK_AGE: Duration = Duration::from_hours(24);

/// What an index says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// The boot in which every link of the index was made, or an earlier one's.
    pub(super) boot: Boot,
    /// Where that was.
    pub(super) machine: Machine,
    /// The modification time of the folder of leases with which the index was complete.
    pub(super) time: SystemTime,
}

impl Mark {
    /// The mark in a file; nothing if there is none, or half of one.
    pub(super) fn read(path: &Path) -> Option<Self> {
        let mark = text(path)?;
        let mut fields = mark.strip_suffix('\n')?.split(' ');
        let boot = Boot::parse(fields.next()?);
        let seconds = fields.next()?.parse().ok()?;
        let nanos = fields.next()?.parse().ok()?;
        let machine = Machine::parse(fields.next()?);
        if nanos >= 1_000_000_000 {
            return None;
        }
        let time = SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanos))?;
        Some(Self {
            boot,
            machine,
            time,
        })
    }

    /// Sets the time of the folder `leases` to one that no clock shows again, and notes it as the file
    /// system stores it, which may be coarser.
    pub(super) fn write(
        path: &Path,
        leases: &Path,
        boot: &Boot,
        machine: &Machine,
    ) -> Result<SystemTime, StoreError> {
        let time = past(SystemTime::now());
        set_modified(leases, time).attempt("set the time of", leases)?;
        let time = fs::metadata(leases)
            .and_then(|meta| meta.modified())
            .attempt("look at the folder", leases)?;
        let since = time
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let (seconds, nanos) = (since.as_secs(), since.subsec_nanos());
        fs::write(path, format!("{boot} {seconds} {nanos} {machine}\n")).attempt("write", path)?;
        Ok(time)
    }
}

/// A time that no clock shows again, and none before 1970, which can't be noted: there a clock begins that nobody has set.
fn past(now: SystemTime) -> SystemTime {
    let first = SystemTime::UNIX_EPOCH;
    now.checked_sub(MARK_AGE).unwrap_or(first).max(first)
}

pub(super) fn set_modified(folder: &Path, time: SystemTime) -> std::io::Result<()> {
    let since = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_err(std::io::Error::other)?;
    utimensat(
        AT_FDCWD,
        folder,
        &TimeSpec::UTIME_OMIT,
        &TimeSpec::from_duration(since),
        UtimensatFlags::FollowSymlink,
    )
    .map_err(std::io::Error::from)
}

/// A boot of the kernel, as it names it; nothing if that is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Boot(Option<String>);

impl Boot {
    pub(super) fn current() -> Self {
        Self::parse(text(Path::new(BOOT_ID)).unwrap_or_default().trim())
    }

    fn parse(text: &str) -> Self {
        let is_uuid = text.len() == 36
            && text
                .bytes()
                .all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
        Self(is_uuid.then(|| text.to_owned()))
    }

    /// Whether both are known, and not the same.
    pub(super) fn is_over_in(&self, now: &Self) -> bool {
        self.0.is_some() && now.0.is_some() && self != now
    }
}

impl fmt::Display for Boot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_deref().unwrap_or("unknown"))
    }
}

/// On which machine the leases were made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Machine {
    /// The one with this id, and only there.
    Known(String),
    /// Nobody knows.
    Unknown,
    /// More than one has worked on the folder.
    Several,
}

impl Machine {
    pub(super) fn current() -> Self {
        Self::parse(text(Path::new(MACHINE_ID)).unwrap_or_default().trim())
    }

    fn parse(text: &str) -> Self {
        let is_id = text.len() == 32
            && text.bytes().all(|byte| byte.is_ascii_hexdigit())
            && text.bytes().any(|byte| byte != b'0');
        match text {
            "several" => Self::Several,
            _ if is_id => Self::Known(text.to_owned()),
            _ => Self::Unknown,
        }
    }

    /// Whether both are known, and the same.
    pub(super) fn is(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Known(one), Self::Known(other)) if one == other)
    }

    /// What to say of leases that are made here, among others that were made on `earlier`.
    pub(super) fn after(self, earlier: &Self) -> Self {
        if self == *earlier {
            self
        } else {
            Self::Several
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Known(id) => id,
            Self::Unknown => "unknown",
            Self::Several => "several",
        })
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn a_mark_can_be_set_by_any_clock() {
        let folder = TempDir::new().expect("a temporary folder");
        let day = MARK_AGE.as_secs();
        for (now, expected) in [
            (0, 0),
            (3_600, 0),
            (day, 0),
            (day + 1, 1),
            (3 * day, 2 * day),
        ] {
            let time = past(SystemTime::UNIX_EPOCH + Duration::from_secs(now));
            let outcome = set_modified(folder.path(), time);
            assert!(outcome.is_ok(), "at {now}: {outcome:?}");
            let modified = fs::metadata(folder.path()).and_then(|meta| meta.modified());
            let expected = SystemTime::UNIX_EPOCH + Duration::from_secs(expected);
            assert_eq!(modified.expect("a time"), expected, "at {now}");
        }
    }
}

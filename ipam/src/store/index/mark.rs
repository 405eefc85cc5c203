//! The mark: when, in which boot and on which machine the index was complete.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::statfs::{PROC_SUPER_MAGIC, statfs};
use nix::sys::time::TimeSpec;

use super::super::error::{Attempt, StoreError};
use super::super::file::text;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const MACHINE_ID: &str = "/etc/machine-id";

/// In front of a boot that is a container's own.
const CONTAINER: &str = "container:";

/// In the place of a time that there is none of.
const NO_TIME: &str = "-";

/// How far in the past the mark is.
const MARK_AGE: Duration = Duration::from_hours(24);

/// What an index says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// The boot in which every link of the index was made, or an earlier one's.
    pub(super) boot: Boot,
    /// Where that was.
    pub(super) machine: Machine,
    /// The modification time of the folder of leases with which the index was complete; nothing if it was not, as a lease could
    /// not be read.
    pub(super) time: Option<SystemTime>,
}

impl Mark {
    /// The mark in a file; nothing if there is none, or half of one.
    pub(super) fn read(path: &Path) -> Option<Self> {
        let mark = text(path)?;
        let mut fields = mark.strip_suffix('\n')?.split(' ');
        let boot = Boot::parse(fields.next()?);
        let time = match (fields.next()?, fields.next()?) {
            (NO_TIME, NO_TIME) => None,
            (seconds, nanos) => Some(time(seconds, nanos)?),
        };
        let machine = Machine::parse(fields.next()?);
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

    /// Notes boot and machine of an index that is not complete.
    pub(super) fn write_without_time(
        path: &Path,
        boot: &Boot,
        machine: &Machine,
    ) -> Result<(), StoreError> {
        let mark = format!("{boot} {NO_TIME} {NO_TIME} {machine}\n");
        fs::write(path, mark).attempt("write", path)
    }
}

/// The time of two fields.
fn time(seconds: &str, nanos: &str) -> Option<SystemTime> {
    let (seconds, nanos) = (seconds.parse().ok()?, nanos.parse().ok()?);
    if nanos >= 1_000_000_000 {
        return None;
    }
    SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanos))
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

/// A boot, as it is named where the call is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Boot {
    /// The kernel names it.
    Kernel(String),
    /// Somebody has mounted a file over what the kernel says, as LXC, Incus and systemd-nspawn do, with another id at each start of the
    /// container. What runs in a container inside of this one may have a procfs of its own, and see the kernel's.
    Container(String),
    /// Nobody knows.
    Unknown,
}

impl Boot {
    pub(super) fn current() -> Self {
        let path = Path::new(BOOT_ID);
        let text = text(path).unwrap_or_default();
        let is_kernels = statfs(path).is_ok_and(|stat| stat.filesystem_type() == PROC_SUPER_MAGIC);
        match text.trim() {
            id if !is_uuid(id) => Self::Unknown,
            id if is_kernels => Self::Kernel(id.to_owned()),
            id => Self::Container(id.to_owned()),
        }
    }

    fn parse(text: &str) -> Self {
        match text.strip_prefix(CONTAINER) {
            Some(id) if is_uuid(id) => Self::Container(id.to_owned()),
            None if is_uuid(text) => Self::Kernel(text.to_owned()),
            _ => Self::Unknown,
        }
    }

    /// Whether both are known, and not the same. The kernel's and a container's can't be compared: both may go on.
    pub(super) fn is_over_in(&self, now: &Self) -> bool {
        match (self, now) {
            (Self::Kernel(then), Self::Kernel(now))
            | (Self::Container(then), Self::Container(now)) => then != now,
            _ => false,
        }
    }
}

impl fmt::Display for Boot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(id) => f.write_str(id),
            Self::Container(id) => write!(f, "{CONTAINER}{id}"),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text
            .bytes()
            .all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
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
    fn only_boots_of_a_kind_end_each_other() {
        let [one, other] = [
            "01234567-89ab-cdef-0123-456789abcdef",
            "fedcba98-7654-3210-fedc-ba9876543210",
        ];
        let kernel = |id: &str| Boot::Kernel(id.to_owned());
        let container = |id: &str| Boot::Container(id.to_owned());
        for boot in [kernel, container] {
            assert!(boot(one).is_over_in(&boot(other)));
            assert!(!boot(one).is_over_in(&boot(one)));
            assert!(!boot(one).is_over_in(&Boot::Unknown));
            assert!(!Boot::Unknown.is_over_in(&boot(one)));
        }
        assert!(!kernel(one).is_over_in(&container(other)));
        assert!(!container(one).is_over_in(&kernel(other)));
        for boot in [kernel(one), container(one), Boot::Unknown] {
            assert_eq!(Boot::parse(&boot.to_string()), boot);
        }
    }

    #[test]
    fn a_mark_without_a_time_fits_no_folder() {
        let folder = TempDir::new().expect("a temporary folder");
        let path = folder.path().join("mark");
        let (boot, machine) = (Boot::Unknown, Machine::Several);
        let written = Mark::write_without_time(&path, &boot, &machine);
        written.expect("a mark");
        let mark = Mark::read(&path).expect("the same mark");
        assert_eq!((mark.time, mark.boot, mark.machine), (None, boot, machine));
    }

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

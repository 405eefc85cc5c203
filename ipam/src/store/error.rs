//! What can go wrong with a directory, and what to do about it.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use nix::unistd::geteuid;
use thiserror::Error;
use underpass_cni::Error as CniError;

use crate::shorten;

/// So many paths are named in one message.
const NAMED: usize = 3;

/// What was said of leases that are passed over. A plugin is a process of its own for each call, and a call may come to the same
/// lease several times.
static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// A file operation that failed, on one file or on several alike.
#[derive(Debug, Error)]
#[error("cannot {action} {paths}: {source}{}", remedy(*.action, source))]
pub struct StoreError {
    action: Action,
    paths: Paths,
    source: io::Error,
}

/// What was attempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// In these words.
    Other(&'static str),
    /// To remove a lease, which stays where that fails.
    Free,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Other(words) => words,
            Self::Free => "free",
        })
    }
}

#[derive(Debug)]
struct Paths(Vec<PathBuf>);

impl fmt::Display for Paths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, path) in self.0.iter().take(NAMED).enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{}", shorten::path(path))?;
        }
        match self.0.len().saturating_sub(NAMED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

fn remedy(action: Action, error: &io::Error) -> &'static str {
    match (error.kind(), action) {
        (io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded, _) => {
            ": free space or inodes on that file system"
        }
        (io::ErrorKind::ReadOnlyFilesystem, Action::Free) => {
            ": still leased; make the file system writable and repeat the call"
        }
        (io::ErrorKind::ReadOnlyFilesystem, Action::Other(_)) => {
            ": make it writable, or set ipam.dataDir to a folder that is"
        }
        (io::ErrorKind::PermissionDenied, _) if is(error, Errno::EPERM) => {
            ": the file system or a security module forbids it; is something there immutable (lsattr)?"
        }
        (io::ErrorKind::PermissionDenied, _) if geteuid().is_root() => {
            ": correct the owner and mode of the folder, or what a security module allows; \
             root may lack the capability CAP_DAC_OVERRIDE here"
        }
        (io::ErrorKind::PermissionDenied, _) => {
            ": run the plugin as root, or correct the owner and mode of the folder"
        }
        (io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists, _) => {
            ": something that is no folder is in its place; remove it, or correct ipam.dataDir"
        }
        (io::ErrorKind::IsADirectory, _) => ": a folder is in the place of that file; remove it",
        (io::ErrorKind::InvalidFilename, _) => {
            ": shorten ipam.dataDir or the network's name: the kernel takes names of 255 bytes, and paths of 4095"
        }
        _ if is(error, Errno::ELOOP) => {
            ": its links lead in a circle; correct them, or ipam.dataDir"
        }
        _ if is(error, Errno::EMFILE) || is(error, Errno::ENFILE) => {
            ": raise the limit of open files (RLIMIT_NOFILE) of the runtime, or of the node"
        }
        (io::ErrorKind::NotFound, Action::Other(_)) => {
            ": nothing can be made there, or somebody removed it meanwhile; look at ipam.dataDir"
        }
        (_, Action::Free) => ": still leased; repeat the call when that is put right",
        _ => "",
    }
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno as i32)
}

/// Whether it was link(2) that cannot be had between these places: not across mounts, and not on
/// every file system.
pub(super) fn refuses_links(error: &io::Error) -> bool {
    [
        Errno::EXDEV,
        Errno::EPERM,
        Errno::EOPNOTSUPP,
        Errno::ENOSYS,
        Errno::EMLINK,
        Errno::EINVAL,
    ]
    .into_iter()
    .any(|errno| is(error, errno))
}

impl StoreError {
    /// A lease that could not be removed.
    pub(super) fn lease_stays(path: &Path, source: io::Error) -> Self {
        Self {
            action: Action::Free,
            paths: Paths(vec![path.to_owned()]),
            source,
        }
    }

    /// A lease that could not be read.
    pub(super) fn unreadable(path: &Path, source: io::Error) -> Self {
        Self {
            action: Action::Other("read the lease"),
            paths: Paths(vec![path.to_owned()]),
            source,
        }
    }

    /// Goes on without a lease that could not be read, where the call is not about this one: it costs its address and nothing
    /// else. It is named on stderr, once in a call. Fails if it is no fault of the lease: where files or memory run short nothing
    /// can be read.
    pub(crate) fn pass_over(self) -> Result<(), Self> {
        let is_short = [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM]
            .into_iter()
            .any(|errno| is(&self.source, errno));
        if is_short {
            return Err(self);
        }
        let line = format!(
            "{self}; nobody knows whose it is, so its address stays taken: put the file right, or remove it if no container has \
             the address"
        );
        let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
        if said.insert(line.clone()) {
            // Where stderr is closed nobody listens.
            let _ = writeln!(io::stderr(), "{line}");
        }
        Ok(())
    }

    /// Both failures as one, as far as they are alike; else the first.
    fn with(mut self, mut other: Self) -> Self {
        if self.action == other.action && self.source.kind() == other.source.kind() {
            self.paths.0.append(&mut other.paths.0);
        }
        self
    }
}

/// Both outcomes of steps that do not depend on each other.
pub(crate) fn both(
    first: Result<(), StoreError>,
    second: Result<(), StoreError>,
) -> Result<(), StoreError> {
    match (first, second) {
        (Err(first), Err(second)) => Err(first.with(second)),
        (first, second) => first.and(second),
    }
}

impl From<StoreError> for CniError {
    fn from(error: StoreError) -> Self {
        Self::new(underpass_cni::Code::Io, error.to_string())
    }
}

/// Says what was attempted, on what.
pub(super) trait Attempt<T> {
    fn attempt(self, action: &'static str, path: &Path) -> Result<T, StoreError>;
}

impl<T> Attempt<T> for io::Result<T> {
    fn attempt(self, action: &'static str, path: &Path) -> Result<T, StoreError> {
        self.map_err(|source| StoreError {
            action: Action::Other(action),
            paths: Paths(vec![path.to_owned()]),
            source,
        })
    }
}

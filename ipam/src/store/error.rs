//! What can go wrong with a directory, and what to do about it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::unistd::geteuid;
use thiserror::Error;
use underpass_cni::Error as CniError;

use crate::shorten;

/// So many paths are named in one message.
const NAMED: usize = 3;

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

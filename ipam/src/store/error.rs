//! What can go wrong with a directory, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;
use underpass_cni::Error as CniError;

/// A file operation that failed.
#[derive(Debug, Error)]
#[error("cannot {action} {}: {source}{}", path.display(), remedy(source))]
pub struct StoreError {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ": free space or inodes on that file system"
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            ": make it writable, or set ipam.dataDir to a folder that is"
        }
        io::ErrorKind::PermissionDenied => {
            ": run the plugin as root, or correct the owner and mode of the folder"
        }
        io::ErrorKind::NotADirectory => ": something that is no folder is in its place",
        _ => "",
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
            action,
            path: path.to_owned(),
            source,
        })
    }
}

//! The one lock of a node: held while pins are made, and while the few entries that all attachments
//! share are changed.

use std::{
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};

use crate::Error;

const FOLDER: &str = "/run/underpass";

/// An exclusive lock that follows from bpfRoot alone; free again when dropped, or when the process
/// dies.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Waits for the lock. It is `flock(2)` on a file that stays.
    pub fn acquire(root: &Path) -> Result<Self, Error> {
        let path = file_of(root, "lock");
        let file = open(&path)?;
        file.lock().map_err(Error::file("lock", &path))?;
        Ok(Self { _file: file })
    }

    /// Takes the other lock of a node, which the one reader of its log holds: `None` if somebody reads it
    /// already.
    pub fn try_acquire_trace(root: &Path) -> Result<Option<Self>, Error> {
        let path = file_of(root, "trace");
        let file = open(&path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(source)) => Err(Error::file("lock", &path)(source)),
        }
    }
}

fn open(path: &Path) -> Result<File, Error> {
    fs::create_dir_all(FOLDER).map_err(Error::file("create", Path::new(FOLDER)))?;
    File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .map_err(Error::file("open the lock", path))
}

/// Names a file for the node whose pins are at `root`.
#[must_use]
pub fn file_of(root: &Path, purpose: &str) -> PathBuf {
    let digest = Sha256::digest(root.as_os_str().as_encoded_bytes());
    let name = digest[..8]
        .iter()
        .fold(0_u64, |all, byte| all << 8 | u64::from(*byte));
    Path::new(FOLDER).join(format!("{name:016x}.{purpose}"))
}

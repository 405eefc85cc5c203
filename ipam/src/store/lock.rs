//! The lock file: the reference's, and guarded as the reference does it, by flock(2).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

pub(super) fn path(leases: &Path) -> PathBuf {
    leases.join("lock")
}

/// Opens it, making it if need be.
pub(super) fn open(leases: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        // std asks for write access wherever it may create; the file is never written to. On NFS an
        // exclusive lock needs it, too.
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o750)
        .open(path(leases))
}

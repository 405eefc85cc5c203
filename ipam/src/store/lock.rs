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

/// Opens it for a call that has something to do only if there are leases. Where nothing can be
/// written a file that is open for reading locks as well; and should it be missing, so does the
/// folder, as nobody can make the file now.
pub(super) fn open_existing(leases: &Path) -> io::Result<File> {
    match open(leases) {
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
            match File::open(path(leases)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => File::open(leases),
                outcome => outcome,
            }
        }
        outcome => outcome,
    }
}

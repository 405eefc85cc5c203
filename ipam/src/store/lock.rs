//! The lock file: the reference's, and guarded as the reference does it, by flock(2).

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// How long a call waits without a word.
const SILENT: Duration = Duration::from_secs(1);

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

/// Waits until nobody else holds it. A runtime only shows that an ADD takes long; so what it waits for is said on stderr.
pub(super) fn take(file: &File, path: &Path) -> io::Result<()> {
    match file.try_lock() {
        Ok(()) => return Ok(()),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let (taken, waits) = channel::<()>();
    let say = move || {
        if waits.recv_timeout(SILENT) == Err(RecvTimeoutError::Timeout) {
            // Where stderr is closed nobody listens.
            let _ = writeln!(
                io::stderr(),
                "waiting for the lock {path}, which another process holds: `lsof {path}` names it",
                path = path.display()
            );
        }
    };
    thread::scope(|scope| {
        // Where there is no thread to be had it waits all the same.
        let _ = thread::Builder::new().spawn_scoped(scope, say);
        let outcome = file.lock();
        drop(taken);
        outcome
    })
}

//! The locks of a node, which nobody but root can open: who has a file open can lock it, and so stop every call.
//!
//! [`Lock`] is held while pins are made, and while the few entries that all attachments share are changed.
//! [`Use`] is held by whoever has maps open, so that an upgrade exchanges pins and programs, and `unload` takes them away, when
//! nobody has.
//!
//! Who needs both takes [`Use`] first.

use std::{
    collections::BTreeMap,
    fs::{self, DirBuilder, File, Permissions, TryLockError},
    io,
    os::unix::fs::{
        DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
    },
    path::{Path, PathBuf},
    sync::{
        Arc, LazyLock, Mutex, PoisonError, Weak,
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
    time::{Duration, Instant},
};

use sha2::{Digest as _, Sha256};
use tracing::warn;

use crate::Error;

/// The folder of the locks.
pub const FOLDER: &str = "/run/underpass";
/// Modes of the folder and its files, and the bits that neither has.
const PRIVATE_FOLDER: u32 = 0o700;
const PRIVATE: u32 = 0o600;
const OTHERS: u32 = 0o077;

/// How long a call waits without a word.
const SILENT: Duration = Duration::from_secs(1);

/// An exclusive lock that follows from bpfRoot alone; free again when dropped, or when the process
/// dies.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Waits for the lock. It is `flock(2)` on a file that stays.
    pub fn acquire(root: &Path) -> Result<Self, Error> {
        let file = hold(&file_of(root, "lock"))?;
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

/// Nobody has maps open while this lives, and who wants to waits.
#[derive(Debug)]
pub struct Alone(#[expect(dead_code, reason = "it is held")] Use);

/// Waits until every call has ended that has maps open now, and says so before by `waits`, if there is any; later ones wait
/// until what is returned is dropped. The caller has none open.
pub fn alone(root: &Path, waits: impl FnOnce()) -> Result<Alone, Error> {
    match Use::alone(root, waits) {
        Err(Error::Busy(path)) => Err(Error::UnderWay(path)),
        ended => ended.map(Alone),
    }
}

/// The same without keeping later ones away.
pub fn await_calls(root: &Path, waits: impl FnOnce()) -> Result<(), Error> {
    alone(root, waits).map(drop)
}

/// Who uses what is pinned: all calls together, or an upgrade or `unload` alone. Free again when dropped, or when the process dies.
#[derive(Debug)]
pub(crate) struct Use {
    /// Where an upgrade makes later calls wait, so that it only waits for those that were there before.
    _gate: Option<File>,
    _file: Option<File>,
}

/// Whether a process had maps open before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    /// It had not.
    First,
    /// It had.
    Later,
}

impl Use {
    /// Waits for an upgrade that is running. All that have maps open in this process share one, as the second
    /// would wait for an upgrade that waits for the first.
    pub(crate) fn shared(root: &Path) -> Result<(Arc<Self>, Order), Error> {
        static SHARED: LazyLock<Mutex<BTreeMap<PathBuf, Weak<Use>>>> =
            LazyLock::new(Mutex::default);
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = shared.get(root).and_then(Weak::upgrade) {
            return Ok((shared, Order::Later));
        }
        let gate = Self::wait(root, "gate")?;
        let file = Self::wait(root, "use")?;
        drop(gate);
        let fresh = Arc::new(Self {
            _gate: None,
            _file: file,
        });
        shared.insert(root.to_owned(), Arc::downgrade(&fresh));
        Ok((fresh, Order::First))
    }

    /// Shares what is pinned for a moment, without a map that outlives it; nothing, where somebody is alone or waits for that.
    pub(crate) fn glance(root: &Path) -> Result<Option<Self>, Error> {
        let mut files = Vec::new();
        for purpose in ["gate", "use"] {
            let path = file_of(root, purpose);
            let file = open(&path)?;
            match file.try_lock_shared() {
                Ok(()) => files.push(file),
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(source)) => return Err(Error::file("lock", &path)(source)),
            }
        }
        let file = files.pop();
        Ok(Some(Self {
            _gate: files.pop(),
            _file: file,
        }))
    }

    /// Makes later calls wait, and waits for all that are there, after calling `waits`; not for ever, as one of these may wait for a process
    /// that hangs.
    pub(crate) fn alone(root: &Path, waits: impl FnOnce()) -> Result<Self, Error> {
        const PATIENCE: Duration = Duration::from_secs(30);
        const PAUSE: Duration = Duration::from_millis(5);
        let deadline = Instant::now() + PATIENCE;
        let mut waits = Some(waits);
        let mut hold = |purpose| {
            let path = file_of(root, purpose);
            let file = open(&path)?;
            loop {
                match file.try_lock() {
                    Ok(()) => return Ok(Some(file)),
                    Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                        if let Some(waits) = waits.take() {
                            waits();
                        }
                        thread::sleep(PAUSE);
                    }
                    Err(TryLockError::WouldBlock) => return Err(Error::Busy(path)),
                    Err(TryLockError::Error(source)) => {
                        return Err(Error::file("lock", &path)(source));
                    }
                }
            }
        };
        Ok(Self {
            _gate: hold("gate")?,
            _file: hold("use")?,
        })
    }

    /// Shares one of the two files. Where there is none and none can be made, as on a full disk, no upgrade can run either.
    fn wait(root: &Path, purpose: &str) -> Result<Option<File>, Error> {
        let path = file_of(root, purpose);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(_) => match open(&path) {
                Ok(file) => file,
                Err(_) => return Ok(None),
            },
        };
        take(&file, &path, Share::All)?;
        Ok(Some(file))
    }
}

/// Waits until nobody else has the lock of a file, which is made if need be: it is free again when that is closed.
pub fn hold(path: &Path) -> Result<File, Error> {
    let file = open(path)?;
    take(&file, path, Share::Alone)?;
    Ok(file)
}

/// Opens a file for a lock, which nobody else can, and makes it if need be.
fn open(path: &Path) -> Result<File, Error> {
    make_folder(Path::new(FOLDER))?;
    File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(PRIVATE)
        .open(path)
        .map_err(Error::file("open the lock", path))
}

/// Makes the folder of the locks, for root alone.
fn make_folder(folder: &Path) -> Result<(), Error> {
    let mut builder = DirBuilder::new();
    builder.mode(PRIVATE_FOLDER).recursive(true);
    builder
        .create(folder)
        .map_err(Error::file("create", folder))?;
    let found = fs::metadata(folder).map_err(Error::file("look at", folder))?;
    if found.mode() & OTHERS != 0
        && let Err(error) = close(folder)
    {
        warn!("others can open the locks of this node, and so stop every call: {error}");
    }
    Ok(())
}

/// Takes a folder, and the files in it, from others: it is of an earlier build, or was made by somebody else. The folder comes
/// last, so that who is killed before it leaves the rest to the next call.
fn close(folder: &Path) -> Result<(), Error> {
    let set = |path: &Path, mode| {
        let set = fs::set_permissions(path, Permissions::from_mode(mode));
        set.map_err(Error::file("change the mode of", path))
    };
    for entry in fs::read_dir(folder).map_err(Error::file("list", folder))? {
        let entry = entry.map_err(Error::file("list", folder))?;
        if entry.file_type().is_ok_and(|kind| kind.is_file()) {
            set(&entry.path(), PRIVATE)?;
        }
    }
    set(folder, PRIVATE_FOLDER)
}

/// Who else may have a lock at the same time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Share {
    /// Nobody.
    Alone,
    /// All who want it so.
    All,
}

/// Waits for a lock. A runtime only shows that a call takes long; so what it waits for is said on stderr.
fn take(file: &File, path: &Path, share: Share) -> Result<(), Error> {
    let failed = Error::file("lock", path);
    let (attempt, wait) = match share {
        Share::Alone => (file.try_lock(), File::lock as fn(&File) -> io::Result<()>),
        Share::All => (
            file.try_lock_shared(),
            File::lock_shared as fn(&File) -> io::Result<()>,
        ),
    };
    match attempt {
        Ok(()) => return Ok(()),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(failed(error)),
    }
    let (taken, waits) = channel::<()>();
    let say = move || {
        if waits.recv_timeout(SILENT) == Err(RecvTimeoutError::Timeout) {
            let path = path.display();
            warn!(
                "waiting for the lock {path}, which another process holds: `lsof {path}` names it"
            );
        }
    };
    thread::scope(|scope| {
        // Where there is no thread to be had it waits all the same.
        let _ = thread::Builder::new().spawn_scoped(scope, say);
        let outcome = wait(file);
        drop(taken);
        outcome
    })
    .map_err(failed)
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

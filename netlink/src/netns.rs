//! A network namespace as a handle: work happens on a short-lived thread that enters it and dies
//! there, so that no thread ever has to find its way back.

use std::{
    fmt,
    fs::{self, File},
    io,
    os::{
        fd::{AsFd as _, AsRawFd, RawFd},
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    thread,
};

use nix::{
    sched::{CloneFlags, setns},
    sys::statfs::{NSFS_MAGIC, PROC_SUPER_MAGIC, fstatfs},
};

/// Why a network namespace can't be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The path is there, but what it names can't be opened.
    #[error("failed to open netns {path:?}: {source}: {}", open_remedy(source))]
    Open {
        /// The path, as the runtime gave it.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The path names something else.
    #[error(
        "failed to open netns {path:?}: it is not a namespace: the container is gone, or the runtime gave a wrong path"
    )]
    NotANamespace {
        /// The path, as the runtime gave it.
        path: PathBuf,
    },
    /// A thread could not be started, or could not enter.
    #[error(
        "cannot enter the network namespace {path:?}: {source}{}",
        enter_remedy(source)
    )]
    Enter {
        /// The path, as the runtime gave it.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

fn open_remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => "run it as root of the node",
        Some(libc::EMFILE) => "raise the limit of open files (RLIMIT_NOFILE) of the runtime",
        _ => "the runtime gave a wrong path",
    }
}

fn enter_remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => ": run it as root of the node, with the capability CAP_SYS_ADMIN",
        Some(libc::EINVAL) => {
            ": it is no network namespace, or one of another kind; the runtime gave a wrong path"
        }
        Some(libc::EAGAIN | libc::ENOMEM) => {
            ": no thread can be started; raise the limit of processes or memory of the runtime"
        }
        _ => "",
    }
}

/// An open network namespace. It lives at least as long as this handle.
#[derive(Debug)]
pub struct Netns {
    file: File,
    path: PathBuf,
}

impl Netns {
    /// Tells whether it is the calling thread's own.
    #[must_use]
    pub fn is_own(&self) -> bool {
        let own = fs::metadata("/proc/thread-self/ns/net");
        own.is_ok_and(|own| {
            let this = self.file.metadata();
            this.is_ok_and(|this| (this.dev(), this.ino()) == (own.dev(), own.ino()))
        })
    }

    /// Gives its inode number, which no other namespace has while it exists. (The kernel counts them in
    /// 32 bits: `ns_common.inum`.)
    pub fn number(&self) -> Result<u32, Error> {
        self.file
            .metadata()
            .and_then(|file| u32::try_from(file.ino()).map_err(io::Error::other))
            .map_err(|source| Error::Open {
                path: self.path.clone(),
                source,
            })
    }

    /// Opens the namespace at a path, such as `/run/netns/x` or `/proc/7/ns/net`. `None`: there is
    /// nothing at that path (any more).
    pub fn open(path: &Path) -> Result<Option<Self>, Error> {
        // What is no namespace may be a FIFO, whose other end nobody opens.
        let opened = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path);
        let file = match opened {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => {
                return Err(Error::Open {
                    path: path.to_owned(),
                    source,
                });
            }
        };
        let magic = fstatfs(&file).map(|stat| stat.filesystem_type());
        if !matches!(magic, Ok(NSFS_MAGIC | PROC_SUPER_MAGIC)) {
            // A deleted bind mount leaves a plain file behind, which is as gone as a missing one,
            // except to those who must enter it.
            return Err(Error::NotANamespace {
                path: path.to_owned(),
            });
        }
        Ok(Some(Self {
            file,
            path: path.to_owned(),
        }))
    }

    /// Runs `work` on a thread inside the namespace, and waits for it.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
        let failed = |source| Error::Enter {
            path: self.path.clone(),
            source,
        };
        thread::scope(|scope| {
            let thread = thread::Builder::new()
                .name("netns".to_owned())
                .spawn_scoped(scope, || {
                    setns(self.file.as_fd(), CloneFlags::CLONE_NEWNET)?;
                    Ok(work())
                })
                .map_err(failed)?;
            match thread.join() {
                Ok(answer) => {
                    answer.map_err(|errno: nix::errno::Errno| failed(io::Error::from(errno)))
                }
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }
}

impl AsRawFd for Netns {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl fmt::Display for Netns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.display().fmt(f)
    }
}

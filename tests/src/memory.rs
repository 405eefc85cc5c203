//! A control group with a limit of memory, as a container has one; in the version of control groups that the machine has.
//!
//! The kernel charges a process's own memory to its group, and what it allocates for the process: so also maps and programs, from
//! Linux 5.11 on, and for as long as they live.

use std::{
    fs::{self, File},
    io,
    os::{fd::AsRawFd as _, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::{self, Command},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use crate::{patience, privilege};

/// A mebibyte.
pub const MIB: u64 = 1 << 20;

/// How long the kernel may take to see that a group is empty.
const SOON: Duration = Duration::from_secs(5);

/// A group without members. It is removed with this handle, and what is charged to it then goes to the one above.
#[derive(Debug)]
pub struct Group {
    folder: PathBuf,
    files: &'static Files,
}

/// What the files of a group are called.
#[derive(Debug)]
struct Files {
    limit: &'static str,
    usage: &'static str,
    peak: &'static str,
}

const FIRST: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    peak: "memory.max_usage_in_bytes",
};
const SECOND: Files = Files {
    limit: "memory.max",
    usage: "memory.current",
    peak: "memory.peak",
};

impl Group {
    /// A group that may use so many bytes. `None` if this machine can't limit memory; that is said, and under `CI=true` it is a
    /// failure.
    pub fn limited(bytes: u64) -> Result<Option<Self>> {
        static GROUPS: AtomicUsize = AtomicUsize::new(0);
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("read the mounts")?;
        let Some((root, files)) = find(&mounts) else {
            privilege::skip(
                "no control groups that limit memory: mount those of version 2 at /sys/fs/cgroup, \
                 and `echo +memory >/sys/fs/cgroup/cgroup.subtree_control`",
            );
            return Ok(None);
        };
        let number = GROUPS.fetch_add(1, Ordering::Relaxed);
        let folder = root.join(format!("underpass-memory-{}-{number}", process::id()));
        fs::create_dir(&folder).with_context(|| format!("make {}", folder.display()))?;
        let group = Self { folder, files };
        fs::write(group.folder.join(files.limit), bytes.to_string()).context("limit memory")?;
        Ok(Some(group))
    }

    /// Has a command start as a member.
    pub fn join(&self, command: &mut Command) -> Result<()> {
        let path = self.folder.join("cgroup.procs");
        let members = File::options()
            .write(true)
            .open(&path)
            .with_context(|| format!("open {}", path.display()))?;
        // SAFETY: write is async-signal-safe and touches nothing of the parent; the file lives as long as the closure.
        unsafe {
            command.pre_exec(move || {
                // Zero is whoever writes it.
                match libc::write(members.as_raw_fd(), c"0".as_ptr().cast(), 1) {
                    1 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                }
            });
        }
        Ok(())
    }

    /// Bytes that are charged to it.
    pub fn usage(&self) -> Result<u64> {
        self.number(self.files.usage)
    }

    /// The most bytes that were ever charged to it. `None` if the kernel does not tell: in version 2 it does from 5.19 on.
    pub fn peak(&self) -> Result<Option<u64>> {
        let is_there = self.folder.join(self.files.peak).exists();
        is_there.then(|| self.number(self.files.peak)).transpose()
    }

    fn number(&self, file: &str) -> Result<u64> {
        let text = fs::read_to_string(self.folder.join(file)).with_context(|| file.to_owned())?;
        text.trim()
            .parse()
            .with_context(|| format!("{file}: {text}"))
    }

    fn remove(&self) -> Result<()> {
        let end = Instant::now() + patience::here(SOON);
        while let Err(error) = fs::remove_dir(&self.folder) {
            ensure!(Instant::now() < end, "{}: {error}", self.folder.display());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            assert!(thread::panicking(), "a control group is left: {error:#}");
            anstream::eprintln!("a control group is left: {error:#}");
        }
    }
}

/// Where groups that limit memory are made, and what their files are called.
fn find(mounts: &str) -> Option<(PathBuf, &'static Files)> {
    mounts.lines().find_map(|line| {
        let (place, source) = line.split_once(" - ")?;
        let root = Path::new(place.split(' ').nth(4)?);
        let (kind, options) = (source.split(' ').next()?, source.rsplit(' ').next()?);
        let files = match kind {
            "cgroup" if options.split(',').any(|option| option == "memory") => &FIRST,
            "cgroup2" if hands_memory_on(root) => &SECOND,
            _ => return None,
        };
        Some((root.to_owned(), files))
    })
}

fn hands_memory_on(root: &Path) -> bool {
    fs::read_to_string(root.join("cgroup.subtree_control"))
        .is_ok_and(|controllers| controllers.split_whitespace().any(|name| name == "memory"))
}

//! An index over the leases, that nobody but this crate knows of, and that stays right when others
//! change the leases.
//!
//! # Contents
//! - `owner/<container>:<interface>`: the addresses that may be this owner's, one a line. Never
//!   trusted: the lease file itself is read before anything is done to it. An address too many is
//!   harmless, so lines are only appended.
//! - `address/<address>`: a second hard link to each lease file that the index knows.
//! - `mark`: the boot and the modification time of the directory with which the index was complete.
//!
//! # Why it is never wrong
//! What must not happen is a lease that the index does not know. Leases are made by this crate,
//! which writes the index first, or by others. Whoever adds an entry to a directory sets its
//! modification time to now. At the end of each call, with the lock still held, it is set to the
//! mark: a time in the past, that no clock shows again. So "the time is the mark" means that nobody
//! has added an entry since, and one `stat(2)` tells it.
//!
//! If it is not the mark (the reference was at work, or an operator, or a call of ours was killed),
//! names and inode numbers of both directories are compared; a lease whose file is the very one
//! linked in `address` is known, and only the others are read. As the link keeps the inode number
//! in use, it cannot belong to a new file.
//!
//! After a reboot, when a crash of the machine may have lost any part of either directory, the
//! index is built anew: the one time that every lease is read. That takes about five times as long
//! as a call of the reference, which reads them every time.
//!
//! What it does not see is a lease that somebody writes over in place, for another owner: no plugin
//! does. An editor that makes a new file of it, `mv` and `rm` are seen.
//!
//! A second index for the same directory, by another path to it, is no danger: each sees the
//! other's mark as a change.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;

use super::error::{Attempt, StoreError};
use super::file::{leases, read_short, remove_if_there, text, write_out};
use crate::owner::Owner;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// How far in the past the mark is.
const MARK_AGE: Duration = Duration::from_hours(24);

/// The longest owner that is written out as a file name, in bytes.
const NAME_MAX: usize = 200;

/// The index of one network's leases. Use it only with the lock held.
#[derive(Debug)]
pub struct Index {
    leases: PathBuf,
    state: PathBuf,
    /// Of the directory, when the lock was taken.
    modified: SystemTime,
    completeness: Completeness,
}

/// Whether every lease is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Completeness {
    /// Not looked yet.
    Unknown,
    /// Yes, and this is the modification time that says so.
    Marked(SystemTime),
}

impl Index {
    pub(super) fn open(leases: PathBuf, state: PathBuf, modified: SystemTime) -> Self {
        Self {
            leases,
            state,
            modified,
            completeness: Completeness::Unknown,
        }
    }

    /// Makes sure that every lease is known.
    pub(super) fn bring_up_to_date(&mut self) -> Result<(), StoreError> {
        if self.completeness != Completeness::Unknown {
            return Ok(());
        }
        let boot = text(Path::new(BOOT_ID)).unwrap_or_default();
        let boot = boot.trim();
        let mark = self.read_mark(boot);
        if let Some(mark) = mark
            && mark == self.modified
        {
            self.completeness = Completeness::Marked(mark);
            return Ok(());
        }
        if mark.is_none() {
            // Another boot's index, or none.
            self.discard();
        }
        for folder in ["address", "owner"] {
            let path = self.state.join(folder);
            DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(&path)
                .attempt("create the folder", &path)?;
        }
        self.learn_new_leases()?;
        let mark = self.write_mark(boot)?;
        self.completeness = Completeness::Marked(mark);
        Ok(())
    }

    /// Forgets everything.
    pub(super) fn discard(&mut self) {
        self.completeness = Completeness::Unknown;
        // The mark first: without it the rest counts for nothing.
        let _ = fs::remove_file(self.state.join("mark"));
        let _ = fs::remove_dir_all(&self.state);
    }

    /// Writes the lease of `ip` where a hard link makes it valid, and the index for it. Returns the
    /// file's path.
    pub(super) fn stage(&mut self, ip: IpAddr, owner: &Owner) -> Result<PathBuf, StoreError> {
        self.note(ip, owner)?;
        let path = self.address_path(ip);
        let create = || {
            OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path)
        };
        let file = match create() {
            // The link of a lease that is gone; written over, it might still be somebody's lease.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                fs::remove_file(&path).and_then(|()| create())
            }
            outcome => outcome,
        };
        write_out(file, &path, &owner.content())?;
        Ok(path)
    }

    /// Writes a file that is to be renamed to its place.
    pub(super) fn stage_text(&mut self, name: &str, text: &str) -> Result<PathBuf, StoreError> {
        let path = self.state.join(name);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&path);
        write_out(file, &path, text)?;
        Ok(path)
    }

    /// Addresses that may be `owner`'s, or its container's as a whole.
    pub(super) fn candidates(&self, owner: &Owner) -> Vec<IpAddr> {
        let mut candidates: Vec<IpAddr> = Vec::new();
        for owner in [owner, &owner.legacy()] {
            let lines = text(&self.owner_path(owner)).unwrap_or_default();
            candidates.extend(lines.lines().filter_map(|line| line.parse::<IpAddr>().ok()));
        }
        candidates.sort_unstable();
        candidates.dedup();
        candidates
    }

    /// The lease of `ip` is gone.
    pub(super) fn forget(&mut self, ip: IpAddr) {
        let _ = fs::remove_file(self.address_path(ip));
    }

    /// All leases of `owner` are gone.
    pub(super) fn forget_owner(&mut self, owner: &Owner) {
        let _ = fs::remove_file(self.owner_path(owner));
    }

    /// Reads the leases that somebody else made, and drops the links of those that somebody else
    /// removed.
    fn learn_new_leases(&mut self) -> Result<(), StoreError> {
        let known = self.state.join("address");
        let mut known: HashMap<IpAddr, u64> = leases(&known)
            .attempt("list", &known)?
            .into_iter()
            .collect();
        for (ip, inode) in leases(&self.leases).attempt("list", &self.leases)? {
            if known.remove(&ip) == Some(inode) {
                continue;
            }
            let lease = self.leases.join(ip.to_string());
            let content = read_short(&lease).attempt("read the lease", &lease)?;
            if content.is_empty() {
                fs::remove_file(&lease).attempt("reclaim the empty lease", &lease)?;
                continue;
            }
            let Some(owner) = Owner::parse(&content) else {
                continue;
            };
            self.note(ip, &owner)?;
            let link = self.address_path(ip);
            remove_if_there(&link).attempt("remove", &link)?;
            fs::hard_link(&lease, &link).attempt("create", &link)?;
        }
        for ip in known.into_keys() {
            self.forget(ip);
        }
        Ok(())
    }

    fn note(&self, ip: IpAddr, owner: &Owner) -> Result<(), StoreError> {
        let path = self.owner_path(owner);
        OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&path)
            // The newline comes first: whatever a crash left behind is a line of its own.
            .and_then(|mut file| file.write_all(format!("\n{ip}").as_bytes()))
            .attempt("write", &path)
    }

    fn modified(&self) -> Result<SystemTime, StoreError> {
        fs::metadata(&self.leases)
            .and_then(|meta| meta.modified())
            .attempt("look at the folder", &self.leases)
    }

    fn set_modified(&self, time: SystemTime) -> io::Result<()> {
        let since = time
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_err(io::Error::other)?;
        utimensat(
            AT_FDCWD,
            &self.leases,
            &TimeSpec::UTIME_OMIT,
            &TimeSpec::from_duration(since),
            UtimensatFlags::FollowSymlink,
        )
        .map_err(io::Error::from)
    }

    /// The mark, if it was made since the machine booted.
    fn read_mark(&self, boot: &str) -> Option<SystemTime> {
        let mark = text(&self.state.join("mark"))?;
        let mut fields = mark.split_whitespace();
        if fields.next() != Some(boot) {
            return None;
        }
        let seconds = fields.next()?.parse().ok()?;
        let nanos = fields.next()?.parse().ok()?;
        (nanos < 1_000_000_000).then(|| SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos))
    }

    /// Chooses a mark and notes it as the file system stores it, which may be coarser.
    fn write_mark(&self, boot: &str) -> Result<SystemTime, StoreError> {
        let time = SystemTime::now()
            .checked_sub(MARK_AGE)
            .unwrap_or(SystemTime::UNIX_EPOCH);
        self.set_modified(time)
            .attempt("set the time of", &self.leases)?;
        let mark = self.modified()?;
        let since = mark
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let path = self.state.join("mark");
        fs::write(
            &path,
            format!("{boot} {} {}\n", since.as_secs(), since.subsec_nanos()),
        )
        .attempt("write", &path)?;
        Ok(mark)
    }

    fn address_path(&self, ip: IpAddr) -> PathBuf {
        self.state.join("address").join(ip.to_string())
    }

    fn owner_path(&self, owner: &Owner) -> PathBuf {
        let name = format!(
            "{}:{}",
            owner.container_id,
            owner.ifname.as_deref().unwrap_or_default()
        );
        let is_name =
            name.len() <= NAME_MAX && !name.contains(|c: char| c == '/' || c.is_control());
        let name = if is_name {
            name
        } else {
            // Two owners in one file are harmless, as what is read there is verified.
            format!("~{:016x}", fnv1a(name.as_bytes()))
        };
        self.state.join("owner").join(name)
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        if let Completeness::Marked(mark) = self.completeness {
            // Without the mark the next call compares names, and is right as well.
            let _ = self.set_modified(mark);
        }
    }
}

/// FNV-1a, which every build computes alike.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

//! A directory as the database: one file per leased address, named by it and holding its owner.
//!
//! # Format
//! That of the reference plugin `host-local`: `<dataDir>/<network>/` holds `lock`, a file per
//! lease, and `last_reserved_ip.<n>` for the n-th pool. Every call works under `flock(2)` on
//! `lock`, as the reference does, so both may share a directory. `ls` shows what is leased, `rm`
//! frees it.
//!
//! # Crashes
//! A lease appears by `link(2)` (or `rename(2)`, where there are no hard links), complete or not at
//! all. An empty file, as the reference leaves one behind when it is killed between creating and
//! writing, is nobody's: it is reclaimed, under the lock, under which nobody else can be about to
//! write it. Nothing is synced to the disk: after a power failure, containers are gone with their
//! leases. One that can't be read is somebody's, for all that is known: its address stays taken, and calls
//! that are about others go on.
//!
//! # Size
//! Whose lease a file is stands in the file, so the reference reads every file in every call. An
//! index beside the directory (see [`index`]) answers that question here with one look-up.
//!
//! # Reboots
//! Leases are on the disk and containers are not. The first call after a reboot frees what the index
//! had known before it.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::owner::Owner;
use index::Index;

mod error;
mod file;
pub mod index;
mod lock;
mod locked;

use error::Attempt;
pub use error::StoreError;
pub(crate) use error::both;
use file::{addresses, read_short};
pub use locked::{Holder, Locked};

/// The leases of one network.
#[derive(Clone, Debug)]
pub struct Store {
    data_dir: PathBuf,
    dir: PathBuf,
    network: String,
}

impl Store {
    /// The leases of `network` in `data_dir`. Touches nothing.
    #[must_use]
    pub fn new(data_dir: &Path, network: &str) -> Self {
        Self {
            data_dir: data_dir.to_owned(),
            dir: data_dir.join(network),
            network: network.to_owned(),
        }
    }

    /// The networks that have a folder in `data_dir`, or had one made by somebody's hand.
    pub fn networks(data_dir: &Path) -> Result<Vec<String>, StoreError> {
        let folders = match fs::read_dir(data_dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            folders => folders.attempt("list", data_dir)?,
        };
        let mut networks = Vec::new();
        for folder in folders {
            let name = folder.attempt("list", data_dir)?.file_name().into_string();
            networks.extend(name.ok().filter(|name| !name.starts_with('.')));
        }
        Ok(networks)
    }

    /// The folder of the leases.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Waits for the lock, making folder and lock file if need be.
    pub fn lock(&self) -> Result<Locked, StoreError> {
        let lock = match lock::open(&self.dir) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                DirBuilder::new()
                    .recursive(true)
                    .mode(0o755)
                    .create(&self.dir)
                    .attempt("create the folder", &self.dir)?;
                lock::open(&self.dir)
            }
            outcome => outcome,
        };
        self.wait(lock)
    }

    /// As [`Self::lock`], but nothing if there is no folder: then nothing is leased. Locks where
    /// nothing can be written, too.
    pub fn lock_existing(&self) -> Result<Option<Locked>, StoreError> {
        match lock::open_existing(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            outcome => self.wait(outcome).map(Some),
        }
    }

    fn wait(&self, lock: io::Result<File>) -> Result<Locked, StoreError> {
        let path = lock::path(&self.dir);
        let lock = lock.attempt("open the lock file", &path)?;
        lock::take(&lock, &path).attempt("lock", &path)?;
        let modified = fs::metadata(&self.dir)
            .and_then(|meta| meta.modified())
            .attempt("look at the folder", &self.dir)?;
        let index = Index::open(&self.data_dir, &self.network, modified);
        Ok(Locked::new(self.clone(), index, lock))
    }

    /// Whose `ip` is: nobody's, if there is no file or it is empty. Neither waits for the lock nor
    /// needs a disk that can be written: another's call never changes a lease that exists.
    pub fn owner(&self, ip: IpAddr) -> Result<Option<Owner>, StoreError> {
        let path = self.path(ip);
        match read_short(&path) {
            Ok(content) => Ok(Owner::parse(&content)),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::IsADirectory
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(StoreError::unreadable(&path, error)),
        }
    }

    /// As [`Self::owner`], for who goes through all leases: one that can't be read is named on stderr and passed over.
    pub fn owner_if_known(&self, ip: IpAddr) -> Result<Option<Owner>, StoreError> {
        self.owner(ip)
            .or_else(|error| error.pass_over().map(|()| None))
    }

    /// Tells whether `ip` has a file, and none that the next ADD takes for nobody's. One that can't be looked at is
    /// somebody's, for all that is known.
    #[must_use]
    pub fn is_leased(&self, ip: IpAddr) -> bool {
        match fs::symlink_metadata(self.path(ip)) {
            Ok(meta) => !is_reclaimed(&meta),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        }
    }

    /// Tells whether the file of `ip` is empty, so that the next ADD takes it for nobody's.
    #[must_use]
    pub fn is_empty(&self, ip: IpAddr) -> bool {
        fs::symlink_metadata(self.path(ip)).is_ok_and(|meta| is_reclaimed(&meta))
    }

    fn path(&self, ip: IpAddr) -> PathBuf {
        self.dir.join(ip.to_string())
    }

    /// The addresses that have a file, without waiting for the lock: a glimpse.
    pub fn glimpse(&self) -> Result<HashSet<IpAddr>, StoreError> {
        match addresses(&self.dir, "") {
            Ok(leases) => Ok(leases.into_iter().map(|(ip, _)| ip).collect()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(HashSet::new()),
            Err(error) => Err(error).attempt("list", &self.dir),
        }
    }

    /// Tells whether the folder has so many files, leases or not, without reading their names; as [`Self::glimpse`].
    pub fn has_files(&self, count: u128) -> Result<bool, StoreError> {
        match file::has_entries(&self.dir, count) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(count == 0),
            answer => answer.attempt("list", &self.dir),
        }
    }

    /// The addresses whose file is of an earlier boot, so that the next ADD frees them; as
    /// [`Self::glimpse`].
    #[must_use]
    pub fn ended(&self) -> Vec<IpAddr> {
        index::ended(&self.data_dir, &self.network)
    }
}

/// Tells whether a lease is what somebody has left who was killed before he wrote it, or lost power.
fn is_reclaimed(meta: &fs::Metadata) -> bool {
    meta.is_file() && meta.len() == 0
}

#[cfg(test)]
pub(crate) mod tests;

//! A directory as the database: one file per leased address, named by it and holding its owner.
//!
//! # Format
//! That of the reference plugin `host-local`: `<dataDir>/<network>/` holds `lock`, a file per
//! lease, and `last_reserved_ip.<n>` for the n-th pool. Every call works under `flock(2)` on
//! `lock`, as the reference does, so both may share a directory. `ls` shows what is leased, `rm`
//! frees it.
//!
//! # Crashes
//! A lease appears by `link(2)`, complete or not at all. An empty file, as the reference leaves one
//! behind when it is killed between creating and writing, is nobody's: it is reclaimed, under the
//! lock, under which nobody else can be about to write it. Nothing is synced to the disk: after a
//! power failure, containers are gone with their leases.
//!
//! # Size
//! Whose lease a file is stands in the file, so the reference reads every file in every call. An
//! index beside the directory (see [`index`]) answers that question here with one look-up.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, DirEntryExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::owner::Owner;
use index::Index;

mod error;
pub mod index;

use error::Attempt;
pub use error::StoreError;

/// The folder of our own, in the data directory. No network's name begins with a dot, and the
/// reference never looks outside its network's folder.
const STATE: &str = ".underpass";

/// Longer than nearly every file here, in bytes.
const SHORT: usize = 512;

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

    /// The folder of the leases.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Waits for the lock, making folder and lock file if need be.
    pub fn lock(&self) -> Result<Locked, StoreError> {
        let lock = match self.open_lock() {
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
                self.open_lock()
            }
            outcome => outcome,
        };
        self.wait(lock)
    }

    /// As [`Self::lock`], but nothing if there is no folder: then nothing is leased.
    pub fn lock_existing(&self) -> Result<Option<Locked>, StoreError> {
        match self.open_lock() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            outcome => self.wait(outcome).map(Some),
        }
    }

    fn lock_path(&self) -> PathBuf {
        self.dir.join("lock")
    }

    fn open_lock(&self) -> io::Result<File> {
        OpenOptions::new()
            .read(true)
            // std asks for write access wherever it may create; the file is never written to.
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o750)
            .open(self.lock_path())
    }

    fn wait(&self, lock: io::Result<File>) -> Result<Locked, StoreError> {
        let path = self.lock_path();
        let lock = lock.attempt("open the lock file", &path)?;
        lock.lock().attempt("lock", &path)?;
        let folder = |path: &Path| fs::metadata(path).attempt("look at the folder", path);
        let leases = folder(&self.dir)?;
        let beside = leases.dev() == folder(&self.data_dir)?.dev();
        let modified = leases.modified().attempt("look at the folder", &self.dir)?;
        let index = Index::open(self.dir.clone(), self.state_dir(beside), modified);
        Ok(Locked {
            store: self.clone(),
            index,
            _lock: lock,
        })
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
            Err(error) => Err(error).attempt("read the lease", &path),
        }
    }

    fn path(&self, ip: IpAddr) -> PathBuf {
        self.dir.join(ip.to_string())
    }

    /// The addresses that have a file, without waiting for the lock: a glimpse.
    pub fn glimpse(&self) -> Result<HashSet<IpAddr>, StoreError> {
        match leases(&self.dir) {
            Ok(leases) => Ok(leases.into_iter().map(|(ip, _)| ip).collect()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(HashSet::new()),
            Err(error) => Err(error).attempt("list", &self.dir),
        }
    }

    /// Where the index lives: beside the folder, or inside where the folder is a mount of its own,
    /// as hard links do not cross that border. There, too, the reference reads it as what it
    /// is: the same leases once more.
    fn state_dir(&self, beside: bool) -> PathBuf {
        if beside {
            self.data_dir.join(STATE).join(&self.network)
        } else {
            self.dir.join(STATE)
        }
    }
}

/// The leases, with the lock held. Dropping it releases the lock.
#[derive(Debug)]
pub struct Locked {
    store: Store,
    // Dropped before the lock: the index leaves its mark while the lock is held.
    index: Index,
    _lock: File,
}

impl Locked {
    /// Leases `ip` to `owner`. False if it is somebody's already.
    pub fn reserve(&mut self, ip: IpAddr, owner: &Owner) -> Result<bool, StoreError> {
        self.index.bring_up_to_date()?;
        let path = self.store.path(ip);
        match fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_file() && meta.len() == 0 => {
                fs::remove_file(&path).attempt("reclaim the empty lease", &path)?;
            }
            Ok(_) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).attempt("look at the lease", &path),
        }
        let staged = self.index.stage(ip, owner)?;
        match fs::hard_link(&staged, &path) {
            Ok(()) => Ok(true),
            Err(error) => {
                self.index.forget(ip);
                if error.kind() == io::ErrorKind::AlreadyExists {
                    return Ok(false);
                }
                Err(error).attempt("create the lease", &path)
            }
        }
    }

    /// Frees `ip` if it is exactly `owner`'s. False if it is not.
    pub fn release(&mut self, ip: IpAddr, owner: &Owner) -> Result<bool, StoreError> {
        if self.owner(ip)?.as_ref() != Some(owner) {
            return Ok(false);
        }
        self.remove(ip)?;
        Ok(true)
    }

    /// Frees all that is `owner`'s; legacy leases only if there is nothing else, as the reference
    /// does.
    pub fn release_all(&mut self, owner: &Owner) -> Result<(), StoreError> {
        let leases = self.owned(owner)?;
        let exact = leases.iter().any(|(_, found)| found == owner);
        let mut outcome = Ok(());
        for (ip, found) in leases {
            if exact && found != *owner {
                continue;
            }
            outcome = outcome.and(self.remove(ip));
        }
        if outcome.is_ok() {
            self.index.forget_owner(owner);
        }
        outcome
    }

    /// The leases of `owner`, legacy ones of its container included.
    pub fn owned(&mut self, owner: &Owner) -> Result<Vec<(IpAddr, Owner)>, StoreError> {
        // Without an index (a full disk, say) it takes longer, and is no less right.
        let candidates = match self.index.bring_up_to_date() {
            Ok(()) => self.index.candidates(owner),
            Err(_) => self.leased()?.into_iter().collect(),
        };
        let mut leases = Vec::new();
        for ip in candidates {
            match self.owner(ip)? {
                Some(found) if found.covers(owner) => leases.push((ip, found)),
                Some(_) => {}
                // A call was killed just before it made the lease, or somebody else removed it.
                None => self.index.forget(ip),
            }
        }
        Ok(leases)
    }

    /// Whose `ip` is: nobody's, if there is no file or it is empty.
    pub fn owner(&self, ip: IpAddr) -> Result<Option<Owner>, StoreError> {
        self.store.owner(ip)
    }

    /// Removes the file of `ip`, whoever's it is. Succeeds if there is none.
    pub fn remove(&mut self, ip: IpAddr) -> Result<(), StoreError> {
        let path = self.store.path(ip);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).attempt("remove the lease", &path);
            }
            _ => {}
        }
        self.index.forget(ip);
        Ok(())
    }

    /// The addresses that have a file.
    pub fn leased(&self) -> Result<HashSet<IpAddr>, StoreError> {
        let leases = leases(&self.store.dir).attempt("list", &self.store.dir)?;
        Ok(leases.into_iter().map(|(ip, _)| ip).collect())
    }

    /// Builds the index anew from every lease.
    pub fn rebuild_index(&mut self) -> Result<(), StoreError> {
        self.index.discard();
        self.index.bring_up_to_date()
    }

    /// The address that pool `pool` leased last; nothing if that is not known.
    #[must_use]
    pub fn last_reserved(&self, pool: usize) -> Option<IpAddr> {
        let content = read_short(&self.last_reserved_path(pool)).ok()?;
        underpass_cni::address::parse_ip(str::from_utf8(&content).ok()?.trim())
    }

    /// Remembers what pool `pool` leased last.
    pub fn set_last_reserved(&mut self, pool: usize, ip: IpAddr) -> Result<(), StoreError> {
        let path = self.last_reserved_path(pool);
        let text = ip.to_string();
        if write_over(&path, &text) {
            return Ok(());
        }
        let staged = self.index.stage_text("last", &text)?;
        fs::rename(&staged, &path).attempt("write", &path)
    }

    fn last_reserved_path(&self, pool: usize) -> PathBuf {
        self.store.dir.join(format!("last_reserved_ip.{pool}"))
    }
}

/// Writes `text` over a file of the same length, in one system call, which no kill divides: to make
/// a file takes longer than all the rest of an ADD. False if that is not possible.
fn write_over(path: &Path, text: &str) -> bool {
    let Ok(file) = OpenOptions::new().write(true).open(path) else {
        return false;
    };
    let same_length = file
        .metadata()
        .is_ok_and(|meta| meta.is_file() && usize::try_from(meta.len()) == Ok(text.len()));
    same_length
        && file
            .write_at(text.as_bytes(), 0)
            .is_ok_and(|written| written == text.len())
}

/// The content of a file that is expected to be shorter than [`SHORT`]: three system calls.
fn read_short(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let mut content = vec![0; SHORT];
    let length = file.read(&mut content)?;
    content.truncate(length);
    if length == SHORT {
        file.read_to_end(&mut content)?;
    }
    Ok(content)
}

/// The files in `dir` that are named by an address, with their inode numbers. Reads no file.
fn leases(dir: &Path) -> io::Result<Vec<(IpAddr, u64)>> {
    let mut leases = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(ip) = name.to_str().and_then(|name| name.parse::<IpAddr>().ok()) else {
            continue;
        };
        // Another spelling of an address is not the file that the address is looked up by.
        if ip.to_string().as_str() == name && entry.file_type()?.is_file() {
            leases.push((ip, entry.ino()));
        }
    }
    Ok(leases)
}

#[cfg(test)]
mod tests;

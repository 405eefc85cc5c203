//! The files of an index: where each is, and what one line of it says.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::PathBuf;

use super::super::error::{Attempt, StoreError};
use super::super::file::{remove_if_there, text, write_out};
use crate::home::Home;
use crate::owner::Owner;

/// In front of the address in the name of a link: the reference looks into each folder below that of
/// the leases, and must not take a link for one.
pub(super) const LINK_PREFIX: &str = "lease-";

/// The longest owner that is written out as a file name, in bytes.
const NAME_MAX: usize = 200;

/// In front of a line that says where an owner's device is.
const HOME: char = '@';

/// The folder of an index. Nothing is said about whether there is one.
#[derive(Clone, Debug)]
pub(super) struct State(PathBuf);

impl State {
    pub(super) fn at(folder: PathBuf) -> Self {
        Self(folder)
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The folder of links.
    pub(super) fn links(&self) -> PathBuf {
        self.0.join("address")
    }

    /// The link to the lease of `ip`.
    pub(super) fn link(&self, ip: IpAddr) -> PathBuf {
        self.links().join(format!("{LINK_PREFIX}{ip}"))
    }

    /// Makes the folders.
    pub(super) fn create(&self) -> Result<(), StoreError> {
        for folder in ["address", "owner"] {
            let path = self.0.join(folder);
            DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(&path)
                .attempt("create the folder", &path)?;
        }
        Ok(())
    }

    /// Removes everything. The mark goes first, and with it what the rest would count for; so a mark
    /// that stays is a failure, and nothing else is.
    pub(super) fn remove(&self) -> Result<(), StoreError> {
        let mark = self.file("mark");
        if mark.symlink_metadata().is_ok() {
            remove_if_there(&mark).attempt("remove", &mark)?;
        }
        let _ = fs::remove_dir_all(&self.0);
        Ok(())
    }

    /// Writes that `ip` may be `owner`'s, and where its device is, if that is known.
    pub(super) fn note(
        &self,
        ip: IpAddr,
        owner: &Owner,
        home: Option<Home>,
    ) -> Result<(), StoreError> {
        let path = self.owner(owner);
        // The newline comes first: whatever a crash left behind is a line of its own.
        let lines = match home {
            None => format!("\n{ip}"),
            Some(Home(number)) => format!("\n{ip}\n{HOME}{ip} {number}"),
        };
        OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&path)
            .and_then(|mut file| file.write_all(lines.as_bytes()))
            .attempt("write", &path)
    }

    /// Writes a lease where a hard link makes it valid. Returns the file's path.
    pub(super) fn stage(&self, ip: IpAddr, content: &str) -> Result<PathBuf, StoreError> {
        let path = self.link(ip);
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
        write_out(file, &path, content)?;
        Ok(path)
    }

    /// The lease of `ip` is gone.
    pub(super) fn forget(&self, ip: IpAddr) {
        let _ = fs::remove_file(self.link(ip));
    }

    /// All leases of `owner` are gone.
    pub(super) fn forget_owner(&self, owner: &Owner) {
        let _ = fs::remove_file(self.owner(owner));
    }

    /// The addresses that were noted for exactly this owner.
    pub(super) fn noted(&self, owner: &Owner) -> Vec<IpAddr> {
        let lines = text(&self.owner(owner)).unwrap_or_default();
        lines.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Where the device of `owner` is, if that was noted with the last lease of `ip`.
    pub(super) fn home(&self, ip: IpAddr, owner: &Owner) -> Option<Home> {
        let lines = text(&self.owner(owner)).unwrap_or_default();
        let mut home = None;
        for line in lines.lines() {
            if line.parse() == Ok(ip) {
                home = None;
            } else if let Some((of, number)) = line
                .strip_prefix(HOME)
                .and_then(|rest| rest.split_once(' '))
                && of.parse() == Ok(ip)
            {
                home = number.parse().ok().map(Home);
            }
        }
        home
    }

    fn owner(&self, owner: &Owner) -> PathBuf {
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
        self.0.join("owner").join(name)
    }
}

/// FNV-1a, which every build computes alike.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

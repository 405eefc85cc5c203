//! The leases of a network while its lock is held: what may change them.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use super::error::{Attempt, StoreError, both};
use super::file::{addresses, read_short, write_over};
use super::index::Index;
use super::{Store, is_reclaimed};
use crate::home::Home;
use crate::owner::Owner;

/// Who takes a lease.
#[derive(Clone, Copy, Debug)]
pub struct Holder<'a> {
    /// Whose it is to be.
    pub owner: &'a Owner,
    /// Where the container's device will be, if that is known.
    pub home: Option<Home>,
}

/// The leases, with the lock held. Dropping it releases the lock.
#[derive(Debug)]
pub struct Locked {
    store: Store,
    // Dropped before the lock: the index leaves its mark while the lock is held.
    pub(super) index: Index,
    _lock: File,
}

impl Locked {
    pub(super) fn new(store: Store, index: Index, lock: File) -> Self {
        Self {
            store,
            index,
            _lock: lock,
        }
    }

    /// The leases as they are seen without the lock.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Leases `ip` to `owner`, wherever that is. False if it is somebody's already.
    pub fn reserve(&mut self, ip: IpAddr, owner: &Owner) -> Result<bool, StoreError> {
        self.reserve_for(ip, Holder { owner, home: None })
    }

    /// Leases `ip` to `holder`. False if it is somebody's already.
    pub fn reserve_for(&mut self, ip: IpAddr, holder: Holder<'_>) -> Result<bool, StoreError> {
        self.index.bring_up_to_date()?;
        let path = self.store.path(ip);
        match fs::symlink_metadata(&path) {
            Ok(meta) if is_reclaimed(&meta) => {
                fs::remove_file(&path).attempt("reclaim the empty lease", &path)?;
            }
            Ok(_) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).attempt("look at the lease", &path),
        }
        self.index.make_lease(ip, holder)
    }

    /// Frees `ip` if it is exactly `owner`'s. False if it is not.
    pub fn release(&mut self, ip: IpAddr, owner: &Owner) -> Result<bool, StoreError> {
        if self.owner(ip)?.as_ref() != Some(owner) {
            return Ok(false);
        }
        self.free(ip, owner)?;
        Ok(true)
    }

    /// Frees all that is `owner`'s; legacy leases only if there is nothing else, as the reference
    /// does. Frees what it can, and names what stays.
    pub fn release_all(&mut self, owner: &Owner) -> Result<(), StoreError> {
        let (leases, mut outcome) = self.look_up(owner);
        let exact = leases.iter().any(|(_, found)| found == owner);
        for (ip, found) in leases {
            if exact && found != *owner {
                continue;
            }
            outcome = both(outcome, self.remove(ip));
        }
        if outcome.is_ok() {
            self.index.forget_owner(owner);
        }
        outcome
    }

    /// The leases of `owner`, legacy ones of its container included.
    pub fn owned(&mut self, owner: &Owner) -> Result<Vec<(IpAddr, Owner)>, StoreError> {
        let (leases, outcome) = self.look_up(owner);
        outcome.map(|()| leases)
    }

    /// The leases of `owner` that can be read, and what could not be of those that the index says are its.
    fn look_up(&mut self, owner: &Owner) -> (Vec<(IpAddr, Owner)>, Result<(), StoreError>) {
        let candidates = match self.index.bring_up_to_date() {
            Ok(true) => self.index.candidates(owner),
            // Without an index (a full disk, say) it takes longer, and is no less right.
            Ok(false) | Err(_) => match self.leased() {
                Ok(leased) => leased.into_iter().collect(),
                Err(error) => return (Vec::new(), Err(error)),
            },
        };
        let mut leases = Vec::new();
        let mut outcome = Ok(());
        for ip in candidates {
            match self.owner(ip) {
                Ok(Some(found)) if found.covers(owner) => leases.push((ip, found)),
                Ok(Some(_)) => {}
                // A call was killed just before it made the lease, or somebody else removed it.
                Ok(None) => self.index.forget(ip),
                Err(error) => {
                    let is_its = self.index.candidates(owner).contains(&ip);
                    let passed = if is_its {
                        Err(error)
                    } else {
                        error.pass_over()
                    };
                    outcome = both(outcome, passed);
                }
            }
        }
        leases.sort();
        (leases, outcome)
    }

    /// Whose `ip` is: nobody's, if there is no file or it is empty.
    pub fn owner(&self, ip: IpAddr) -> Result<Option<Owner>, StoreError> {
        self.store.owner(ip)
    }

    /// As [`Self::owner`], for who goes through all leases: see [`Store::owner_if_known`].
    pub fn owner_if_known(&self, ip: IpAddr) -> Result<Option<Owner>, StoreError> {
        self.store.owner_if_known(ip)
    }

    /// Removes the file of `ip`, whoever's it is. Succeeds if there is none.
    pub fn remove(&mut self, ip: IpAddr) -> Result<(), StoreError> {
        let path = self.store.path(ip);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(StoreError::lease_stays(&path, error));
            }
            _ => {}
        }
        self.index.forget(ip);
        Ok(())
    }

    /// Frees `ip`, whose owner is gone, and forgets the owner if that was the last one.
    pub fn free(&mut self, ip: IpAddr, owner: &Owner) -> Result<(), StoreError> {
        self.remove(ip)?;
        // Without an index nothing is to be forgotten, and every lease would be read.
        if matches!(self.index.bring_up_to_date(), Ok(true))
            && self.owned(owner).is_ok_and(|left| left.is_empty())
        {
            self.index.forget_owner(owner);
        }
        Ok(())
    }

    /// Where the device of `owner` is, who has `ip`: known only if an interface plugin said so when it took this very
    /// lease.
    pub fn home(&mut self, ip: IpAddr, owner: &Owner) -> Result<Option<Home>, StoreError> {
        Ok(if self.index.bring_up_to_date()? {
            self.index.home(ip, owner)
        } else {
            None
        })
    }

    /// The addresses that have a file.
    pub fn leased(&self) -> Result<HashSet<IpAddr>, StoreError> {
        let leases = addresses(&self.store.dir, "").attempt("list", &self.store.dir)?;
        Ok(leases.into_iter().map(|(ip, _)| ip).collect())
    }

    /// The addresses that somebody has: those with a file that is not empty. Completing the index reclaims empty ones, so
    /// there the list tells; without an index each file is looked at.
    pub fn taken(&mut self) -> Result<HashSet<IpAddr>, StoreError> {
        let is_indexed = self.index.bring_up_to_date()?;
        let mut taken = self.leased()?;
        taken.retain(|ip| is_indexed || self.store.is_leased(*ip));
        Ok(taken)
    }

    /// Builds the index anew from every lease. What no lease says is kept: where the owners' devices are.
    pub fn rebuild_index(&mut self) -> Result<(), StoreError> {
        let mut homes = Vec::new();
        for ip in self.leased()? {
            if let Some(owner) = self.owner_if_known(ip)?
                && let Some(home) = self.home(ip, &owner)?
            {
                homes.push((ip, owner, home));
            }
        }
        self.index.discard()?;
        if self.index.bring_up_to_date()? {
            for (ip, owner, home) in homes {
                self.index.note_home(ip, &owner, home)?;
            }
        }
        Ok(())
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
        self.index.replace(&path, &text)
    }

    fn last_reserved_path(&self, pool: usize) -> PathBuf {
        self.store.dir.join(format!("last_reserved_ip.{pool}"))
    }
}

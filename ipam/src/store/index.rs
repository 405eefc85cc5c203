//! An index over the leases, that nobody but this crate knows of, and that stays right when others
//! change the leases.
//!
//! # Contents
//! - `owner/<container>:<interface>`: the addresses that may be this owner's, one a line. Never
//!   trusted: the lease file itself is read before anything is done to it. An address too many is
//!   harmless, so lines are only appended. A line `@<address> <number>` after that of the address says
//!   that an interface plugin took this lease, in that network namespace. Whoever leases an address
//!   appends its line, so only what follows the last one counts.
//! - `address/lease-<address>`: a second hard link to each lease file that the index knows.
//! - `mark`: boot and machine, and the modification time of the directory with which the index was
//!   complete.
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
//! as a call of the reference, which reads them every time. What the old index knew for certain has
//! ended with the boot and is freed before; see [`reboot`].
//!
//! A lease that can't be read is not known. As long as there is one, the mark has no time, so each call compares
//! names, and tries to read it again.
//!
//! What it does not see is a lease that somebody writes over in place, for another owner: no plugin
//! does. An editor that makes a new file of it, `mv` and `rm` are seen.
//!
//! A second index for the same directory, by another path to it, is no danger: each sees the
//! other's mark as a change.
//!
//! # Where there is none
//! Without hard links (on vfat, say) there is no index: every lease is read in every call, as the
//! reference does it, and a lease is made by `rename(2)`. Each call finds that out for itself, so
//! nothing has to be remembered that could become wrong.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::error::{Attempt, StoreError, refuses_links};
use super::file::{addresses, read_short, remove_if_there, write_out};
use super::locked::Holder;
use crate::home::Home;
use crate::owner::Owner;
use mark::{Boot, Machine, Mark};
use state::{LINK_PREFIX, State};

mod mark;
mod place;
mod reboot;
mod state;

/// The folder of our own, in the data directory or in that of the leases. No network's name begins
/// with a dot, and what the reference finds below its network's folder it takes for no lease.
const FOLDER: &str = ".underpass";

/// A file in the folder of leases that is about to be one of them. The reference knows none of this
/// name.
const STAGED: &str = ".underpass-new";

/// The index of one network's leases. Use it only with the lock held.
#[derive(Debug)]
pub struct Index {
    leases: PathBuf,
    /// Where it may be: beside the folder of leases; or inside, where that is a mount.
    places: [State; 2],
    state: State,
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
    /// But for leases that can't be read. No modification time says so: the next call has to look again.
    Partial,
    /// There is no index here.
    Impossible,
}

/// Where the index of the leases in `<data_dir>/<network>` may be.
fn places(data_dir: &Path, network: &str) -> [State; 2] {
    [
        State::at(data_dir.join(FOLDER).join(network)),
        State::at(data_dir.join(network).join(FOLDER)),
    ]
}

/// The leases of `network` that an earlier boot has ended, and that the next call with the lock
/// frees.
pub(super) fn ended(data_dir: &Path, network: &str) -> Vec<IpAddr> {
    let leases = data_dir.join(network);
    marked(&places(data_dir, network))
        .map(|(state, mark)| reboot::ended(&leases, state, &mark))
        .unwrap_or_default()
}

/// The place that an index is at, and what it says of itself.
fn marked(places: &[State]) -> Option<(&State, Mark)> {
    places
        .iter()
        .find_map(|place| Some((place, Mark::read(&place.file("mark"))?)))
}

impl Index {
    pub(super) fn open(data_dir: &Path, network: &str, modified: SystemTime) -> Self {
        let places = places(data_dir, network);
        Self {
            leases: data_dir.join(network),
            state: places[0].clone(),
            places,
            modified,
            completeness: Completeness::Unknown,
        }
    }

    /// Makes sure that every lease is known. False if there can be no index: then they have to be
    /// looked at.
    pub(super) fn bring_up_to_date(&mut self) -> Result<bool, StoreError> {
        match self.completeness {
            Completeness::Marked(_) | Completeness::Partial => return Ok(true),
            Completeness::Impossible => return Ok(false),
            Completeness::Unknown => {}
        }
        let boot = Boot::current();
        let found = marked(&self.places).map(|(state, mark)| (state.clone(), mark));
        match found {
            Some((state, mark)) if mark.boot == boot => {
                self.state = state;
                if mark.time == Some(self.modified) {
                    self.completeness = Completeness::Marked(self.modified);
                } else {
                    self.state.create()?;
                    let known = self.linked()?;
                    self.complete(known, &boot, &mark.machine)?;
                }
            }
            Some((state, mark)) => {
                for ip in reboot::ended(&self.leases, &state, &mark) {
                    // One that can't be removed stays, as does every other that is in doubt.
                    let _ = fs::remove_file(self.leases.join(ip.to_string()));
                    state.forget(ip);
                }
                self.rebuild(&boot, &Machine::current().after(&mark.machine))?;
            }
            None => self.rebuild(&boot, &Machine::current())?,
        }
        Ok(self.completeness != Completeness::Impossible)
    }

    /// Forgets everything.
    pub(super) fn discard(&mut self) -> Result<(), StoreError> {
        self.completeness = Completeness::Unknown;
        self.places.iter().try_for_each(State::remove)
    }

    /// Makes the lease of `ip` for `owner`, complete or not at all. False if there is one.
    pub(super) fn make_lease(
        &mut self,
        ip: IpAddr,
        Holder { owner, home }: Holder<'_>,
    ) -> Result<bool, StoreError> {
        let lease = self.leases.join(ip.to_string());
        if self.bring_up_to_date()? {
            self.state.note(ip, owner, home)?;
            let staged = self.state.stage(ip, &owner.content())?;
            match fs::hard_link(&staged, &lease) {
                Ok(()) => return Ok(true),
                Err(error) if refuses_links(&error) => self.give_up(),
                Err(error) => {
                    self.state.forget(ip);
                    if error.kind() == io::ErrorKind::AlreadyExists {
                        return Ok(false);
                    }
                    return Err(error).attempt("create the lease", &lease);
                }
            }
        }
        // Whoever makes a lease holds the lock, so none can come in between.
        if lease.symlink_metadata().is_ok() {
            return Ok(false);
        }
        self.replace(&lease, &owner.content())?;
        Ok(true)
    }

    /// Writes a file among the leases by renaming one that is complete.
    pub(super) fn replace(&mut self, path: &Path, text: &str) -> Result<(), StoreError> {
        let staged = match self.completeness {
            Completeness::Marked(_) | Completeness::Partial => self.state.file("last"),
            Completeness::Unknown | Completeness::Impossible => self.leases.join(STAGED),
        };
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&staged);
        write_out(file, &staged, text)?;
        fs::rename(&staged, path)
            .inspect_err(|_| {
                let _ = fs::remove_file(&staged);
            })
            .attempt("write", path)
    }

    /// Addresses that may be `owner`'s, or its container's as a whole.
    pub(super) fn candidates(&self, owner: &Owner) -> Vec<IpAddr> {
        let mut candidates = self.state.noted(owner);
        candidates.extend(self.state.noted(&owner.legacy()));
        candidates.sort_unstable();
        candidates.dedup();
        candidates
    }

    /// Where the device of the owner of `ip` is; the index is up to date.
    pub(super) fn home(&self, ip: IpAddr, owner: &Owner) -> Option<Home> {
        self.state.home(ip, owner)
    }

    /// Writes that the device of the owner of `ip` is there.
    pub(super) fn note_home(
        &self,
        ip: IpAddr,
        owner: &Owner,
        home: Home,
    ) -> Result<(), StoreError> {
        self.state.note(ip, owner, Some(home))
    }

    /// The lease of `ip` is gone.
    pub(super) fn forget(&mut self, ip: IpAddr) {
        if self.completeness != Completeness::Impossible {
            self.state.forget(ip);
        }
    }

    /// All leases of `owner` are gone.
    pub(super) fn forget_owner(&mut self, owner: &Owner) {
        if self.completeness != Completeness::Impossible {
            self.state.forget_owner(owner);
        }
    }

    /// Builds the index from every lease.
    ///
    /// Fails if an old mark stays: with that, a later call would take new links for old ones.
    fn rebuild(&mut self, boot: &Boot, machine: &Machine) -> Result<(), StoreError> {
        self.discard()?;
        if let Some(place) = place::find(&self.leases, &self.places)?.cloned() {
            self.state = place;
            // A link that could not be removed counts for nothing: its owner may not be noted any more.
            self.complete(HashMap::new(), boot, machine)
        } else {
            self.completeness = Completeness::Impossible;
            Ok(())
        }
    }

    /// The leases that are linked, and the inode numbers of the links.
    fn linked(&self) -> Result<HashMap<IpAddr, u64>, StoreError> {
        let links = self.state.links();
        let linked = addresses(&links, LINK_PREFIX).attempt("list", &links)?;
        Ok(linked.into_iter().collect())
    }

    /// Learns what is missing beside the links in `known`.
    fn complete(
        &mut self,
        known: HashMap<IpAddr, u64>,
        boot: &Boot,
        machine: &Machine,
    ) -> Result<(), StoreError> {
        let all_read = self.learn_new_leases(known)?;
        if self.completeness == Completeness::Impossible {
            return Ok(());
        }
        let mark = self.state.file("mark");
        self.completeness = if all_read {
            Completeness::Marked(Mark::write(&mark, &self.leases, boot, machine)?)
        } else {
            Mark::write_without_time(&mark, boot, machine)?;
            Completeness::Partial
        };
        Ok(())
    }

    /// Somebody has mounted something since the index was made. This call has none; the next one finds
    /// another place.
    fn give_up(&mut self) {
        // What stays has a mark that does not fit the changes of this call.
        let _ = self.discard();
        self.completeness = Completeness::Impossible;
    }

    /// Reads the leases that somebody else made, and drops the links of those that somebody else
    /// removed. False if one can't be read: all others are learned, as it concerns nobody but its owner.
    fn learn_new_leases(&mut self, mut known: HashMap<IpAddr, u64>) -> Result<bool, StoreError> {
        let mut all_read = true;
        for (ip, inode) in addresses(&self.leases, "").attempt("list", &self.leases)? {
            if known.remove(&ip) == Some(inode) {
                continue;
            }
            let lease = self.leases.join(ip.to_string());
            let content = match read_short(&lease) {
                Ok(content) => content,
                // Somebody has just removed it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    self.state.forget(ip);
                    continue;
                }
                Err(error) => {
                    StoreError::unreadable(&lease, error).pass_over()?;
                    // A link, if there is one, is to what was there before.
                    self.state.forget(ip);
                    all_read = false;
                    continue;
                }
            };
            if content.is_empty() {
                fs::remove_file(&lease).attempt("reclaim the empty lease", &lease)?;
                continue;
            }
            let Some(owner) = Owner::parse(&content) else {
                continue;
            };
            self.state.note(ip, &owner, None)?;
            let link = self.state.link(ip);
            remove_if_there(&link).attempt("remove", &link)?;
            match fs::hard_link(&lease, &link) {
                Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                    self.give_up();
                    return Ok(all_read);
                }
                // One that is immutable takes no link; then it is read each time.
                Err(error) if refuses_links(&error) => {}
                outcome => outcome.attempt("create", &link)?,
            }
        }
        for ip in known.into_keys() {
            self.forget(ip);
        }
        Ok(all_read)
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        if let Completeness::Marked(time) = self.completeness {
            // Without the mark the next call compares names, and is right as well.
            let _ = mark::set_modified(&self.leases, time);
        }
    }
}

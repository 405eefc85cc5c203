//! Leases that lost DELs have left, of attachments that nobody knows any more: found first, and freed only if
//! they are still the same when the caller is sure that no ADD is at them.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime};

use underpass_cni::{Error, NetConf};

use crate::config;
use crate::dead::Freed;
use crate::home::Home;
use crate::owner::Owner;
use crate::store::{Locked, Store};

/// A lease without an attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphan {
    ip: IpAddr,
    owner: Owner,
    file: Identity,
}

/// What tells a lease from another one of the same address for the same owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    inode: u64,
    modified: SystemTime,
}

/// Lists the leases in the folder of the config's network that an interface plugin took in `home`, that are older
/// than `grace`, and of which `is_attached` does not know the container and its interface. Leases of a plugin that
/// works elsewhere, or only gives addresses, are never among them, nor are notes of an operator.
pub fn find_orphans(
    conf: &NetConf,
    home: Home,
    grace: Duration,
    is_attached: impl Fn(&str, &str) -> bool,
) -> Result<Vec<Orphan>, Error> {
    let now = SystemTime::now();
    // One from the future is young: somebody has set the clock.
    let is_old = |file: Identity| {
        now.duration_since(file.modified)
            .is_ok_and(|age| age >= grace)
    };
    let Some(mut locked) = store(conf)?.lock_existing()? else {
        return Ok(Vec::new());
    };
    let mut orphans = Vec::new();
    for ip in locked.leased()? {
        let orphan = orphan(&mut locked, home, ip, &is_attached)?;
        orphans.extend(orphan.filter(|orphan| is_old(orphan.file)));
    }
    orphans.sort_unstable_by_key(|orphan| orphan.ip);
    Ok(orphans)
}

/// Frees those that are what they were when they were found, and adds them to `freed`. Goes on past failures, and
/// returns the first.
pub fn free_orphans(
    conf: &NetConf,
    home: Home,
    found: &[Orphan],
    is_attached: impl Fn(&str, &str) -> bool,
    freed: &mut Vec<Freed>,
) -> Result<(), Error> {
    let Some(mut locked) = store(conf)?.lock_existing()? else {
        return Ok(());
    };
    let mut outcome = Ok(());
    for before in found {
        let done = match orphan(&mut locked, home, before.ip, &is_attached) {
            Ok(Some(now)) if now == *before => locked
                .free(before.ip, &before.owner)
                .map_err(Error::from)
                .map(|()| {
                    freed.push(Freed {
                        network: conf.name.clone(),
                        ip: before.ip,
                        owner: before.owner.clone(),
                    });
                }),
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        outcome = outcome.and(done);
    }
    outcome
}

fn store(conf: &NetConf) -> Result<Store, Error> {
    Ok(Store::new(&config::data_dir(conf)?, &conf.name))
}

/// Looks at one lease.
fn orphan(
    locked: &mut Locked,
    home: Home,
    ip: IpAddr,
    is_attached: impl Fn(&str, &str) -> bool,
) -> Result<Option<Orphan>, Error> {
    let Some(owner) = locked.owner_if_known(ip)?.filter(Owner::is_attachment) else {
        return Ok(None);
    };
    if locked.home(ip, &owner)? != Some(home)
        || owner
            .ifname
            .as_deref()
            .is_none_or(|ifname| is_attached(&owner.container_id, ifname))
    {
        return Ok(None);
    }
    let file = identity(locked, ip)
        .map_err(|error| Error::io(format!("cannot look at the lease of {ip}"), &error))?;
    Ok(Some(Orphan { ip, owner, file }))
}

fn identity(locked: &Locked, ip: IpAddr) -> io::Result<Identity> {
    let meta = fs::metadata(locked.store().dir().join(ip.to_string()))?;
    Ok(Identity {
        inode: meta.ino(),
        modified: meta.modified()?,
    })
}

#[cfg(test)]
mod tests;

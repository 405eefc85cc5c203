//! STATUS: could an ADD be served?

use std::collections::HashSet;
use std::net::IpAddr;

use nix::unistd::{AccessFlags, access};
use underpass_cni::{Code, Error, NetworkRequest};

use crate::config;
use crate::exhausted::Exhausted;
use crate::pool::Pool;
use crate::shorten;
use crate::store::Store;

/// Says no with code 50 if some pool has no free address, or the folder cannot be written. Lists
/// the folder, waits for no lock, changes nothing; reads leases only where a pool seems to be full.
/// Those that a reboot has ended do not count then, because an ADD would free them. Ranges that the
/// runtime names at each ADD are not known here.
pub fn status(request: &NetworkRequest) -> Result<(), Error> {
    status_without(request, |_| HashSet::new())
}

/// Does what [`status()`] does, for an interface plugin whose ADD frees what lost DELs have left. Where a pool seems to be
/// full, `dead` lists the addresses that it would free.
pub fn status_without(
    request: &NetworkRequest,
    dead: impl FnOnce(&Store) -> HashSet<IpAddr>,
) -> Result<(), Error> {
    let pools = if config::waits_for_ranges(&request.conf)? {
        Vec::new()
    } else {
        config::pools(&request.conf)?
    };
    let data_dir = config::data_dir(&request.conf)?;
    let store = Store::new(&data_dir, &request.conf.name);
    let leased = store
        .glimpse()
        .map_err(|error| Error::new(Code::NotAvailable, error.to_string()))?;
    if pools.iter().any(|pool| is_full(pool, &leased)) {
        let ended = &leased - &store.ended().into_iter().collect();
        let leased = &ended - &dead(&store);
        if let Some(pool) = pools.iter().find(|pool| is_full(pool, &leased)) {
            return Err(Error::not_available(
                Exhausted::of(&store, pool).to_string(),
            ));
        }
    }
    // The folder that an ADD would write in, or make it in.
    if let Some(folder) = store.dir().ancestors().find(|folder| folder.exists()) {
        access(folder, AccessFlags::W_OK | AccessFlags::X_OK).map_err(|errno| {
            Error::not_available(format!(
                "the folder of the leases, {}, cannot be written: {}: make it writable, or set ipam.dataDir",
                shorten::path(folder),
                errno.desc()
            ))
        })?;
    }
    Ok(())
}

fn is_full(pool: &Pool, leased: &HashSet<IpAddr>) -> bool {
    u128::try_from(in_use(pool, leased)).is_ok_and(|in_use| in_use >= pool.capacity())
}

/// Counts the leases of a pool. A gateway's own does not count, as nobody is given it.
pub(crate) fn in_use(pool: &Pool, leased: &HashSet<IpAddr>) -> usize {
    let is_in_pool = |ip: &&IpAddr| {
        pool.range_of(**ip)
            .is_some_and(|range| range.gateway() != **ip)
    };
    leased.iter().filter(is_in_pool).count()
}

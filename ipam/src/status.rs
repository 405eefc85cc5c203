//! STATUS: could an ADD be served?

use std::collections::HashSet;
use std::net::IpAddr;

use underpass_cni::{Code, Error, NetworkRequest};

use crate::config;
use crate::exhausted::Exhausted;
use crate::pool::Pool;
use crate::sample::{Sample, require_room};
use crate::store::Store;

/// Says no with code 50 if some pool has no free address, `resolvConf` cannot be read, or the folder cannot be written. Lists
/// the folder, waits for no lock, changes nothing; reads leases only where a pool seems to be full.
/// Those that a reboot has ended do not count then, because an ADD would free them. Ranges that the
/// runtime names at each ADD are not known here.
pub fn status(request: &NetworkRequest) -> Result<(), Error> {
    status_without(request, |_| HashSet::new()).map(drop)
}

/// Does what [`status()`] does, for an interface plugin whose ADD frees what lost DELs have left. Where a pool seems to be
/// full, `dead` lists the addresses that it would free. Returns what an ADD would give: whether it can become an interface
/// is the plugin's to say.
pub fn status_without(
    request: &NetworkRequest,
    dead: impl FnOnce(&Store) -> HashSet<IpAddr>,
) -> Result<Sample, Error> {
    let conf = &request.conf;
    let pools = config::known_pools(conf)?;
    let sample = Sample::of(conf, &pools).map_err(|error| match error.code {
        Code::Io => Error {
            code: Code::NotAvailable,
            ..error
        },
        _ => error,
    })?;
    let store = Store::new(&config::data_dir(conf)?, &conf.name);
    // A pool is full of so many leases at least, and in most folders there are fewer files of any kind.
    let fewest = pools.iter().map(Pool::capacity).min().unwrap_or(u128::MAX);
    let leased = match store.has_files(fewest) {
        Ok(true) => store.glimpse(),
        answer => answer.map(|_| HashSet::new()),
    };
    let leased = leased.map_err(|error| Error::new(Code::NotAvailable, error.to_string()))?;
    if pools.iter().any(|pool| is_full(pool, &leased)) {
        let ended = &leased - &store.ended().into_iter().collect();
        let mut leased = &ended - &dead(&store);
        let full: Vec<&Pool> = pools.iter().filter(|pool| is_full(pool, &leased)).collect();
        // An ADD reclaims what somebody left empty who was killed, or lost power.
        leased.retain(|ip| {
            let is_of_full = full.iter().any(|pool| pool.range_of(*ip).is_some());
            !is_of_full || !store.is_empty(*ip)
        });
        if let Some(pool) = pools.iter().find(|pool| is_full(pool, &leased)) {
            return Err(Error::not_available(
                Exhausted::of(&store, pool).to_string(),
            ));
        }
    }
    require_room(&store)?;
    Ok(sample)
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

//! A pool without a free address: who has them, and what to do about it.

use std::net::IpAddr;
use std::path::PathBuf;

use thiserror::Error;

use crate::pool::Pool;
use crate::shorten;
use crate::store::Store;

/// So many owners are named.
const NAMED: usize = 3;

/// No address is left. The words are those of the reference plugin; the rest comes after them.
#[derive(Debug, Error)]
#[error(
    "no IP addresses available in range set: {}: {} holds {}; {}",
    shorten::part(pool), shorten::path(folder), held(*leases, holders), remedy(*leases, *unusable)
)]
pub(crate) struct Exhausted {
    pool: Pool,
    folder: PathBuf,
    /// How many leases the folder holds, of all pools.
    leases: usize,
    /// Some of this pool's, as text.
    holders: Vec<String>,
    /// One that nobody has leased, and that is of no use.
    unusable: Option<IpAddr>,
}

impl Exhausted {
    /// Looks who has the addresses of `pool`.
    pub(crate) fn of(store: &Store, pool: &Pool) -> Self {
        // It is a message that is written here: what can't be read is left out of it.
        let leased = store.glimpse().unwrap_or_default();
        let mut ours: Vec<IpAddr> = leased.iter().copied().collect();
        ours.retain(|ip| pool.range_of(*ip).is_some());
        ours.sort_unstable();
        let holder = |ip: IpAddr| Some(format!("{ip} of {}", store.owner(ip).ok()??));
        Self {
            pool: pool.clone(),
            folder: store.dir().to_owned(),
            leases: leased.len(),
            holders: ours.into_iter().filter_map(holder).take(NAMED).collect(),
            unusable: None,
        }
    }

    /// Names an address that is free, and that no container can have.
    pub(crate) fn but_for(self, unusable: Option<IpAddr>) -> Self {
        Self { unusable, ..self }
    }
}

fn held(leases: usize, holders: &[String]) -> String {
    let count = match leases {
        0 => return "no lease".to_owned(),
        1 => "1 lease".to_owned(),
        _ => format!("{leases} leases"),
    };
    match holders {
        [] => count,
        holders => format!("{count}, such as {}", holders.join(", ")),
    }
}

fn remedy(leases: usize, unusable: Option<IpAddr>) -> String {
    const MORE: &str = "enlarge the range, or free what containers that are gone still hold: by DEL, by GC, or by removing their files";
    match unusable {
        Some(ip) => {
            format!("{ip} is the node's own or leads to others (`ip route get {ip}`): {MORE}")
        }
        None if leases == 0 => {
            "enlarge the range: it has no address besides the gateway's".to_owned()
        }
        None => MORE.to_owned(),
    }
}

//! What an ADD would give, without taking it: whether every ADD would fail, asked ahead of one.

use std::io;
use std::path::Path;

use nix::sys::statvfs::statvfs;
use nix::unistd::{AccessFlags, access};
use underpass_cni::{Dns, Error, IpConfig, NetConf, Route};

use crate::config;
use crate::pool::{Candidate, Pool};
use crate::shorten;
use crate::store::Store;

/// What an ADD would give, if all addresses were free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The first address of each pool that has one.
    pub ips: Vec<IpConfig>,
    /// Routes, as configured.
    pub routes: Vec<Route>,
    /// Resolver settings, from `resolvConf`.
    pub dns: Dns,
}

/// Fails as every ADD would, except for want of addresses. Ranges that the runtime names at each ADD are not known here.
/// Reads a little, waits for no lock, changes nothing.
pub fn sample(conf: &NetConf) -> Result<Sample, Error> {
    let sample = Sample::of(conf, &config::known_pools(conf)?)?;
    let store = Store::new(&config::data_dir(conf)?, &conf.name);
    require_room(&store)?;
    Ok(sample)
}

impl Sample {
    pub(crate) fn of(conf: &NetConf, pools: &[Pool]) -> Result<Self, Error> {
        let (routes, dns) = config::routes_and_dns(conf)?;
        let first = |pool: &Pool| {
            let Candidate { ip, range } = pool.candidates(None).next()?;
            Some(IpConfig {
                interface: None,
                address: range.address(ip),
                gateway: Some(range.gateway()),
            })
        };
        Ok(Self {
            ips: pools.iter().filter_map(first).collect(),
            routes,
            dns,
        })
    }
}

/// Says no with code 50 if the folder that an ADD would write in, or make it in, can't be written, or its file system is full.
pub(crate) fn require_room(store: &Store) -> Result<(), Error> {
    let Some(folder) = store.dir().ancestors().find(|folder| folder.exists()) else {
        return Ok(());
    };
    access(folder, AccessFlags::W_OK | AccessFlags::X_OK).map_err(|errno| {
        Error::not_available(format!(
            "the folder of the leases, {}, cannot be written: {}: make it writable, or set ipam.dataDir",
            shorten::path(folder),
            errno.desc()
        ))
    })?;
    match is_full(folder) {
        // What can't be told stops nobody.
        Ok(false) | Err(_) => Ok(()),
        Ok(true) => Err(Error::not_available(format!(
            "the file system of the folder of the leases, {}, is full: make room on it, or set ipam.dataDir",
            shorten::path(folder)
        ))),
    }
}

/// Tells whether no file can be made there. Who gives addresses is root, for whom file systems keep a reserve: what is
/// free counts, and not what is free for everybody. Zero of zero is what file systems say that count no such thing.
fn is_full(folder: &Path) -> io::Result<bool> {
    let room = statvfs(folder)?;
    let is_used_up = |all, free| all > 0 && free == 0;
    Ok(
        is_used_up(room.blocks(), room.blocks_free())
            || is_used_up(room.files(), room.files_free()),
    )
}

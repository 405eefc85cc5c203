//! How full the pools of a network are, for whoever watches the node.

use underpass_cni::{Error, NetConf};

use crate::config;
use crate::status::in_use;
use crate::store::Store;

/// A pool, and how much of it is leased.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Its ranges: `10.0.0.2-10.0.0.254`, and others after commas.
    pub ranges: String,
    /// The addresses that are leased.
    pub in_use: usize,
    /// The addresses that can be leased.
    pub size: u128,
}

/// Looks at the pools that the config names, and at the folder of leases: it waits for no lock and reads no lease.
/// Ranges that the runtime names at each ADD are not known here.
pub fn usage(conf: &NetConf) -> Result<Vec<Usage>, Error> {
    let pools = config::known_pools(conf)?;
    if pools.is_empty() {
        return Ok(Vec::new());
    }
    let store = Store::new(&config::data_dir(conf)?, &conf.name);
    let mut leased = store.glimpse()?;
    for ip in store.ended() {
        leased.remove(&ip);
    }
    Ok(pools
        .iter()
        .map(|pool| Usage {
            ranges: pool.to_string(),
            in_use: in_use(pool, &leased),
            size: pool.capacity(),
        })
        .collect())
}

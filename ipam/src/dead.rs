//! Leases of attachments that somebody else knows to be gone.

use std::fmt;
use std::net::IpAddr;

use underpass_cni::{Error, NetConf};

use crate::config;
use crate::owner::Owner;
use crate::store::Store;

/// An address that was leased to an attachment that is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Freed {
    /// The network whose it is.
    pub network: String,
    /// The address.
    pub ip: IpAddr,
    /// Who had it.
    pub owner: Owner,
}

impl fmt::Display for Freed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { network, ip, owner } = self;
        write!(f, "lease {ip} of network {network}, of container {owner}")
    }
}

/// Frees leases in the folders, beside that of the config's own network, of all networks that `is_of` names:
/// those of which `is_dead` says, given network, container and interface, that the attachment is gone. It is
/// asked while the folder's lock is held. Returns what was freed.
pub fn free_dead(
    conf: &NetConf,
    is_of: impl Fn(&str) -> bool,
    is_dead: impl Fn(&str, &str, &str) -> bool,
) -> Result<Vec<Freed>, Error> {
    let mut freed = Vec::new();
    let data_dir = config::data_dir(conf)?;
    for network in Store::networks(&data_dir)? {
        if !is_of(&network) {
            continue;
        }
        let Some(mut locked) = Store::new(&data_dir, &network).lock_existing()? else {
            continue;
        };
        for ip in locked.leased()? {
            let Some(owner) = locked.owner(ip)? else {
                continue;
            };
            if let Some(ifname) = &owner.ifname
                && is_dead(&network, &owner.container_id, ifname)
            {
                locked.free(ip, &owner)?;
                freed.push(Freed {
                    network: network.clone(),
                    ip,
                    owner,
                });
            }
        }
    }
    freed.sort_unstable_by_key(|freed| freed.ip);
    Ok(freed)
}

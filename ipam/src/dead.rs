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
            let Some(owner) = locked.owner_if_known(ip)? else {
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

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::store::tests::{conf_of, spoil, without_privileges};

    #[test]
    fn one_that_cannot_be_read_stays_and_the_others_go() {
        let _user = without_privileges();
        let folder = TempDir::new().expect("a temporary folder");
        let conf = conf_of(folder.path());
        let owner = Owner::new("dead", "eth0");
        let [unread, read]: [IpAddr; 2] =
            ["10.0.0.2", "10.0.0.3"].map(|ip| ip.parse().expect("an address"));
        let store = Store::new(folder.path(), "net");
        let mut locked = store.lock().expect("the lock");
        for ip in [unread, read] {
            assert!(locked.reserve(ip, &owner).expect("a reservation"));
        }
        drop(locked);
        spoil(&store.dir().join(unread.to_string()));
        let freed = free_dead(&conf, |_| true, |_, container, _| container == "dead");
        let freed: Vec<_> = freed
            .expect("a call")
            .into_iter()
            .map(|freed| freed.ip)
            .collect();
        assert_eq!(freed, [read]);
        assert!(store.is_leased(unread) && !store.is_leased(read));
    }
}

//! Leases of attachments that somebody else knows to be gone.

use underpass_cni::{Error, NetConf};

use crate::config;
use crate::store::Store;

/// Frees leases in the folders, beside that of the config's own network, of all networks that `is_of` names:
/// those of which `is_dead` says, given network, container and interface, that the attachment is gone. It is
/// asked while the folder's lock is held.
pub fn free_dead(
    conf: &NetConf,
    is_of: impl Fn(&str) -> bool,
    is_dead: impl Fn(&str, &str, &str) -> bool,
) -> Result<(), Error> {
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
                locked.remove(ip)?;
            }
        }
    }
    Ok(())
}

//! Attachments that a lost DEL has left: their devices went with the container, and what the maps and the
//! folders of leases have of them did not.

use std::collections::BTreeSet;

use underpass_abi::endpoint::{Attachment as Record, Owner, role};
use underpass_cni::NetConf;
use underpass_dataplane::Maps;
use underpass_netlink::{Netlink, link::By};

use crate::{
    error::Error,
    identity::{Identity, network_id},
    step::{forget, lease},
};

/// Takes away what is left of attachments whose devices are none of `devices`: of all networks, if `conf` says
/// where addresses are kept, so that those of the dead can be freed. The maps are the only ones who know that
/// they are dead; where nothing is known of their addresses, they stay there for another call. Goes on past
/// errors, and returns them.
pub(crate) fn reap(
    node: &Netlink,
    maps: &mut Maps,
    devices: &BTreeSet<u32>,
    conf: &NetConf,
) -> Result<(), Error> {
    let dead: Vec<_> = maps
        .attachments()?
        .into_iter()
        .filter(|(_, record)| !devices.contains(&record.ifindex))
        .collect();
    if dead.is_empty() {
        return Ok(());
    }
    let own = network_id(&conf.name);
    let keeps_addresses = lease::is_built_in(conf)?;
    let is_chained = conf.prev_result()?.is_some();
    let is_mine = |record: &Record| {
        keeps_addresses || record.role == role::CHAINED || record.network == own && !is_chained
    };
    let mut errors = Vec::new();
    for (owner, record) in dead.into_iter().filter(|(_, record)| is_mine(record)) {
        if let Err(error) = one(node, maps, owner, &record, conf) {
            errors.push(error);
        }
    }
    Error::collect(errors)
}

/// The leases come first: while the maps know the attachment, nobody can attach the container anew, so a lease
/// is that of the dead.
fn one(
    node: &Netlink,
    maps: &mut Maps,
    owner: Owner,
    record: &Record,
    conf: &NetConf,
) -> Result<(), Error> {
    // The list of devices may be older than the attachment: its device was there before it.
    if node.link(By::Index(record.ifindex))?.is_some() {
        return Ok(());
    }
    let is_dead = |network: &str, container: &str, ifname: &str| {
        let identity = Identity {
            network: network.to_owned(),
            container: container.to_owned(),
            ifname: ifname.to_owned(),
        };
        identity.owner() == owner
            && matches!(maps.attachment(owner), Ok(Some(known)) if known == *record)
    };
    let is_of = |network: &str| network_id(network) == record.network;
    lease::free_dead(conf, is_of, is_dead)?;
    forget(node, maps, owner, record)
}

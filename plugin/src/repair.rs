//! What the node changed behind our back, put right: what GC does at its end, and `underpass apply` all the time.
//! No attachment is touched.

use std::collections::BTreeSet;

use underpass_abi::endpoint::{device, role};
use underpass_cni::NetConf;
use underpass_dataplane::{
    Changed, Error as Dataplane, Maps,
    lock::Lock,
    policy::{self, Rules},
};
use underpass_netlink::Netlink;

use crate::{
    change::Change,
    conf::Conf,
    error::Error,
    glob::Glob,
    identity::network_id,
    step::{port, sysctl},
    uplink::reconcile,
};

/// Has the programs know the uplinks as they are, once for each of `patterns` as [`Surroundings::uplinks`] takes
/// them; go by the rules that `find` finds, or leave those that they have; and sit where somebody took them off. Has the node forward for
/// the containers that there are. Raises the epoch if anything changed that the programs go by, and notes what. Goes on past errors, and
/// returns them.
///
/// [`Surroundings::uplinks`]: crate::uplink::Surroundings::uplinks
pub(crate) fn repair(
    node: &Netlink,
    maps: &mut Maps,
    patterns: &[Option<&[Glob]>],
    find: fn() -> Result<Rules, Dataplane>,
    changes: &mut Vec<Change>,
) -> Result<(), Error> {
    let mut errors = Vec::new();
    let mut services = None;
    for patterns in patterns {
        match reconcile::repair(node, maps, *patterns, changes) {
            Ok(uplinks) => services = Some(uplinks.service_addresses),
            Err(error) => errors.push(error),
        }
    }
    if let Err(error) = sysctl::forward_again(node, maps, changes) {
        errors.push(error);
    }
    match policy::refresh(maps, find) {
        Ok(Changed::Yes) => changes.push(Change::Rules),
        Ok(Changed::No) => {}
        Err(error) => errors.push(error.into()),
    }
    if let Some(services) = services {
        match port::refresh(node, maps, &services) {
            Ok(more) => changes.extend(more),
            Err(error) => errors.push(error),
        }
    }
    Error::collect(errors)
}

/// Chooses the uplinks that are brought up to date for an entry of a list: patterns of their names, or all. An entry that gives no addresses,
/// as one for host ports, names some or adds none for containers whose interface another entry has made, or that it serves no ports for.
pub(crate) fn uplinks(
    conf: &NetConf,
    decoded: &Conf,
    maps: &Maps,
) -> Result<Option<Vec<Glob>>, Error> {
    // Who can't be understood is named elsewhere, and is no reason to leave the others as they are.
    let gives_addresses = conf.ipam_type().map_or(true, |kind| kind.is_some());
    let is_needed = decoded.uplinks.is_some()
        || gives_addresses
        || serves_others(maps, network_id(&conf.name))?;
    Ok(if is_needed {
        decoded.uplinks.clone()
    } else {
        Some(Vec::new())
    })
}

/// Tells whether host ports of the network lead to a container of another plugin.
fn serves_others(maps: &Maps, network: u32) -> Result<bool, Error> {
    for (_, attachment) in maps.attachments()? {
        if attachment.network == network && attachment.role == role::CHAINED {
            let device = maps.device(attachment.ifindex)?;
            if device.is_some_and(|device| device.flags & device::FOREIGN != 0) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Forgets uplinks and devices of other plugins that do not exist any more, and those of the network with this
/// number, where one is named. A device of an attachment stays.
pub(crate) fn forget_devices(
    maps: &mut Maps,
    network: Option<u32>,
    node: &Netlink,
) -> Result<Vec<Change>, Error> {
    // Devices before attachments: what an ADD makes meanwhile is in one of the lists.
    let devices = maps.devices()?;
    let known: BTreeSet<u32> = maps
        .attachments()?
        .into_iter()
        .flat_map(|(_, attachment)| [attachment.ifindex, attachment.via])
        .collect();
    let links = node.indices()?;
    let gone: Vec<u32> = devices
        .into_iter()
        .filter(|(_, entry)| {
            network == Some(entry.network)
                || entry.flags & device::POD == 0
                || entry.flags & device::FOREIGN != 0
        })
        .map(|(index, _)| index)
        .filter(|index| !known.contains(index) && !links.contains(index))
        .collect();
    if gone.is_empty() {
        return Ok(Vec::new());
    }
    let _lock = Lock::acquire(maps.pins().root())?;
    for &index in &gone {
        maps.remove_device(index)?;
    }
    maps.raise_epoch()?;
    Ok(gone.into_iter().map(Change::Forgotten).collect())
}

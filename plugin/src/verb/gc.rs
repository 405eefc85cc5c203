//! GC: frees what belongs to attachments of this network that the runtime does not know any more,
//! and puts right what others did to the uplinks. Goes on past errors. Where the runtime does not say what it knows, it frees
//! what belongs to containers whose devices are gone.

use std::collections::BTreeSet;

use underpass_abi::endpoint::Owner;
use underpass_cni::NetworkRequest;
use underpass_dataplane::{Maps, Pins, object, policy::Rules};
use underpass_netlink::{Netlink, link::Link};

use crate::{
    conf::Conf,
    error::Error,
    identity::{Alias, Identity, host_name, is_unfinished, network_id},
    reap::reap,
    repair::{forget_devices, repair, uplinks},
    step::{detach, lease},
};

/// Removes the dead attachments of the network, and frees their addresses.
pub(super) fn gc(request: &NetworkRequest) -> Result<(), Error> {
    let valid = valid(request)?;
    let mut errors = remove_dead(request, valid.as_ref());
    if valid.is_some() {
        errors.extend(lease::collect(request).err());
    }
    Error::collect(errors)
}

/// Removes the dead attachments of the network, for a plugin that gives no addresses.
pub(super) fn gc_ports(request: &NetworkRequest) -> Result<(), Error> {
    let valid = valid(request)?;
    Error::collect(remove_dead(request, valid.as_ref()))
}

/// Removes the dead attachments, and returns what could not be done of that.
fn remove_dead(request: &NetworkRequest, valid: Option<&BTreeSet<Owner>>) -> Vec<Error> {
    let mut errors = Vec::new();
    if let Err(error) = collect(request, valid, &mut errors) {
        errors.push(error);
    }
    errors
}

/// Lists who must stay; `None`, where the runtime does not say it. Without the key nothing is touched.
fn valid(request: &NetworkRequest) -> Result<Option<BTreeSet<Owner>>, Error> {
    let Some(attachments) = request.conf.valid_attachments()? else {
        return Ok(None);
    };
    let owners = attachments.into_iter().flat_map(|id| {
        let identity = Identity {
            network: request.conf.name.clone(),
            container: id.container_id,
            ifname: id.ifname,
        };
        [identity.owner(), identity.chained_owner()]
    });
    Ok(Some(owners.collect()))
}

fn collect(
    request: &NetworkRequest,
    valid: Option<&BTreeSet<Owner>>,
    errors: &mut Vec<Error>,
) -> Result<(), Error> {
    let network = network_id(&request.conf.name);
    let node = Netlink::open()?;
    let links = node.links()?;
    // Without them the devices go all the same.
    let opened = Conf::bpf_root(&request.conf)
        .map_err(Error::from)
        .and_then(|root| {
            let maps = Maps::open_existing(&Pins::at(&root))?;
            if maps.is_none() {
                object::sweep(&root)?;
            }
            Ok(maps)
        });
    let mut maps = opened.unwrap_or_else(|error| {
        errors.push(error);
        None
    });

    if let Some(valid) = valid {
        for owner in known(maps.as_ref(), &links, network, errors).difference(valid) {
            if let Err(error) = detach(&node, maps.as_mut(), *owner) {
                errors.push(error);
            }
        }
        errors.extend(delete_unfinished(&node, &links, network, valid));
    }
    if let Some(maps) = &mut maps {
        match reap(&node, maps, &node.indices()?, &[&request.conf]) {
            Ok(reaped) => errors.extend(reaped.errors),
            Err(error) => errors.push(error),
        }
        if let Err(error) = forget_devices(maps, Some(network), &node) {
            errors.push(error);
        }
        let decoded = Conf::of_network(&request.conf)?;
        let patterns = uplinks(&request.conf, &decoded, maps)?;
        repair(
            &node,
            maps,
            &[patterns.as_deref()],
            || Ok(Rules::wanted()),
            &mut Vec::new(),
        )?;
    }
    Ok(())
}

/// Lists the attachments of the network, by its devices and by what the maps know, as far as these can be read.
fn known(
    maps: Option<&Maps>,
    links: &[Link],
    network: u32,
    errors: &mut Vec<Error>,
) -> BTreeSet<Owner> {
    let mut known: BTreeSet<Owner> = links
        .iter()
        .filter_map(Alias::of)
        .filter(|alias| alias.network == network)
        .map(|alias| alias.owner)
        .collect();
    match maps.map(Maps::attachments) {
        Some(Ok(attachments)) => {
            let of_network = attachments
                .into_iter()
                .filter(|(_, attachment)| attachment.network == network);
            known.extend(of_network.map(|(owner, _)| owner));
        }
        Some(Err(error)) => errors.push(error.into()),
        None => {}
    }
    known
}

/// Deletes pairs that killed ADDs have left before they could say whose these are. Returns what could not be deleted.
fn delete_unfinished(
    node: &Netlink,
    links: &[Link],
    network: u32,
    valid: &BTreeSet<Owner>,
) -> Vec<Error> {
    let valid: BTreeSet<String> = valid.iter().map(|owner| host_name(*owner)).collect();
    links
        .iter()
        .filter(|link| is_unfinished(link, network) && !valid.contains(&link.name))
        .filter_map(|link| Some(node.delete_link(link.index).err()?.into()))
        .collect()
}

//! DEL: whatever the kernel and the IPAM still have of the attachment, with or without netns,
//! `prevResult` and today's config.

use tracing::warn;
use underpass_abi::endpoint::{Attachment as Record, Owner};
use underpass_cni::Request;
use underpass_dataplane::Maps;
use underpass_netlink::Netlink;

use super::{chained::has_no_ports, identity, is_later, maps_to_clean};
use crate::{
    error::Error,
    step::{detach, detach_chained, lease},
    stopwatch::Stopwatch,
};

/// Detaches the container. An attachment that is not there is detached.
pub(super) fn del(request: &Request) -> Result<(), Error> {
    let mut time = Stopwatch::start();
    let identity = identity(request);
    let owner = identity.owner();
    let mut errors = Vec::new();
    let owners = [owner, identity.chained_owner()];
    let mut maps = match maps_to_clean(&request.conf, &owners) {
        Ok(maps) => maps,
        Err(error) if owes_nothing(request) => {
            warn!("this entry of the list has made nothing, so its DEL succeeds: {error}");
            return Ok(());
        }
        Err(error) => {
            errors.push(error);
            None
        }
    };
    let before = known(maps.as_ref(), owner);
    if let Err(error) = Netlink::open().map_err(Error::from).and_then(|node| {
        // Nobody says whether the interface was ours, or only host ports in a chain.
        if let Some(maps) = &mut maps
            && let Err(error) = detach_chained(&node, maps, identity.chained_owner())
        {
            errors.push(error);
        }
        // Its own entry's DEL comes, and before it those of plugins that may need the interface.
        if leaves_interface(request, maps.as_ref())? {
            return Ok(());
        }
        detach(&node, maps.as_mut(), owner)
    }) {
        errors.push(error);
    }
    time.lap("link and maps");
    // Last, as after a detachment nothing leads to the addresses. After one that failed something may, and they are given back all the
    // same: an ADD that gets one of them is refused while it leads to this container (`endpoint::require_free`). But an
    // ADD may have found the container dead meanwhile, freed its addresses, and attached it anew: the lease is that one's.
    let is_attached_anew = || {
        let after = known(maps.as_ref(), owner);
        after.is_some() && after != before
    };
    if let Err(error) = lease::give_back(request, || !is_attached_anew()) {
        errors.push(error);
    }
    time.lap("lease");
    Error::collect(errors)
}

/// Tells whether the interface is for another entry of the list to take away: a runtime that hands over what all entries together have made has
/// that one's config as well.
fn leaves_interface(request: &Request, maps: Option<&Maps>) -> Result<bool, Error> {
    match maps {
        // What can't be read says nothing, and a DEL does what it can.
        Some(maps) => {
            let previous = request.conf.prev_result().ok().flatten();
            Ok(previous.is_some() && is_later(request, maps)?)
        }
        None => Ok(is_for_host_ports(request)),
    }
}

/// Tells without the maps whether the config is that of an entry for host ports, which had none to serve.
/// What fails here keeps the DELs of the plugins before it from being called.
fn owes_nothing(request: &Request) -> bool {
    is_for_host_ports(request) && has_no_ports(request)
}

/// Tells without the maps whether the config is that of an entry for host ports: it gives no addresses, and the interface has some.
fn is_for_host_ports(request: &Request) -> bool {
    let conf = &request.conf;
    let previous = conf.prev_result().ok().flatten();
    previous.is_some_and(|previous| !previous.ips.is_empty())
        && matches!(conf.ipam_type(), Ok(None))
}

/// What the maps know of the attachment, as far as they can be read.
fn known(maps: Option<&Maps>, owner: Owner) -> Option<Record> {
    maps?.attachment(owner).ok()?
}

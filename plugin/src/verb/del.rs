//! DEL: whatever the kernel and the IPAM still have of the attachment, with or without netns,
//! `prevResult` and today's config.

use underpass_cni::Request;
use underpass_netlink::Netlink;

use super::{identity, maps_to_clean};
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
    let mut maps = maps_to_clean(&request.conf, &owners).unwrap_or_else(|error| {
        errors.push(error);
        None
    });
    if let Err(error) = Netlink::open().map_err(Error::from).and_then(|node| {
        // Nobody says whether the interface was ours, or only host ports in a chain.
        if let Some(maps) = &mut maps {
            detach_chained(&node, maps, identity.chained_owner())?;
        }
        detach(&node, maps.as_mut(), owner)
    }) {
        errors.push(error);
    }
    time.lap("link and maps");
    // Last, so that nobody is given an address that still leads to this container.
    if let Err(error) = lease::give_back(request) {
        errors.push(error);
    }
    time.lap("lease");
    Error::collect(errors)
}

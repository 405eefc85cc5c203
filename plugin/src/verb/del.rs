//! DEL: whatever the kernel and the IPAM still have of the attachment, with or without netns,
//! `prevResult` and today's config.

use underpass_abi::endpoint::{Owner, role};
use underpass_cni::Request;
use underpass_dataplane::{Maps, Pins};
use underpass_netlink::Netlink;

use super::identity;
use crate::{
    conf::Conf,
    error::Error,
    step::{endpoint, foreign, lease, link, port},
    stopwatch::Stopwatch,
};

/// Detaches the container. An attachment that is not there is detached.
pub(crate) fn del(request: &Request) -> Result<(), Error> {
    let mut time = Stopwatch::start();
    let identity = identity(request);
    let owner = identity.owner();
    let mut errors = Vec::new();
    let opened = Conf::bpf_root(&request.conf)
        .map_err(Error::from)
        .and_then(|root| open(&Pins::at(&root)));
    let mut maps = opened.unwrap_or_else(|error| {
        errors.push(error);
        None
    });
    if let Err(error) = Netlink::open().map_err(Error::from).and_then(|node| {
        // Nobody says whether the interface was ours, or only host ports in a chain.
        if let Some(maps) = &mut maps {
            take_ports(&node, maps, identity.chained_owner())?;
        }
        detach(&node, maps.as_mut(), owner)
    }) {
        errors.push(error);
    }
    time.lap("link and maps");
    // Last, so that nobody is given an address that still leads to this container.
    if let Err(error) = lease::revert(request) {
        errors.push(error);
    }
    time.lap("lease");
    Error::collect(errors)
}

/// The maps, unless nothing was ever loaded.
pub(super) fn open(pins: &Pins) -> Result<Option<Maps>, Error> {
    if !pins.are_complete() {
        return Ok(None);
    }
    Ok(Some(Maps::open(pins)?))
}

/// Takes its host ports from a container that another plugin attached. None is fine.
pub(super) fn take_ports(node: &Netlink, maps: &mut Maps, owner: Owner) -> Result<(), Error> {
    match maps.attachment(owner)? {
        Some(attachment) => foreign::revert(node, maps, owner, &attachment),
        None => Ok(()),
    }
}

/// Removes map entries and devices of an attachment. First the container is silenced, and its host ports
/// go to others; then the pair goes, which on a busy node takes a while and loses what is still on its
/// way; and only then what the programs know of the container.
pub(super) fn detach(node: &Netlink, maps: Option<&mut Maps>, owner: Owner) -> Result<(), Error> {
    let Some(maps) = maps else {
        return link::revert(node, owner, None);
    };
    let Some(attachment) = maps.attachment(owner)? else {
        return link::revert(node, owner, None);
    };
    if attachment.role == role::CHAINED {
        return foreign::revert(node, maps, owner, &attachment);
    }
    link::close(node, owner, attachment.ifindex)?;
    port::revert(maps, owner, &attachment)?;
    link::revert(node, owner, Some(attachment.ifindex))?;
    endpoint::revert(maps, owner, &attachment)
}

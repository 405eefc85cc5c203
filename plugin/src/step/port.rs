//! Host ports: the entries that lead from ports of the host to the container.

use std::net::IpAddr;

use underpass_abi::{
    endpoint::{Attachment, LOOPBACK, Owner, device},
    port::PortTarget,
};
use underpass_dataplane::{
    Changed, Maps, Pins, attach,
    lock::Lock,
    port::{HostPorts, Text, destination, set_service_addresses},
};
use underpass_netlink::{Netlink, link::Link};

use self::precedence::{Pinned, claim, release};
use super::{Undo, program};
use crate::{conf::port::Binding, error::Error, uplink::reconcile};

mod precedence;

/// The host ports of one attachment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claims<'a> {
    pub(crate) owner: Owner,
    /// Host veth of the container.
    pub(crate) ifindex: u32,
    pub(crate) bindings: &'a [Binding],
}

/// Maps the ports to the container, of which the maps know the attachment already. Whoever served
/// one of them does so no longer. No port of a Service's address is one of the host.
pub(crate) fn apply(
    node: &Netlink,
    maps: &mut Maps,
    claims: Claims<'_>,
    services: &[IpAddr],
    undo: &mut Undo<'_>,
) -> Result<(), Error> {
    let Claims {
        owner,
        ifindex,
        bindings,
    } = claims;
    if bindings.is_empty() {
        return refresh(node, maps, services);
    }
    let pins = maps.pins().clone();
    let lock = Lock::acquire(pins.root())?;
    set_service_addresses(&pins, services)?;
    reconcile::loopback(&lock, node, maps)?;
    let mut table = Pinned {
        ports: HostPorts::open(&pins)?,
        maps,
    };
    undo.push("port", move || undo_apply(&pins, owner));
    // Raised below, while the lock is held: no two ADDs see the same.
    let serial = u64::from(maps.state()?.epoch);
    for binding in bindings {
        let target = PortTarget {
            addr: binding.addr.into(),
            owner,
            serial,
            ifindex,
            port: binding.container_port.to_be(),
            reserved: 0,
        };
        claim(&mut table, binding.port, target)?;
    }
    Ok(maps.raise_epoch()?)
}

/// Brings up to date what host ports need beyond their entries, if any was ever mapped: the addresses of
/// Services, which must not be taken for the node's own, and the program on the loopback device.
pub(crate) fn refresh(node: &Netlink, maps: &mut Maps, services: &[IpAddr]) -> Result<(), Error> {
    if HostPorts::open(maps.pins())?.is_empty()? && maps.device(LOOPBACK)?.is_none() {
        return Ok(());
    }
    let lock = Lock::acquire(maps.pins().root())?;
    let changed = [
        reconcile::loopback(&lock, node, maps)?,
        set_service_addresses(maps.pins(), services)?,
    ];
    if changed.contains(&Changed::Yes) {
        maps.raise_epoch()?;
    }
    Ok(())
}

/// The ports that the container must serve, against those that it does, and the program that serves
/// them to processes of the host.
pub(crate) fn verify(
    node: &Netlink,
    maps: &Maps,
    owner: Owner,
    here: &Link,
    bindings: &[Binding],
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    if bindings.is_empty() {
        return Ok(());
    }
    let places = attach::places(device::LOOPBACK);
    program::detached(node, maps, LOOPBACK, "lo", places, wrong)?;
    let ports = HostPorts::open(maps.pins())?;
    for binding in bindings {
        let port = Text(&binding.port);
        let Some(target) = ports.server(&binding.port)? else {
            wrong.push(format!("host port {port} is not mapped to anybody"));
            continue;
        };
        let (leads_to, wanted) = (destination(&target), binding.destination());
        if target.owner != owner {
            wrong.push(format!(
                "host port {port} is served by another container, at {leads_to}: the newest mapping of a port counts"
            ));
        } else if leads_to != wanted || target.ifindex != here.index {
            wrong.push(format!(
                "host port {port} leads to {leads_to} by device number {}, not to {wanted} by {}",
                target.ifindex, here.name
            ));
        }
    }
    Ok(())
}

/// Takes its ports from an attachment that the maps still know. Older mappings of the same ports
/// serve again.
pub(crate) fn revert(maps: &Maps, owner: Owner, attachment: &Attachment) -> Result<(), Error> {
    if attachment.port_count == 0 {
        return Ok(());
    }
    let _lock = Lock::acquire(maps.pins().root())?;
    let mut table = Pinned {
        ports: HostPorts::open(maps.pins())?,
        maps,
    };
    release(&mut table, owner)?;
    Ok(maps.raise_epoch()?)
}

fn undo_apply(pins: &Pins, owner: Owner) -> Result<(), Error> {
    let maps = Maps::open(pins)?;
    match maps.attachment(owner)? {
        Some(attachment) => revert(&maps, owner, &attachment),
        None => Ok(()),
    }
}

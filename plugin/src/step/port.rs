//! Host ports: the entries that lead from ports of the host to the container.

use std::{collections::BTreeSet, net::IpAddr};

use tracing::warn;
use underpass_abi::{
    addr::Addr,
    endpoint::{Attachment as Record, LOOPBACK, Owner, device},
    port::PortTarget,
};
use underpass_dataplane::{
    Changed, Maps, Pins, attach,
    lock::Lock,
    port::{
        HostPorts as Ports, Text, destination, is_closed, service_addresses, set_service_addresses,
    },
};
use underpass_netlink::Netlink;

use self::precedence::{Pinned, Table as _, claim, owners, release};
use super::{Attachment, Detachment, Inspection, Mode, Revert, Step, Undo, detachment::lock_known};
use crate::{
    change::Change,
    conf::port::Binding,
    error::Error,
    finding::{Finding, Findings},
    uplink::{Uplinks, reconcile},
};

mod precedence;

const NAME: &str = "host ports";

/// Maps the host ports to the container, of which the maps know the attachment already. Whoever served
/// one of them does so no longer. No port of a Service's address is one of the host.
pub(crate) struct HostPorts;

impl<M: Mode> Step<M> for HostPorts {
    fn name(&self) -> &'static str {
        NAME
    }

    fn apply(&self, attachment: &mut Attachment<'_, M>) -> Result<(), Error> {
        let Attachment {
            undo,
            node,
            maps,
            owner,
            host,
            ports,
            uplinks,
            ..
        } = attachment;
        let claims = Claims {
            owner: *owner,
            host: host.index,
            ports,
        };
        let closed = ports
            .iter()
            .filter(|binding| is_closed(&binding.port, None, &uplinks.tunnels));
        for binding in closed {
            warn!(
                "host port {} is not served, because a tunnel of this node has it: map another port, or give the tunnel one",
                Text(&binding.port)
            );
        }
        serve(node, maps, claims, &uplinks.service_addresses, undo)
    }

    /// Compares the ports that the container must serve with those that it does, and looks at the program that
    /// serves them to processes of the host.
    fn verify(&self, inspection: &Inspection<'_, M>, findings: &mut Findings) -> Result<(), Error> {
        let Some(loaded) = &inspection.loaded else {
            return Ok(());
        };
        let host = &inspection.host;
        let claims = Claims {
            owner: inspection.owner,
            host: host.index,
            ports: &inspection.ports,
        };
        compare(inspection.node, &loaded.maps, claims, &host.name, findings)
    }
}

/// The host ports of one attachment.
#[derive(Clone, Copy)]
struct Claims<'a> {
    owner: Owner,
    /// The number of the host's end.
    host: u32,
    ports: &'a [Binding],
}

fn serve<'a>(
    node: &'a Netlink,
    maps: &mut Maps,
    claims: Claims<'_>,
    services: &[IpAddr],
    undo: &mut Undo<'a>,
) -> Result<(), Error> {
    let Claims { owner, host, ports } = claims;
    if ports.is_empty() {
        return refresh(node, maps, services).map(drop);
    }
    let pins = maps.pins().clone();
    let lock = Lock::acquire(pins.root())?;
    // What nobody knows of nobody gives up: neither its own undoing nor a GC.
    let record = maps.attachment(owner)?;
    let record = record.filter(|record| record.ifindex == host);
    let record = record.ok_or(Error::AttachmentLost)?;
    bring_services(node, maps, services)?;
    reconcile::loopback(&lock, node, maps)?;
    let mut table = Pinned {
        ports: Ports::open(&pins)?,
        maps,
        node,
    };
    undo.push(NAME, move || undo_apply(node, &pins, owner, &record));
    // Raised below, while the lock is held: no two ADDs see the same.
    let serial = u64::from(maps.state()?.epoch);
    for binding in ports {
        let target = PortTarget {
            addr: binding.addr.into(),
            owner,
            serial,
            ifindex: host,
            port: binding.container_port.to_be(),
            reserved: 0,
        };
        claim(&mut table, binding.port, target)?;
    }
    Ok(maps.raise_epoch()?)
}

fn compare(
    node: &Netlink,
    maps: &Maps,
    claims: Claims<'_>,
    host: &str,
    findings: &mut Findings,
) -> Result<(), Error> {
    if claims.ports.is_empty() {
        return Ok(());
    }
    let places = attach::places(device::LOOPBACK);
    let missing = attach::missing(node, maps.pins(), &[(LOOPBACK, places)])?;
    findings.extend(Finding::not_attached(missing, "lo"));
    let table = Pinned {
        ports: Ports::open(maps.pins())?,
        maps,
        node,
    };
    for binding in claims.ports {
        let port = binding.port;
        let Some(target) = table.ports.server(&port)? else {
            findings.push(Finding::NotMapped(port));
            continue;
        };
        let (leads_to, wanted) = (destination(&target), binding.destination());
        // Another entry of the same list may serve it as well.
        let is_right = leads_to == wanted && target.ifindex == claims.host;
        if is_right {
            continue;
        }
        if target.owner == claims.owner {
            findings.push(Finding::OtherDestination {
                port,
                leads_to,
                index: target.ifindex,
                wanted,
                host: host.to_owned(),
            });
            continue;
        }
        let other = Finding::OtherServer { port, leads_to };
        // Made anew, as some runtimes do with a container that fails, it would be the newest, and the other one would fail then.
        if table.ports.is_waiting(port, claims.owner)? && table.is_alive(target.owner)? {
            warn!("{other}");
        } else {
            findings.push(other);
        }
    }
    Ok(())
}

impl Revert for HostPorts {
    fn revert(&self, detachment: &mut Detachment<'_>) -> Result<(), Error> {
        let (node, owner) = (detachment.node, detachment.owner);
        let known = detachment.known.as_ref();
        if known.is_none_or(|known| known.record.port_count == 0) {
            return Ok(());
        }
        match detachment.lock()? {
            Some((lock, maps, record)) => give_up(&lock, node, maps, owner, record),
            None => Ok(()),
        }
    }
}

/// Takes its ports from an attachment that the maps still know. Older mappings of the same ports
/// serve again.
pub(super) fn give_up(
    _lock: &Lock,
    node: &Netlink,
    maps: &Maps,
    owner: Owner,
    record: &Record,
) -> Result<(), Error> {
    if record.port_count == 0 {
        return Ok(());
    }
    let mut table = Pinned {
        ports: Ports::open(maps.pins())?,
        maps,
        node,
    };
    release(&mut table, &BTreeSet::from([owner]))?;
    Ok(maps.raise_epoch()?)
}

/// Takes their ports from attachments whose devices are gone, as far as the maps still know them by these records. Returns who
/// had any.
pub(crate) fn give_up_all(
    node: &Netlink,
    maps: &Maps,
    dead: &[(Owner, Record)],
) -> Result<BTreeSet<Owner>, Error> {
    let mut losers = BTreeSet::new();
    if dead.iter().all(|(_, record)| record.port_count == 0) {
        return Ok(losers);
    }
    let mut table = Pinned {
        ports: Ports::open(maps.pins())?,
        maps,
        node,
    };
    // Those of whom nothing but the attachment is left have been here before.
    let all = owners(&table)?;
    if dead.iter().all(|(owner, _)| !all.contains(owner)) {
        return Ok(losers);
    }
    let _lock = Lock::acquire(maps.pins().root())?;
    for (owner, record) in dead {
        // Who was attached anew meanwhile has ports of his own.
        if all.contains(owner) && maps.attachment(*owner)?.as_ref() == Some(record) {
            losers.insert(*owner);
        }
    }
    if losers.is_empty() {
        return Ok(losers);
    }
    // Whoever is killed in between leaves nothing that another call would raise it for.
    maps.raise_epoch()?;
    release(&mut table, &losers)?;
    maps.raise_epoch()?;
    Ok(losers)
}

fn undo_apply(node: &Netlink, pins: &Pins, owner: Owner, record: &Record) -> Result<(), Error> {
    let maps = Maps::open(pins)?;
    match lock_known(&maps, owner, record)? {
        Some(lock) => give_up(&lock, node, &maps, owner, record),
        None => Ok(()),
    }
}

/// Brings up to date what host ports need beyond their entries, if any was ever mapped: the addresses of
/// Services, which must not be taken for the node's own, and the program on the loopback device.
pub(crate) fn refresh(
    node: &Netlink,
    maps: &mut Maps,
    services: &[IpAddr],
) -> Result<Vec<Change>, Error> {
    // Known before the first port is mapped, and for good.
    if maps.device(LOOPBACK)?.is_none() {
        return Ok(Vec::new());
    }
    let lock = Lock::acquire(maps.pins().root())?;
    let mut changes = reconcile::loopback(&lock, node, maps)?;
    if bring_services(node, maps, services)? == Changed::Yes {
        changes.push(Change::ServiceAddresses);
    }
    if !changes.is_empty() {
        maps.raise_epoch()?;
    }
    Ok(changes)
}

/// Makes these the addresses of Services, if they still are. The caller holds the lock.
fn bring_services(node: &Netlink, maps: &Maps, seen: &[IpAddr]) -> Result<Changed, Error> {
    let wanted = seen.iter().copied().map(Addr::from).collect();
    if service_addresses(maps.pins())? == wanted {
        return Ok(Changed::No);
    }
    // What this call saw may be older than what another one has written since.
    let now = Uplinks::find(node, maps, None)?.service_addresses;
    Ok(set_service_addresses(maps.pins(), &now)?)
}

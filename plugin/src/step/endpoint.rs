//! Map entries: what the programs know of the container.

use std::net::IpAddr;

use underpass_abi::{
    addr::Addr,
    endpoint::{Attachment as Record, Device, Endpoint, MAX_ADDRESSES, Owner, device, role},
    quota,
};
use underpass_dataplane::{Maps, Pins, lock::Lock, object::half_open_limit};
use underpass_ipam::Claim;
use underpass_netlink::{Netlink, link::By};

use super::{
    Attachment, Detachment, Inspection, Interface, Revert, Step, detachment::lock_known, link,
    port, sibling,
};
use crate::{
    error::Error,
    finding::{Finding, Findings},
    plan::Plan,
};

const NAME: &str = "map entries";

/// Writes the entries. The programs see them before they are attached.
pub(crate) struct Entries;

impl Step<Interface> for Entries {
    fn name(&self) -> &'static str {
        NAME
    }

    fn apply(&self, attachment: &mut Attachment<'_, Interface>) -> Result<(), Error> {
        let Attachment {
            undo,
            node,
            maps,
            owner,
            host,
            uplinks,
            made: Interface {
                plan, claim, netns, ..
            },
            ..
        } = attachment;
        let (node, owner, index) = (*node, *owner, host.index);
        let record = record(plan, index);
        let pins = maps.pins().clone();
        let half_open = match plan.half_open_limit {
            Some(limit) => limit,
            None => half_open_limit(maps.node()?.flows),
        };
        let netns = netns.number()?;
        // To the end: should the container die meanwhile, whoever finds it dead finds all entries, or none.
        let _lock = Lock::acquire(pins.root())?;
        require_free(maps, node, &record)?;
        maps.add_attachment(owner, &record)?;
        undo.push(NAME, move || undo_apply(node, &pins, owner, &record));
        // A DEL that comes from here on finds the attachment.
        require_leased(claim.as_ref(), &record)?;
        maps.add_no_masquerade(record.network, &plan.no_masquerade)?;
        sibling::disown(maps, node, index, netns, &uplinks.namespaces)?;
        maps.set_device(
            index,
            Device {
                flags: plan.flags,
                network: record.network,
                mtu: plan.mtu,
                peer_mac: plan.container.mac.0,
                mac: plan.host.mac.0,
                masquerade4: masquerade_address(plan, IpAddr::is_ipv4),
                masquerade6: masquerade_address(plan, IpAddr::is_ipv6),
                flow_cost: quota::cost(half_open),
                netns,
                tunnel_port: plan.tunnel_port.map_or(0, |port| port.get().to_be()),
                own_mac: [0; 3],
            },
        )?;
        for ip in &plan.result.ips {
            let endpoint = Endpoint {
                ifindex: index,
                prefix_len: ip.address.prefix_len().into(),
                gateway: ip.gateway.map(Addr::from).unwrap_or_default(),
            };
            maps.set_endpoint(ip.address.addr().into(), endpoint)?;
        }
        Ok(())
    }

    /// Compares the entries with the devices and addresses that are there.
    fn verify(
        &self,
        inspection: &Inspection<'_, Interface>,
        findings: &mut Findings,
    ) -> Result<(), Error> {
        let Some(loaded) = &inspection.loaded else {
            return Ok(());
        };
        let (maps, host, ends) = (&loaded.maps, &inspection.host, &inspection.found);
        verify_owner(maps, inspection.owner, host.index, &host.name, findings)?;
        match maps.device(host.index)? {
            None => findings.push(Finding::UnknownDevice(host.name.clone())),
            Some(device) => {
                let fixed = device.flags & device::CHECK_MAC != 0;
                let container = &ends.container;
                if device.mac != host.mac.0 || fixed && device.peer_mac != container.mac.0 {
                    findings.push(Finding::OtherMacs {
                        host: host.name.clone(),
                        container: container.name.clone(),
                    });
                }
                // The container's own may have been set by a later plugin, which the result does not say.
                if device.mtu != host.mtu {
                    findings.push(Finding::OtherMtu {
                        host: host.name.clone(),
                        actual: host.mtu,
                        wanted: device.mtu,
                    });
                }
            }
        }
        for net in ends.addresses() {
            verify_address(maps, net.addr(), host.index, &host.name, findings)?;
        }
        Ok(())
    }
}

impl Revert for Entries {
    /// Removes what an attachment put into maps, and makes every flow validate itself again. The device is
    /// gone: a packet of a container that the programs do not know would leave as it is. The attachment
    /// itself goes last, so that a call that is killed can be repeated. The lock is held from the first to the last: two calls may be at it.
    fn revert(&self, detachment: &mut Detachment<'_>) -> Result<(), Error> {
        let (node, owner) = (detachment.node, detachment.owner);
        match detachment.lock()? {
            Some((lock, maps, record)) => {
                end_without(&lock, maps, record.network, |other, _| *other == owner)?;
                forget(&lock, node, maps, owner, record)
            }
            None => Ok(()),
        }
    }
}

/// Removes all entries of an attachment. Nobody would know of its host ports after that: an ADD that is not through may have taken them since they were given up.
pub(super) fn forget(
    lock: &Lock,
    node: &Netlink,
    maps: &mut Maps,
    owner: Owner,
    record: &Record,
) -> Result<(), Error> {
    port::give_up(lock, node, maps, owner, record)?;
    remove_entries(lock, maps, owner, record)
}

fn remove_entries(
    _lock: &Lock,
    maps: &mut Maps,
    owner: Owner,
    record: &Record,
) -> Result<(), Error> {
    for addr in addresses(record) {
        maps.remove_endpoint(addr, record.ifindex)?;
    }
    maps.remove_device(record.ifindex)?;
    maps.remove_attachment(owner)?;
    Ok(maps.raise_epoch()?)
}

/// Removes the entries of a network that has no attachment but those that leave: they concern no packet. These leave afterwards, since by them
/// alone a later call finds what one that was killed has left of the network.
pub(super) fn end_without(
    _lock: &Lock,
    maps: &Maps,
    network: u32,
    leaves: impl Fn(&Owner, &Record) -> bool,
) -> Result<(), Error> {
    let attachments = maps.attachments()?;
    if attachments
        .iter()
        .all(|(owner, record)| record.network != network || leaves(owner, record))
    {
        maps.clear_no_masquerade(network)?;
    }
    Ok(())
}

/// Refuses addresses that lead to a container which lives, whatever the leases say: they may be lost, or of an IPAM that gives an address twice. Also to
/// another interface of the same container: an address leads to one of the two only, and to neither when that one goes.
fn require_free(maps: &Maps, node: &Netlink, record: &Record) -> Result<(), Error> {
    for addr in addresses(record) {
        let Some(known) = maps.endpoint(addr)? else {
            continue;
        };
        // What is left of a container that is gone is nobody's.
        if let Some(device) = node.link(By::Index(known.ifindex))? {
            return Err(Error::AddressTaken {
                address: addr.into(),
                device: device.name,
            });
        }
    }
    Ok(())
}

/// Refuses addresses that are leased no more: a DEL came after the lease was taken, and found nothing else to take away.
fn require_leased(claim: Option<&Claim>, record: &Record) -> Result<(), Error> {
    let Some(claim) = claim else {
        return Ok(());
    };
    for address in addresses(record).map(IpAddr::from) {
        if !claim.holds(address)? {
            return Err(Error::LeaseLost(address));
        }
    }
    Ok(())
}

fn undo_apply(node: &Netlink, pins: &Pins, owner: Owner, record: &Record) -> Result<(), Error> {
    let mut maps = Maps::open(pins)?;
    // A DEL may have come meanwhile, and after it another ADD, whose pair has this one's name.
    if maps.attachment(owner)?.as_ref() != Some(record) {
        return Ok(());
    }
    link::delete(node, owner, Some(record.ifindex))?;
    match lock_known(&maps, owner, record)? {
        Some(lock) => {
            // Whatever ports this ADD has taken are given up by now.
            end_without(&lock, &maps, record.network, |other, _| *other == owner)?;
            remove_entries(&lock, &mut maps, owner, record)
        }
        None => Ok(()),
    }
}

fn masquerade_address(plan: &Plan, family: fn(&IpAddr) -> bool) -> Addr {
    let mut addresses = plan.masquerade_addresses.iter().copied();
    addresses.find(family).map(Addr::from).unwrap_or_default()
}

fn record(plan: &Plan, ifindex: u32) -> Record {
    let mut addresses = [Addr::default(); MAX_ADDRESSES];
    let mut address_count = 0;
    for (slot, net) in addresses.iter_mut().zip(&plan.addresses) {
        *slot = net.addr().into();
        address_count += 1;
    }
    Record {
        ifindex,
        role: role::INTERFACE,
        via: 0,
        network: plan.identity.network_id(),
        address_count,
        port_count: u32::try_from(plan.ports.len()).unwrap_or(u32::MAX),
        addresses,
    }
}

/// Says whether the maps know the attachment, by the host's end.
pub(super) fn verify_owner(
    maps: &Maps,
    owner: Owner,
    index: u32,
    host: &str,
    findings: &mut Findings,
) -> Result<(), Error> {
    match maps.attachment(owner)? {
        None => findings.push(Finding::UnknownOwner),
        Some(record) if record.ifindex != index => {
            findings.push(Finding::OtherOwner(host.to_owned()));
        }
        Some(_) => {}
    }
    Ok(())
}

/// Says whether the programs send an address to the host's end.
pub(super) fn verify_address(
    maps: &Maps,
    address: IpAddr,
    index: u32,
    host: &str,
    findings: &mut Findings,
) -> Result<(), Error> {
    let known = maps.endpoint(address.into())?;
    if known.is_none_or(|known| known.ifindex != index) {
        findings.push(Finding::OtherEndpoint {
            address,
            host: host.to_owned(),
        });
    }
    Ok(())
}

/// Lists the addresses of an attachment.
pub(crate) fn addresses(record: &Record) -> impl Iterator<Item = Addr> {
    let count = usize::try_from(record.address_count).unwrap_or(MAX_ADDRESSES);
    record.addresses.into_iter().take(count)
}

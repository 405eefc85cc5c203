//! A container that another plugin of the chain attached: its end on the host, the device by which it is
//! reached, and what the programs must know of both to serve its host ports.

use std::net::IpAddr;

use underpass_abi::{
    addr::Addr,
    endpoint::{
        Attachment as Record, Device as Entry, Endpoint, MAX_ADDRESSES, Owner, device, role,
    },
};
use underpass_cni::Error as CniError;
use underpass_dataplane::{Maps, attach, layout, lock::Lock};
use underpass_netlink::{
    Netlink,
    addr::Address,
    link::{By, Device, Link},
};

use super::{
    Attachment, Detachment, Inspection, Mode, Revert, Step,
    detachment::forget,
    endpoint::{addresses, verify_address, verify_owner},
    port, program,
};
use crate::{
    error::Error,
    finding::{Finding, Findings},
    glob::Glob,
    uplink::{
        Uplink,
        reconcile::{at_bridge, at_uplink},
    },
};

const NAME: &str = "chained map entries";

/// An interface that another plugin has made: where its ends are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Chained {
    host: Link,
    container: Link,
    /// The device by which the host reaches the container: the host's end, or a bridge.
    via: Link,
    network: u32,
}

impl Mode for Chained {
    type Made = Self;
    type Found<'a> = Self;
}

/// Who has told the programs of the host's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ToldBy {
    /// An ADD of ours that made the interface: the programs know everything.
    Interface,
    /// Nobody, or a call of ours in a chain.
    Chain,
}

impl Chained {
    /// Finds the ends: the container has the interface, and the address.
    pub(crate) fn find(
        node: &Netlink,
        pod: &Netlink,
        ifname: &str,
        addr: IpAddr,
        network: u32,
    ) -> Result<Self, Error> {
        let container = pod.link(By::Name(ifname))?.ok_or_else(|| {
            CniError::config(format!(
                "prevResult names the interface {ifname}, which the container does not have"
            ))
            .with_details(
                "put this plugin behind the one that makes the interface, and see that CNI_NETNS is that container's",
            )
        })?;
        let peer = container.peer.filter(|_| container.is_veth());
        let host = match peer {
            Some(peer) => node.link(By::Index(peer))?,
            None => None,
        };
        let host = host
            .filter(|host| host.is_veth() && host.peer == Some(container.index))
            .ok_or_else(|| {
                CniError::unsupported("runtimeConfig.portMappings", "(not empty)").with_details(
                    format!(
                        "interface {ifname} of the container is no veth with its other end on the host (macvlan, ipvlan and \
                         host-device are not): the host can't send to it"
                    ),
                )
            })?;
        let via = match node.device_towards(addr)? {
            Some(towards) if towards == host.index => Some(host.clone()),
            // A route that leads nowhere (`blackhole`) has no device.
            None | Some(0) => None,
            Some(towards) => node.link(By::Index(towards))?,
        };
        let via = via.ok_or_else(|| {
            CniError::config(format!(
                "host ports can't lead to the container: the host has no route to {addr}; a bridge needs \"isGateway\": true"
            ))
        })?;
        Ok(Self {
            host,
            container,
            via,
            network,
        })
    }

    /// Describes the host's end.
    pub(crate) fn host(&self) -> &Link {
        &self.host
    }

    /// Chooses the uplinks that host ports need: those that the config of the chained plugin names, else all. Those of an
    /// interface of ours its own config has chosen, and nothing is added to them unasked.
    pub(crate) fn uplinks<'a>(
        &self,
        maps: &Maps,
        patterns: Option<&'a [Glob]>,
    ) -> Result<Option<&'a [Glob]>, Error> {
        Ok(match self.told_by(maps)? {
            ToldBy::Interface => patterns.or(Some(&[])),
            ToldBy::Chain => patterns,
        })
    }

    fn told_by(&self, maps: &Maps) -> Result<ToldBy, Error> {
        let entry = maps.device(self.host.index)?;
        Ok(match entry {
            Some(entry) if entry.flags & device::FOREIGN == 0 => ToldBy::Interface,
            _ => ToldBy::Chain,
        })
    }

    /// What the container takes for the client where the host itself is: an address of the device by which the host reaches it.
    fn gateway(local: &[Address], addr: IpAddr) -> Option<IpAddr> {
        let mut own = local.iter().filter(|own| own.global);
        own.find(|own| own.net.addr().is_ipv4() == addr.is_ipv4())
            .map(|own| own.net.addr())
    }

    /// The device by which the container is reached, where that is another one, and no uplink whose
    /// programs do it all, be it another network's.
    fn bridge(&self, maps: &Maps, uplinks: &[Uplink]) -> Result<Option<&Link>, Error> {
        let known = maps.device(self.via.index)?;
        let is_uplink = known.is_some_and(|known| known.flags & device::POD == 0)
            || uplinks.iter().any(|uplink| uplink.index == self.via.index);
        Ok((self.via.index != self.host.index && !is_uplink).then_some(&self.via))
    }
}

/// Makes the programs know the container, and attaches them where its packets pass.
pub(crate) struct Entries;

impl Step<Chained> for Entries {
    fn name(&self) -> &'static str {
        NAME
    }

    fn apply(&self, attachment: &mut Attachment<'_, Chained>) -> Result<(), Error> {
        let Attachment {
            undo,
            node,
            maps,
            owner,
            ports,
            uplinks,
            made: chained,
            ..
        } = attachment;
        let (node, owner) = (*node, *owner);
        let pins = maps.pins().clone();
        let _lock = Lock::acquire(pins.root())?;
        let told_by = chained.told_by(maps)?;
        let mut record = Record {
            ifindex: chained.host.index,
            role: role::CHAINED,
            via: 0,
            network: chained.network,
            address_count: 0,
            port_count: u32::try_from(ports.len()).unwrap_or(u32::MAX),
            addresses: [Addr::default(); MAX_ADDRESSES],
        };
        let bridge = chained
            .bridge(maps, &uplinks.list)?
            .filter(|_| told_by == ToldBy::Chain);
        let mut endpoints: Vec<IpAddr> = ports.iter().map(|port| port.addr).collect();
        endpoints.sort_unstable();
        endpoints.dedup();
        if told_by == ToldBy::Chain {
            require_no_interface(maps, node, &endpoints)?;
            record.via = bridge.map_or(0, |bridge| bridge.index);
            for (slot, addr) in record.addresses.iter_mut().zip(&endpoints) {
                *slot = (*addr).into();
                record.address_count += 1;
            }
        }
        if told_by == ToldBy::Chain {
            for link in [Some(&chained.host), bridge].into_iter().flatten() {
                let places = [(link.index, attach::places(device::POD | device::FOREIGN))];
                let missing = attach::missing(node, &pins, &places)?;
                layout::require_free(node, &pins, &Device::from(link), &missing)?;
            }
        }
        maps.add_attachment(owner, &record)?;
        let root = pins.clone();
        // A DEL may have come meanwhile, and after it another ADD.
        undo.push(NAME, move || {
            forget(node, &mut Maps::open(&root)?, owner, &record)
        });
        if told_by == ToldBy::Interface {
            return Ok(());
        }
        let entry = |link: &Link, network| Entry {
            flags: device::POD | device::FOREIGN,
            network,
            mtu: link.mtu,
            mac: chained.via.mac.0,
            ..Entry::default()
        };
        let mut host = Entry {
            peer_mac: chained.container.mac.0,
            ..entry(&chained.host, chained.network)
        };
        if bridge.is_none() && chained.via.index != chained.host.index {
            host = at_uplink(host, &chained.host);
        } else if bridge.is_some_and(|bridge| chained.host.controller == Some(bridge.index)) {
            host = at_bridge(host, &chained.host);
        }
        maps.set_device(chained.host.index, host)?;
        let local = node.addresses_on(chained.via.index)?;
        for addr in endpoints {
            let endpoint = Endpoint {
                ifindex: chained.host.index,
                prefix_len: if addr.is_ipv4() { 32 } else { 128 },
                gateway: Chained::gateway(&local, addr)
                    .map(Addr::from)
                    .unwrap_or_default(),
            };
            maps.set_endpoint(addr.into(), endpoint)?;
        }
        let places = attach::places(host.flags);
        attach::attach(node, &pins, &Device::from(&chained.host), places)?;
        if let Some(bridge) = bridge {
            maps.set_device(bridge.index, entry(bridge, 0))?;
            attach::attach(node, &pins, &Device::from(bridge), places)?;
        }
        Ok(())
    }

    /// Looks at what the programs know of the container, and at where they are.
    fn verify(
        &self,
        inspection: &Inspection<'_, Chained>,
        findings: &mut Findings,
    ) -> Result<(), Error> {
        let Some(loaded) = &inspection.loaded else {
            return Ok(());
        };
        let (node, maps, chained) = (inspection.node, &loaded.maps, &inspection.found);
        let host = &chained.host;
        verify_owner(maps, inspection.owner, host.index, &host.name, findings)?;
        for binding in &inspection.ports {
            verify_address(maps, binding.addr, host.index, &host.name, findings)?;
        }
        program::verify_pod_side(node, maps, host, findings)?;
        if chained.told_by(maps)? == ToldBy::Interface {
            return Ok(());
        }
        let bridge = chained.bridge(maps, &loaded.uplinks.list)?;
        for link in [Some(host), bridge].into_iter().flatten() {
            if maps.device(link.index)?.map(|entry| entry.mac) != Some(chained.via.mac.0) {
                findings.push(Finding::UnknownGateway {
                    device: link.name.clone(),
                    mac: chained.via.mac,
                });
            }
        }
        match bridge {
            Some(bridge) => program::verify_pod_side(node, maps, bridge, findings),
            None => Ok(()),
        }
    }
}

/// Refuses addresses that lead to a container which we have attached ourselves, and which lives. Containers of other plugins
/// are theirs: who of two with one address is reached, they decide.
fn require_no_interface(maps: &Maps, node: &Netlink, addresses: &[IpAddr]) -> Result<(), Error> {
    for address in addresses {
        let Some(known) = maps.endpoint((*address).into())? else {
            continue;
        };
        let entry = maps.device(known.ifindex)?;
        if entry.is_none_or(|entry| entry.flags & device::FOREIGN != 0) {
            continue;
        }
        if let Some(device) = node.link(By::Index(known.ifindex))? {
            return Err(Error::AddressTaken {
                address: *address,
                device: device.name,
            });
        }
    }
    Ok(())
}

impl Revert for Entries {
    /// Takes from the programs what they know of the container. The interface is somebody else's, and may be
    /// gone.
    fn revert(&self, detachment: &mut Detachment<'_>) -> Result<(), Error> {
        let (node, owner) = (detachment.node, detachment.owner);
        match detachment.lock()? {
            Some((lock, maps, record)) => remove(&lock, node, maps, owner, record),
            None => Ok(()),
        }
    }
}

/// Removes all entries of an attachment, and takes the programs off devices that they were told of here. Nobody would know of its host ports after that: an ADD
/// that is not through may have taken them since they were given up.
pub(super) fn remove(
    lock: &Lock,
    node: &Netlink,
    maps: &mut Maps,
    owner: Owner,
    record: &Record,
) -> Result<(), Error> {
    port::give_up(lock, node, maps, owner, record)?;
    for addr in addresses(record) {
        maps.remove_endpoint(addr, record.ifindex)?;
    }
    withdraw(node, maps, record.ifindex)?;
    let is_shared = maps
        .attachments()?
        .iter()
        .any(|(other, shared)| *other != owner && shared.via == record.via);
    if !is_shared {
        withdraw(node, maps, record.via)?;
    }
    maps.remove_attachment(owner)?;
    Ok(maps.raise_epoch()?)
}

/// Takes the programs off a device that they were told of here.
fn withdraw(node: &Netlink, maps: &mut Maps, index: u32) -> Result<(), Error> {
    let entry = maps.device(index)?;
    if let Some(entry) = entry.filter(|entry| entry.flags & device::FOREIGN != 0) {
        let device = Device {
            index,
            name: format!("device number {index}"),
        };
        attach::detach(node, maps.pins(), &device, attach::places(entry.flags))?;
        maps.remove_device(index)?;
    }
    Ok(())
}

//! A container that another plugin attached: its end on the host, the device by which it is
//! reached, and what the programs must know of both to serve its host ports.

use std::net::IpAddr;

use underpass_abi::{
    addr::Addr,
    endpoint::{Attachment, Device as Entry, Endpoint, MAX_ADDRESSES, Owner, device, role},
};
use underpass_cni::Error as CniError;
use underpass_dataplane::{Maps, attach, lock::Lock};
use underpass_netlink::{
    Netlink,
    addr::Address,
    link::{By, Device, Link},
};

use super::{Undo, endpoint::addresses, port, program};
use crate::{error::Error, uplink::Uplink};

/// The host's side of such a container.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Site {
    /// The host's end of its interface.
    here: Link,
    /// Its own end.
    there: Link,
    /// By which the host reaches it: the same device, or a bridge.
    via: Link,
}

/// Who knows the host's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Known {
    /// An ADD of ours made it: the programs know everything.
    Already,
    /// The programs must be told.
    NotYet,
}

impl Site {
    /// Finds it: the container has the interface, and one of the addresses.
    pub(crate) fn find(
        node: &Netlink,
        pod: &Netlink,
        ifname: &str,
        addr: IpAddr,
    ) -> Result<Self, Error> {
        let there = pod.link(By::Name(ifname))?.ok_or_else(|| {
            CniError::config(format!(
                "prevResult names the interface {ifname}, which the container does not have"
            ))
        })?;
        let peer = there.peer.filter(|_| there.is_veth());
        let here = match peer {
            Some(peer) => node.link(By::Index(peer))?,
            None => None,
        };
        let here = here
            .filter(|here| here.is_veth() && here.peer == Some(there.index))
            .ok_or_else(|| {
                CniError::unsupported("runtimeConfig.portMappings", "(not empty)").with_details(
                    format!(
                        "interface {ifname} of the container is no veth with its other end on the host (macvlan, ipvlan and \
                         host-device are not): the host can't send to it"
                    ),
                )
            })?;
        let towards = node.device_towards(addr)?.unwrap_or_default();
        let via = if towards == here.index {
            Some(here.clone())
        } else {
            node.link(By::Index(towards))?
        };
        let via = via.ok_or_else(|| {
            CniError::config(format!(
                "host ports can't lead to the container: the host has no route to {addr}; a bridge needs \"isGateway\": true"
            ))
        })?;
        Ok(Self { here, there, via })
    }

    /// The host's end.
    pub(crate) fn ifindex(&self) -> u32 {
        self.here.index
    }

    fn known(&self, maps: &Maps) -> Result<Known, Error> {
        let entry = maps.device(self.here.index)?;
        Ok(match entry {
            Some(entry) if entry.flags & device::FOREIGN == 0 => Known::Already,
            _ => Known::NotYet,
        })
    }

    /// What the container takes for the client where the host itself is: an address of the device by which the host reaches it.
    fn gateway(local: &[Address], addr: IpAddr) -> Option<IpAddr> {
        let mut own = local.iter().filter(|own| own.global);
        own.find(|own| own.net.addr().is_ipv4() == addr.is_ipv4())
            .map(|own| own.net.addr())
    }

    /// The device by which the container is reached, where that is another one, and no uplink whose
    /// programs do it all.
    fn other(&self, uplinks: &[Uplink]) -> Option<&Link> {
        let is_uplink = uplinks.iter().any(|uplink| uplink.index == self.via.index);
        (self.via.index != self.here.index && !is_uplink).then_some(&self.via)
    }
}

/// Makes the programs know the container, and attaches them where its packets pass.
pub(crate) fn apply<'a>(
    node: &'a Netlink,
    maps: &mut Maps,
    site: &Site,
    uplinks: &[Uplink],
    network: u32,
    claims: port::Claims<'_>,
    undo: &mut Undo<'a>,
) -> Result<(), Error> {
    let owner = claims.owner;
    let pins = maps.pins().clone();
    let _lock = Lock::acquire(pins.root())?;
    let known = site.known(maps)?;
    let mut attachment = Attachment {
        ifindex: site.here.index,
        role: role::CHAINED,
        via: 0,
        network,
        address_count: 0,
        port_count: u32::try_from(claims.bindings.len()).unwrap_or(u32::MAX),
        addresses: [Addr::default(); MAX_ADDRESSES],
    };
    let other = site.other(uplinks).filter(|_| known == Known::NotYet);
    let mut endpoints: Vec<IpAddr> = claims.bindings.iter().map(|port| port.addr).collect();
    endpoints.sort_unstable();
    endpoints.dedup();
    if known == Known::NotYet {
        attachment.via = other.map_or(0, |other| other.index);
        for (slot, addr) in attachment.addresses.iter_mut().zip(&endpoints) {
            *slot = (*addr).into();
            attachment.address_count += 1;
        }
    }
    maps.add_attachment(owner, &attachment)?;
    let root = pins.clone();
    undo.push("foreign", move || {
        let mut maps = Maps::open(&root)?;
        match maps.attachment(owner)? {
            Some(attachment) => revert(node, &mut maps, owner, &attachment),
            None => Ok(()),
        }
    });
    if known == Known::Already {
        return Ok(());
    }
    let entry = |link: &Link, network| Entry {
        flags: device::POD | device::FOREIGN,
        network,
        mtu: link.mtu,
        mac: site.via.mac.0,
        ..Entry::default()
    };
    let here = Entry {
        peer_mac: site.there.mac.0,
        ..entry(&site.here, network)
    };
    maps.set_device(site.here.index, here)?;
    let local = node.addresses_on(site.via.index)?;
    for addr in endpoints {
        let endpoint = Endpoint {
            ifindex: site.here.index,
            prefix_len: if addr.is_ipv4() { 32 } else { 128 },
            gateway: Site::gateway(&local, addr)
                .map(Addr::from)
                .unwrap_or_default(),
        };
        maps.set_endpoint(addr.into(), endpoint)?;
    }
    let places = attach::places(here.flags);
    attach::attach(node, &pins, &named(&site.here), places)?;
    if let Some(other) = other {
        maps.set_device(other.index, entry(other, 0))?;
        attach::attach(node, &pins, &named(other), places)?;
    }
    Ok(())
}

fn named(link: &Link) -> Device {
    Device {
        index: link.index,
        name: link.name.clone(),
    }
}

/// What the programs know of the container, and where they are.
pub(crate) fn verify(
    node: &Netlink,
    maps: &Maps,
    site: &Site,
    uplinks: &[Uplink],
    claims: port::Claims<'_>,
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    let (here, owner) = (&site.here, claims.owner);
    match maps.attachment(owner)? {
        None => wrong.push("the map OWNERS has no entry for the attachment".to_owned()),
        Some(attachment) if attachment.ifindex != here.index => wrong.push(format!(
            "the map OWNERS names another device than {}",
            here.name
        )),
        Some(_) => {}
    }
    for binding in claims.bindings {
        let known = maps.endpoint(binding.addr.into())?;
        if known.is_none_or(|known| known.ifindex != here.index) {
            wrong.push(format!(
                "the map ENDPOINTS does not send {} to {}",
                binding.addr, here.name
            ));
        }
    }
    port::verify(node, maps, owner, here, claims.bindings, wrong)?;
    program::detached_from_pod(node, maps, here, wrong)?;
    if site.known(maps)? == Known::Already {
        return Ok(());
    }
    let other = site.other(uplinks);
    for link in [Some(here), other].into_iter().flatten() {
        if maps.device(link.index)?.map(|entry| entry.mac) != Some(site.via.mac.0) {
            wrong.push(format!(
                "the map DEVICES does not know {} with the gateway's MAC {}",
                link.name, site.via.mac
            ));
        }
    }
    match other {
        Some(other) => program::detached_from_pod(node, maps, other, wrong),
        None => Ok(()),
    }
}

/// Takes its ports from the container, and from the programs what they know of it. The interface is
/// somebody else's, and may be gone.
pub(crate) fn revert(
    node: &Netlink,
    maps: &mut Maps,
    owner: Owner,
    attachment: &Attachment,
) -> Result<(), Error> {
    port::revert(maps, owner, attachment)?;
    let _lock = Lock::acquire(maps.pins().root())?;
    for addr in addresses(attachment) {
        maps.remove_endpoint(addr, attachment.ifindex)?;
    }
    withdraw(node, maps, attachment.ifindex)?;
    let is_shared = maps
        .attachments()?
        .iter()
        .any(|(other, shared)| *other != owner && shared.via == attachment.via);
    if !is_shared {
        withdraw(node, maps, attachment.via)?;
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

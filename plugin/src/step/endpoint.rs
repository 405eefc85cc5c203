//! Map entries: what the programs know of the container.

use std::net::IpAddr;

use underpass_abi::{
    addr::Addr,
    endpoint::{Attachment, Device, Endpoint, MAX_ADDRESSES, Owner, device, role},
    quota,
};
use underpass_cni::IpConfig;
use underpass_dataplane::{Maps, Pins, lock::Lock, object::half_open_limit};
use underpass_netlink::{Netlink, link::Link};

use super::{
    Undo,
    link::{self, Pair},
};
use crate::{error::Error, plan::Plan};

/// Writes the entries. The programs see them before they are attached.
pub(crate) fn apply<'a>(
    node: &'a Netlink,
    maps: &mut Maps,
    plan: &Plan,
    pair: &Pair,
    undo: &mut Undo<'a>,
) -> Result<(), Error> {
    let owner = plan.identity.owner();
    let attachment = attachment(plan, pair);
    let pins = maps.pins().clone();
    let half_open = match plan.half_open_limit {
        Some(limit) => limit,
        None => half_open_limit(maps.node()?.flows),
    };
    {
        let _lock = Lock::acquire(pins.root())?;
        maps.add_attachment(owner, &attachment)?;
        undo.push("endpoint", move || undo_apply(node, &pins, owner));
        maps.add_no_masquerade(attachment.network, &plan.no_masquerade)?;
    }
    maps.set_device(
        pair.host.index,
        Device {
            flags: plan.flags,
            network: attachment.network,
            mtu: plan.mtu,
            peer_mac: plan.pod.mac.0,
            mac: plan.host.mac.0,
            masquerade4: masquerade_address(plan, IpAddr::is_ipv4),
            masquerade6: masquerade_address(plan, IpAddr::is_ipv6),
            flow_cost: quota::cost(half_open),
            ..Device::default()
        },
    )?;
    for ip in &plan.result.ips {
        let endpoint = Endpoint {
            ifindex: pair.host.index,
            prefix_len: ip.address.prefix_len().into(),
            gateway: ip.gateway.map(Addr::from).unwrap_or_default(),
        };
        maps.set_endpoint(ip.address.addr().into(), endpoint)?;
    }
    Ok(())
}

fn masquerade_address(plan: &Plan, family: fn(&IpAddr) -> bool) -> Addr {
    let mut addresses = plan.masquerade_addresses.iter().copied();
    addresses.find(family).map(Addr::from).unwrap_or_default()
}

fn attachment(plan: &Plan, pair: &Pair) -> Attachment {
    let mut addresses = [Addr::default(); MAX_ADDRESSES];
    let mut address_count = 0;
    for (slot, net) in addresses.iter_mut().zip(&plan.addresses) {
        *slot = net.addr().into();
        address_count += 1;
    }
    Attachment {
        ifindex: pair.host.index,
        role: role::INTERFACE,
        via: 0,
        network: plan.identity.network_id(),
        address_count,
        port_count: u32::try_from(plan.ports.len()).unwrap_or(u32::MAX),
        addresses,
    }
}

/// The entries against the devices and addresses that are there.
pub(crate) fn verify(
    maps: &Maps,
    owner: Owner,
    here: &Link,
    there: &Link,
    ips: &[&IpConfig],
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    match maps.attachment(owner)? {
        None => wrong.push("the map OWNERS has no entry for the attachment".to_owned()),
        Some(attachment) if attachment.ifindex != here.index => {
            wrong.push(format!(
                "the map OWNERS names another device than {}",
                here.name
            ));
        }
        Some(_) => {}
    }
    match maps.device(here.index)? {
        None => wrong.push(format!("the map DEVICES has no entry for {}", here.name)),
        Some(device) => {
            let fixed = device.flags & device::CHECK_MAC != 0;
            if device.mac != here.mac.0 || fixed && device.peer_mac != there.mac.0 {
                wrong.push(format!(
                    "the map DEVICES has other MACs than {} and {}",
                    here.name, there.name
                ));
            }
        }
    }
    for ip in ips {
        let addr = ip.address.addr();
        let owner = maps.endpoint(addr.into())?.map(|endpoint| endpoint.ifindex);
        if owner != Some(here.index) {
            wrong.push(format!(
                "the map ENDPOINTS does not send {addr} to {}",
                here.name
            ));
        }
    }
    Ok(())
}

/// Removes what an attachment put into maps, and makes every flow validate itself again. The device is
/// gone: a packet of a container that the programs do not know would leave as it is. The attachment
/// itself goes last, so that a call that is killed can be repeated.
pub(crate) fn revert(maps: &mut Maps, owner: Owner, attachment: &Attachment) -> Result<(), Error> {
    for addr in addresses(attachment) {
        maps.remove_endpoint(addr, attachment.ifindex)?;
    }
    maps.remove_device(attachment.ifindex)?;
    let _lock = Lock::acquire(maps.pins().root())?;
    maps.remove_attachment(owner)?;
    let last = maps
        .attachments()?
        .iter()
        .all(|(_, other)| other.network != attachment.network);
    if last {
        maps.clear_no_masquerade(attachment.network)?;
    }
    Ok(maps.raise_epoch()?)
}

fn undo_apply(node: &Netlink, pins: &Pins, owner: Owner) -> Result<(), Error> {
    let mut maps = Maps::open(pins)?;
    if let Some(attachment) = maps.attachment(owner)? {
        link::revert(node, owner, Some(attachment.ifindex))?;
        revert(&mut maps, owner, &attachment)?;
    }
    Ok(())
}

/// The addresses of an attachment.
pub(super) fn addresses(attachment: &Attachment) -> impl Iterator<Item = Addr> {
    let count = usize::try_from(attachment.address_count).unwrap_or(MAX_ADDRESSES);
    attachment.addresses.into_iter().take(count)
}

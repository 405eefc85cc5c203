//! What the kernel should have: a function of all Nodes, of the node's own links and of the options. No input or
//! output.
//!
//! A node whose address is on one of our links is reached directly: its pods' ranges get a route by it. One beyond a
//! router, which does not know the ranges, is reached through VXLAN: for it the device has one route and one neighbour
//! for each range, and one entry in its forwarding database.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use sha2::{Digest as _, Sha256};

use crate::options::Routing;
use crate::peer::Peer;

/// A MAC address.
pub(crate) type Mac = [u8; 6];

/// Where a range of pods is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    /// At a neighbour on the device with this number.
    Direct { via: IpAddr, device: u32 },
    /// Behind the VXLAN device.
    Tunnel { via: IpAddr },
    /// Here; what no pod has is unreachable at once, instead of going out by the default route and coming back.
    Own,
}

/// What is answered for a remote node on the VXLAN device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Neighbour {
    /// The remote device's address: the gateway of its routes.
    pub(crate) address: IpAddr,
    /// The remote device's MAC.
    pub(crate) mac: Mac,
}

/// The VXLAN device of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tunnel {
    /// Our address on the outside.
    pub(crate) local: IpAddr,
    /// Its MAC, which follows from `local`.
    pub(crate) mac: Mac,
    /// Its MTU in bytes.
    pub(crate) mtu: u32,
    /// Its addresses: the first of each of our ranges, with full length.
    pub(crate) addresses: BTreeSet<IpNet>,
}

/// All that the kernel should have of us.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Desired {
    /// The ranges of pods.
    pub(crate) routes: BTreeMap<IpNet, Way>,
    /// The device, where a node needs it.
    pub(crate) tunnel: Option<Tunnel>,
    /// What the device knows of remote devices.
    pub(crate) neighbours: BTreeSet<Neighbour>,
    /// Where the device sends frames for a MAC.
    pub(crate) forwarding: BTreeSet<(Mac, IpAddr)>,
    /// What could not be planned, for the log.
    pub(crate) remarks: Vec<String>,
}

/// A prefix that is on one of the node's links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OnLink {
    /// The prefix, with the node's own address in it.
    pub(crate) net: IpNet,
    /// The number of its device.
    pub(crate) device: u32,
    /// The device's MTU in bytes.
    pub(crate) mtu: u32,
}

/// The bytes that VXLAN adds: Ethernet, VXLAN and UDP headers, and the outer IP header.
const fn overhead(outer: IpAddr) -> u32 {
    let ip = if outer.is_ipv4() { 20 } else { 40 };
    14 + 8 + 8 + ip
}

/// Plans for the node `own`. Nothing, if the Nodes do not have it: such a list is not believed.
pub(crate) fn plan(
    own: &str,
    nodes: &BTreeMap<String, Peer>,
    links: &[OnLink],
    routing: Routing,
) -> Option<Desired> {
    let myself = nodes.get(own)?;
    let mut desired = Desired::default();
    for range in &myself.pod_cidrs {
        desired.routes.insert(*range, Way::Own);
    }
    if routing == Routing::Cloud {
        return Some(desired);
    }
    let mut owners: BTreeMap<IpNet, &str> =
        myself.pod_cidrs.iter().map(|range| (*range, own)).collect();
    for (name, peer) in nodes.iter().filter(|(name, _)| *name != own) {
        for range in &peer.pod_cidrs {
            // Two nodes of one range: a mistake of somebody's, in which the order of the names decides, not of events.
            let rival = owners
                .iter()
                .find(|(taken, _)| taken.contains(range) || range.contains(*taken));
            if let Some((taken, rival)) = rival {
                desired.remarks.push(format!(
                    "Node {name} has podCIDR {range}, and Node {rival} has {taken}: no route is made for {name}"
                ));
                continue;
            }
            owners.insert(*range, name);
            if !direct(&mut desired, peer, *range, links) {
                tunnel(&mut desired, name, myself, peer, *range, links);
            }
        }
    }
    Some(desired)
}

/// Routes a range by the node's address of the same family, if that is on one of our links.
fn direct(desired: &mut Desired, peer: &Peer, range: IpNet, links: &[OnLink]) -> bool {
    let Some(via) = peer.address(range.addr()) else {
        return false;
    };
    let on_link = links
        .iter()
        .filter(|link| link.net.contains(&via) && link.net.addr() != via)
        .max_by_key(|link| link.net.prefix_len());
    let Some(link) = on_link else { return false };
    desired.routes.insert(
        range,
        Way::Direct {
            via,
            device: link.device,
        },
    );
    true
}

/// Routes a range through VXLAN, whose outside has the family of our first address that the node has, too.
fn tunnel(
    desired: &mut Desired,
    name: &str,
    myself: &Peer,
    peer: &Peer,
    range: IpNet,
    links: &[OnLink],
) {
    let Some(local) = myself.addresses.first().copied() else {
        desired
            .remarks
            .push("our own Node has no InternalIP: no route through VXLAN is made".to_owned());
        return;
    };
    let Some(remote) = peer.address(local) else {
        desired.remarks.push(format!(
            "Node {name} has no InternalIP of the family of ours, {local}: no route to {range} is made"
        ));
        return;
    };
    let device = desired.tunnel.get_or_insert_with(|| {
        let outside = links.iter().find(|link| link.net.addr() == local);
        Tunnel {
            local,
            mac: mac(local),
            mtu: outside.map_or(1500, |link| link.mtu) - overhead(local),
            addresses: myself.pod_cidrs.iter().map(|range| first(*range)).collect(),
        }
    });
    if device.mac == mac(remote) {
        desired.remarks.push(format!(
            "Node {name} has our own InternalIP {remote}: no route to {range} is made"
        ));
        return;
    }
    let via = first(range).addr();
    desired.routes.insert(range, Way::Tunnel { via });
    desired.neighbours.insert(Neighbour {
        address: via,
        mac: mac(remote),
    });
    desired.forwarding.insert((mac(remote), remote));
}

/// The address that a range's VXLAN device has: the first one, which no pod gets.
fn first(range: IpNet) -> IpNet {
    IpNet::from(range.network())
}

/// The MAC that the VXLAN device of the node with this address has. Every node computes the same, so that none
/// has to be told: locally administered, unicast, the rest by SHA-256.
pub(crate) fn mac(outer: IpAddr) -> Mac {
    let digest = match outer {
        IpAddr::V4(address) => Sha256::digest(address.octets()),
        IpAddr::V6(address) => Sha256::digest(address.octets()),
    };
    let mut mac = [0; 6];
    mac.copy_from_slice(&digest[..6]);
    mac[0] = mac[0] & 0xfc | 0x02;
    mac
}

#[cfg(test)]
mod tests;

//! What the kernel should have: a function of all Nodes, of the node's own links and of the options. No input or
//! output.
//!
//! A node whose address is on the link of ours is reached directly: its pods' ranges get a route by it. One beyond a
//! router, which does not know the ranges, is reached through VXLAN: for it the device has one route and one neighbour
//! for each range (by IPv6 one more route, to the range's gateway), and one entry in its forwarding database. The device is there even where this node needs it for
//! nobody: another one may see the links otherwise, and what it sends has to be received.
//!
//! Who may write a Node can name any range. It is not believed where it would take what is not of pods: a node's
//! address, one of our links, a range outside of the cluster's, or one that an older Node has.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use sha2::{Digest as _, Sha256};

use crate::options::Routing;
use crate::peer::Peer;

mod believe;
mod planner;

pub(crate) use self::believe::believe;
pub(crate) use self::planner::Planner;

/// A MAC address.
pub(crate) type Mac = [u8; 6];

/// Where a range of pods is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    /// The gateway of a tunnel: on the VXLAN device itself, whoever else has a route to more.
    Gateway,
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
    /// Where other nodes send to: our address on the outside, which may be translated on the way.
    pub(crate) outside: IpAddr,
    /// Its MAC, which follows from `outside`.
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
    /// How many ranges of other nodes have no way, for reasons that have nothing to do with the kernel.
    pub(crate) unrouted: usize,
    /// Whether it is not known yet which ranges are ours: what there is of them stays.
    pub(crate) keeps_own: bool,
    /// What is wrong with our own Node: there is no network then.
    pub(crate) errors: Vec<String>,
    /// What could not be planned, for the log.
    pub(crate) remarks: Vec<String>,
}

impl Desired {
    /// The ranges of pods that have a route, without those of gateways: they do not overlap.
    pub(crate) fn ranges(&self) -> BTreeSet<IpNet> {
        let ways = self.routes.iter();
        let pods = ways.filter(|(_, way)| **way != Way::Gateway);
        pods.map(|(range, _)| *range).collect()
    }

    /// The MTU of pods by which none of their packets is too large for the way to others, in bytes; none where all others are
    /// reached directly. With the uplinks' MTU a pod would tell a client in the world that it takes segments that do not fit
    /// when they go to it by another node, and not every client hears the answer to that. Nor is it more than that of the way to the `world`: who
    /// is told one looks for no smaller one there.
    pub(crate) fn mtu(&self, routing: Routing, world: Option<u32>) -> Option<u32> {
        let tunnel = self.tunnel.as_ref()?;
        let is_own_ipv6 = |(range, way): (&IpNet, &Way)| *way == Way::Own && range.addr().is_ipv6();
        // What a pod with IPv6 needs at least is more than some devices have, which then take IPv4 alone.
        let smallest = if self.routes.iter().any(is_own_ipv6) {
            SMALLEST_OF_IPV6
        } else {
            SMALLEST_MTU
        };
        let largest = world.map_or(tunnel.mtu, |world| world.min(tunnel.mtu));
        (routing == Routing::Vxlan || self.tunnels()).then_some(largest.max(smallest))
    }

    /// How many things the kernel should have.
    pub(crate) fn len(&self) -> usize {
        self.routes.len() + self.neighbours.len() + self.forwarding.len()
    }

    /// Whether another node is reached through the device.
    pub(crate) fn tunnels(&self) -> bool {
        !self.neighbours.is_empty()
    }
}

/// A prefix that is on one of the node's links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OnLink {
    /// The prefix: the address alone, where the kernel has no route to more, or the link has no neighbours.
    pub(crate) net: IpNet,
    /// The node's own address there: in the prefix, unless the link is one to a single other address.
    pub(crate) own: IpAddr,
    /// The number of its device.
    pub(crate) device: u32,
    /// The device's MTU in bytes.
    pub(crate) mtu: u32,
    /// Whether the device is a bridge.
    pub(crate) is_bridge: bool,
}

impl OnLink {
    /// Tells whether it may matter to what is believed of Nodes: none has an address or a range that is IPv6 link-local. (In a range as large as
    /// it may be there can be IPv4's link-local addresses.)
    pub(crate) fn matters_to_nodes(&self) -> bool {
        !is_link_local(self.net.addr())
    }
}

/// Tells whether it is an IPv6 address that is known on its link alone.
pub(crate) fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

/// Tells whether a prefix is an address alone: nobody else is on its link.
pub(crate) fn is_alone(net: IpNet) -> bool {
    net.prefix_len() == net.max_prefix_len()
}

/// The bytes that VXLAN adds: Ethernet, VXLAN and UDP headers, and the outer IP header.
const fn overhead(outer: IpAddr) -> u32 {
    let ip = if outer.is_ipv4() { 20 } else { 40 };
    14 + 8 + 8 + ip
}

/// The smallest MTU that IPv6 works with, in bytes (RFC 8200).
const SMALLEST_OF_IPV6: u32 = 1280;

/// The smallest MTU of the device, in bytes: what every host has to take of IPv4 (RFC 1122).
const SMALLEST_MTU: u32 = 576;

/// What the plan is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inputs<'a> {
    /// The name of this node's Node.
    pub(crate) own: &'a str,
    /// All Nodes.
    pub(crate) nodes: &'a BTreeMap<String, Peer>,
    /// The prefixes that are on this node's links.
    pub(crate) links: &'a [OnLink],
    /// How nodes are reached.
    pub(crate) routing: Routing,
    /// The ranges that pods can have; any, where there is none.
    pub(crate) cluster: &'a [IpNet],
}

/// Plans for a node. An error is why nothing can be: what there is stays.
fn plan(inputs: &Inputs<'_>) -> Result<Desired, String> {
    let believed = believe(inputs)?;
    let myself = believed.myself;
    let mut desired = Desired {
        keeps_own: myself.pod_cidrs.is_empty(),
        remarks: believed.remarks,
        errors: believed.errors,
        ..Desired::default()
    };
    if desired.keeps_own {
        desired.remarks.push(format!(
            "Node {} has no podCIDRs: the network is installed when it has",
            inputs.own
        ));
    }
    for range in &believed.own {
        desired.routes.insert(*range, Way::Own);
    }
    if inputs.routing == Routing::Cloud {
        return Ok(desired);
    }
    if let Some(outside) = myself.addresses.first() {
        match device(*outside, &believed.own, inputs.links) {
            Ok(tunnel) => desired.tunnel = Some(tunnel),
            Err(remark) => desired.remarks.push(remark),
        }
    }
    for (range, name, peer) in believed.others {
        let is_direct = inputs.routing == Routing::Auto
            && direct(&mut desired, myself, peer, range, inputs.links);
        if !is_direct && !tunnel(&mut desired, name, peer, range) {
            desired.unrouted += 1;
        }
    }
    Ok(desired)
}

/// Routes a range by the node's address of the same family, if that is on the link of our own.
fn direct(
    desired: &mut Desired,
    myself: &Peer,
    peer: &Peer,
    range: IpNet,
    links: &[OnLink],
) -> bool {
    let Some(via) = peer.address(range.addr()) else {
        return false;
    };
    let on_link = links
        .iter()
        .filter(|link| link.net.contains(&via) && link.own != via)
        // The other node looks for our address, too.
        .filter(|link| myself.addresses.contains(&link.own))
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

/// What fits through whichever link leads to another node, in bytes, where our address is on none: on a loopback
/// device or a dummy, or translated. Links with link-local addresses alone count: routers are found by them, too. Those that
/// are too small for IPv6 through VXLAN do not count beside others.
fn largest_to_all(links: &[OnLink], overhead: u32) -> u32 {
    let shared = links
        .iter()
        .filter(|link| !is_alone(link.net))
        .map(|link| link.mtu);
    let roomy = shared
        .clone()
        .filter(|mtu| *mtu >= SMALLEST_OF_IPV6 + overhead);
    roomy.min().or_else(|| shared.min()).unwrap_or(1500)
}

/// The VXLAN device of this node, or why there can be none. Its outside is our first address.
fn device(outside: IpAddr, own: &[IpNet], links: &[OnLink]) -> Result<Tunnel, String> {
    let mtu = links
        .iter()
        .find(|link| link.own == outside)
        .map_or_else(|| largest_to_all(links, overhead(outside)), |link| link.mtu);
    match mtu.checked_sub(overhead(outside)) {
        Some(inside) if inside >= SMALLEST_MTU => Ok(Tunnel {
            outside,
            mac: mac(outside),
            mtu: inside,
            addresses: own
                .iter()
                .filter(|range| fits(inside, **range))
                .map(|range| first(*range))
                .collect(),
        }),
        _ => Err(format!(
            "the link of {outside} has an MTU of {mtu}, which is too small: there is no VXLAN"
        )),
    }
}

/// Whether a device with this MTU can have addresses of the range's family.
fn fits(mtu: u32, range: IpNet) -> bool {
    range.addr().is_ipv4() || mtu >= SMALLEST_OF_IPV6
}

/// Routes a range through VXLAN, if we have the device and the node an address of the family of its outside. Returns whether it has.
fn tunnel(desired: &mut Desired, name: &str, peer: &Peer, range: IpNet) -> bool {
    let Some(device) = &desired.tunnel else {
        return false;
    };
    if !fits(device.mtu, range) {
        desired.remarks.push(format!(
            "VXLAN leaves {} bytes of a packet, IPv6 needs {SMALLEST_OF_IPV6}: no route to {range} of Node {name} is made",
            device.mtu
        ));
        return false;
    }
    let Some(remote) = peer.address(device.outside) else {
        desired.remarks.push(format!(
            "Node {name} has no InternalIP of the family of ours, {}: no route to {range} is made",
            device.outside
        ));
        return false;
    };
    if let Some(outside) = peer.addresses.first()
        && outside.is_ipv4() != device.outside.is_ipv4()
    {
        desired.remarks.push(format!(
            "Node {name} has its VXLAN device at {outside}, its first InternalIP, and we have ours at {}, of the other family: \
             no route to {range} is made; give both the same order of addresses",
            device.outside
        ));
        return false;
    }
    if device.mac == mac(remote) {
        desired.remarks.push(format!(
            "Node {name} has our own InternalIP {remote}: no route to {range} is made"
        ));
        return false;
    }
    let via = first(range).addr();
    desired.routes.insert(range, Way::Tunnel { via });
    // IPv6 refuses a gateway to which a route of others leads by another device.
    let gateway = first(range);
    if gateway.addr().is_ipv6() && gateway != range {
        desired.routes.insert(gateway, Way::Gateway);
    }
    desired.neighbours.insert(Neighbour {
        address: via,
        mac: mac(remote),
    });
    desired.forwarding.insert((mac(remote), remote));
    true
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

//! The kernel's side: what there is of ours, and what makes it what it should be.
//!
//! A route is ours if it has our protocol number, so that neither an agent that starts nor one of another version
//! needs a memory. The device is ours by its name.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use anyhow::Context as _;
use ipnet::IpNet;
use rtnetlink::Handle;
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use rtnetlink::packet_route::link::{
    InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use tokio::task::JoinSet;
use underpass_abi::endpoint::ALIAS_PREFIX;

use crate::plan::{Desired, OnLink, is_alone};

mod dump;
pub(crate) mod events;
mod routes;
mod tunnel;

use self::tunnel::Away;

/// The device of VXLAN.
pub(crate) const DEVICE: &str = "underpass-vxlan";

/// Changes routes and devices of this network namespace.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    handle: Handle,
    tunnel: TunnelOptions,
    /// The number of the VXLAN device, for who listens.
    device: Arc<AtomicU32>,
    /// Whether the address that it sends from is there.
    pub(crate) away: Away,
}

/// What the cluster decides of VXLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TunnelOptions {
    /// The network identifier.
    pub(crate) id: u32,
    /// The UDP port on the outside.
    pub(crate) port: u16,
}

/// What there is of devices and addresses, read once for a comparison.
#[derive(Debug)]
pub(crate) struct Seen {
    links: Vec<Link>,
    addresses: Vec<Address>,
    /// Prefixes that are on the link of the device beside, by a route. They are listed only if an address has none of its
    /// own.
    routes: BTreeSet<(IpNet, u32)>,
}

/// A device, as far as it matters here.
#[derive(Debug)]
struct Link {
    index: u32,
    name: String,
    mtu: u32,
    is_up: bool,
    /// Whether it is the loopback device or a dummy, which lead to nobody, or the host's end of a pod of ours.
    is_inward: bool,
    is_bridge: bool,
    /// None, where there are no neighbours to find: tunnels such as `WireGuard`, tun and PPP.
    mac: Vec<u8>,
    /// What a VXLAN device was made with.
    vxlan: Vec<InfoVxlan>,
}

/// An address of a device.
#[derive(Debug)]
struct Address {
    /// The node's own, with the length of its prefix.
    own: IpNet,
    /// The prefix that is on the link: with another address at the other end, that one's.
    prefix: IpNet,
    /// Whether the kernel has made no route to the prefix (`noprefixroute`): others may have, or not.
    is_bare: bool,
    message: AddressMessage,
}

/// What became of the changes, a sentence each.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    /// What was changed.
    pub(crate) changes: Vec<String>,
    /// What could not be of this node's own: there is no network without it. The next comparison tries again.
    pub(crate) errors: Vec<anyhow::Error>,
    /// What could not be for the way to one other node, which may be its own fault. It is tried again as well.
    pub(crate) missing: Vec<anyhow::Error>,
    /// How many ranges of other nodes have no route, as the device is not there for which what failed is among the errors.
    pub(crate) unrouted: usize,
    /// What could not be, and nobody may ever need, as a device that leads to no other node yet.
    pub(crate) warnings: Vec<anyhow::Error>,
}

/// Whom it concerns when something can't be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Concern {
    /// This node, and so all others.
    Node,
    /// One other node.
    Peer,
}

impl Notes {
    fn note(&mut self, concern: Concern, outcome: Result<(), rtnetlink::Error>, change: String) {
        match outcome {
            Ok(()) => self.changes.push(change),
            Err(error) => {
                let error = anyhow::Error::new(error).context(format!("not done: {change}"));
                self.complain(concern, error);
            }
        }
    }

    fn complain(&mut self, concern: Concern, error: anyhow::Error) {
        match concern {
            Concern::Node => self.errors.push(error),
            Concern::Peer => self.missing.push(error),
        }
    }

    /// All that could not be done.
    pub(crate) fn failures(&self) -> impl Iterator<Item = &anyhow::Error> {
        self.errors.iter().chain(&self.missing)
    }
}

impl Seen {
    /// Tells whether the kernel's routes say more of the links: they may be a hundred thousand. Each pod of ours has a bare
    /// address on the host, but that is on no link.
    fn needs_routes(&self) -> bool {
        let mut addresses = self.addresses.iter();
        addresses.any(|address| address.is_bare && !is_alone(address.prefix))
    }

    /// Tells whether a packet of this length, in bytes, may be too large for a link of the node.
    fn has_narrower(&self, mtu: u32) -> bool {
        self.outward().any(|link| link.mtu < mtu)
    }

    /// The smallest MTU of these devices, in bytes.
    fn narrowest(&self, devices: &BTreeSet<u32>) -> Option<u32> {
        let links = self.outward();
        let theirs = links.filter(|link| devices.contains(&link.index));
        theirs.map(|link| link.mtu).min()
    }

    /// The devices that may lead to others than our pods.
    fn outward(&self) -> impl Iterator<Item = &Link> {
        let links = self.links.iter();
        links.filter(|link| link.is_up && !link.is_inward && link.name != DEVICE)
    }

    /// Lists the prefixes that are on the node's links, apart from those of our own device. The ways to single pods are
    /// no links: they come and go, and have the address of the pods' gateway. A device without link-layer addresses, as
    /// `WireGuard`'s, decides by itself who a packet is for, whatever the next hop, and that is not of pods: the node is
    /// alone there.
    pub(crate) fn on_link(&self) -> Vec<OnLink> {
        let on_link = self.addresses.iter().filter_map(|address| {
            let device = address.message.header.index;
            let link = self.outward().find(|link| link.index == device)?;
            let is_routed = !address.is_bare || self.routes.contains(&(address.prefix, device));
            let is_shared = is_routed && !link.mac.is_empty();
            let alone = IpNet::from(address.own.addr());
            Some(OnLink {
                net: if is_shared { address.prefix } else { alone },
                own: address.own.addr(),
                device,
                mtu: link.mtu,
                is_bridge: link.is_bridge,
            })
        });
        on_link.collect()
    }
}

impl Kernel {
    /// Opens a socket of this network namespace, a task of `sockets`. `device` will have the number of the VXLAN device.
    pub(crate) fn open(
        tunnel: TunnelOptions,
        device: Arc<AtomicU32>,
        sockets: &mut JoinSet<()>,
    ) -> anyhow::Result<Self> {
        // Events have a socket of their own: where one overflows answers get lost. Only with strict checks does the kernel
        // leave out the routes that were not asked for: somebody may have a hundred thousand.
        let (mut connection, handle, _) = rtnetlink::new_connection_with_strict_check()
            .context("cannot open a socket for routes")?;
        connection.set_forward_done(true);
        sockets.spawn(connection);
        Ok(Self {
            handle,
            tunnel,
            device,
            away: Away::default(),
        })
    }

    /// Looks at devices and addresses.
    pub(crate) async fn look(&self) -> anyhow::Result<Seen> {
        let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
        let links = self.dump(request, |message| match message {
            RouteNetlinkMessage::NewLink(message) => Some(read_link(message)),
            _ => None,
        });
        let links = links.await;
        let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        let addresses = self.dump(request, |message| match message {
            RouteNetlinkMessage::NewAddress(message) => read_address(message),
            _ => None,
        });
        let addresses = addresses.await;
        let mut seen = Seen {
            links: links.context("cannot list the devices")?,
            addresses: addresses.context("cannot list the addresses")?,
            routes: BTreeSet::new(),
        };
        if seen.needs_routes() {
            seen.routes = self.link_routes().await?;
        }
        Ok(seen)
    }

    /// The smallest MTU of the links by which default routes of the main table lead, in bytes, if one of them may be smaller than `mtu`. Else
    /// no route is listed: somebody may have a hundred thousand.
    pub(crate) async fn way_out(&self, seen: &Seen, mtu: u32) -> anyhow::Result<Option<u32>> {
        if !seen.has_narrower(mtu) {
            return Ok(None);
        }
        Ok(seen.narrowest(&self.ways_out().await?))
    }

    /// Makes the kernel have what is desired. Goes on past errors.
    pub(crate) async fn apply(&self, desired: &Desired, seen: &Seen) -> Notes {
        let mut notes = Notes::default();
        // The device comes before the routes that need it, and goes after them.
        let device = match &desired.tunnel {
            Some(tunnel) => {
                let kept = self.keep_tunnel(tunnel, desired, seen, &mut notes).await;
                let device = kept.map_err(|error| notes.errors.push(error)).ok();
                if !desired.tunnels() {
                    notes.warnings.append(&mut notes.errors);
                }
                device
            }
            None => None,
        };
        self.keep_routes(desired, device, &mut notes).await;
        if desired.tunnel.is_none()
            && let Err(error) = self.remove_tunnel(seen, &mut notes).await
        {
            notes.errors.push(error);
        }
        notes
    }
}

fn read_link(message: LinkMessage) -> Link {
    let mut link = Link {
        index: message.header.index,
        name: String::new(),
        mtu: 0,
        is_up: message.header.flags.contains(LinkFlags::Up),
        is_inward: message.header.flags.contains(LinkFlags::Loopback),
        is_bridge: false,
        mac: Vec::new(),
        vxlan: Vec::new(),
    };
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::IfAlias(alias) => link.is_inward |= alias.starts_with(ALIAS_PREFIX),
            LinkAttribute::Mtu(mtu) => link.mtu = mtu,
            LinkAttribute::Address(mac) => link.mac = mac,
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(InfoKind::Bridge) => link.is_bridge = true,
                        LinkInfo::Kind(InfoKind::Dummy) => link.is_inward = true,
                        LinkInfo::Data(InfoData::Vxlan(vxlan)) => link.vxlan = vxlan,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    link
}

fn read_address(message: AddressMessage) -> Option<Address> {
    let mut local = None;
    let mut other = None;
    let mut is_bare = false;
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(address) => local = Some(*address),
            AddressAttribute::Address(address) => other = Some(*address),
            AddressAttribute::Flags(flags) => {
                is_bare = flags.contains(AddressFlags::Noprefixroute);
            }
            _ => {}
        }
    }
    let length = message.header.prefix_len;
    Some(Address {
        own: IpNet::new(local.or(other)?, length).ok()?,
        prefix: IpNet::new(other?, length).ok()?.trunc(),
        is_bare,
        message,
    })
}

#[cfg(test)]
mod tests;

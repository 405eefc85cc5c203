//! The VXLAN device, and what it knows of those of other nodes.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::pin::pin;
use std::sync::atomic::Ordering;

use anyhow::Context as _;
use futures::TryStreamExt as _;
use ipnet::IpNet;
use rtnetlink::packet_route::link::InfoVxlan;
use rtnetlink::packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::{LinkMessageBuilder, LinkUnspec, LinkVxlan};

use super::{Concern, DEVICE, Kernel, Link, Notes, Seen, read_link};
use crate::plan::{Desired, Mac, Neighbour, Tunnel, is_link_local};

mod away;
mod clsact;
mod sysctl;

pub(super) use self::away::Away;

/// `NUD_PERMANENT` and `NUD_NOARP` of `linux/neighbour.h`, which an entry may have both.
const PERMANENT: u16 = 0x80;
const NO_ARP: u16 = 0x40;

impl Kernel {
    /// Makes the device, its addresses and what it knows as they are desired. Returns its number, if there is one at
    /// the end; what could not be done with it is in `notes`.
    pub(super) async fn keep_tunnel(
        &self,
        tunnel: &Tunnel,
        desired: &Desired,
        seen: &Seen,
        notes: &mut Notes,
    ) -> anyhow::Result<u32> {
        let made;
        let local = local(tunnel.outside, seen);
        let may_wait =
            self.away.is_short(local.is_unspecified()) || !has_others(tunnel.outside, seen);
        let device = match existing(seen) {
            Some(device) if self.is_same(device, tunnel, local, may_wait) => device,
            other => {
                if let Some(device) = other {
                    self.delete(device.index).await?;
                }
                made = self.create(tunnel, local, notes).await?;
                &made
            }
        };
        self.device.store(device.index, Ordering::Relaxed);
        // The kernel forgets what IPv6 was told of a device that is too small for it: they come after the MTU.
        if let Err(error) = self.keep_mtu(device, tunnel, notes).await {
            notes.errors.push(error);
        }
        let has_ipv6 = tunnel.addresses.iter().any(|net| net.addr().is_ipv6());
        sysctl::keep(has_ipv6, notes);
        // Later it would cost packets.
        if !device.is_up
            && let Err(error) = self.add_clsact(device.index).await
        {
            notes.warnings.push(error);
        }
        if let Err(error) = self.keep_up(device, notes).await {
            notes.errors.push(error);
        }
        if !desired.keeps_own {
            self.keep_addresses(device.index, &tunnel.addresses, seen, notes)
                .await;
        }
        self.keep_neighbours(device.index, &desired.neighbours, notes)
            .await;
        self.keep_forwarding(device.index, &desired.forwarding, notes)
            .await;
        Ok(device.index)
    }

    async fn keep_mtu(
        &self,
        device: &Link,
        tunnel: &Tunnel,
        notes: &mut Notes,
    ) -> anyhow::Result<()> {
        let mtu = tunnel.mtu;
        if device.mtu == mtu {
            return Ok(());
        }
        let message = LinkUnspec::new_with_index(device.index).mtu(mtu).build();
        let request = self.handle.link().set(message);
        request
            .execute()
            .await
            .with_context(|| format!("cannot give {DEVICE} an MTU of {mtu}"))?;
        notes
            .changes
            .push(format!("device {DEVICE} has an MTU of {mtu}"));
        Ok(())
    }

    async fn keep_up(&self, device: &Link, notes: &mut Notes) -> anyhow::Result<()> {
        if device.is_up {
            return Ok(());
        }
        let message = LinkUnspec::new_with_index(device.index).up().build();
        let request = self.handle.link().set(message);
        let what = format!("cannot set {DEVICE} up (UDP port {})", self.tunnel.port);
        request
            .execute()
            .await
            .map_err(|error| refused(&what, error))?;
        notes.changes.push(format!("device {DEVICE} is up"));
        Ok(())
    }

    /// Deletes the device, if there is one.
    pub(super) async fn remove_tunnel(&self, seen: &Seen, notes: &mut Notes) -> anyhow::Result<()> {
        if let Some(device) = existing(seen) {
            self.delete(device.index).await?;
            notes.changes.push(format!("no device {DEVICE} any more"));
        }
        Ok(())
    }

    /// What can't be changed on a device that is there.
    fn is_same(&self, device: &Link, tunnel: &Tunnel, local: IpAddr, may_wait: bool) -> bool {
        let wanted = [
            InfoVxlan::Id(self.tunnel.id),
            InfoVxlan::Port(self.tunnel.port),
            InfoVxlan::Learning(false),
        ];
        // The kernel does not say any address. That it is any of the right family follows from the MAC.
        let mut bound = device.vxlan.iter();
        let bound = bound.find_map(|info| match info {
            InfoVxlan::Local(address) => Some(IpAddr::from(*address)),
            InfoVxlan::Local6(address) => Some(IpAddr::from(*address)),
            _ => None,
        });
        // An address that goes and comes back, as when a link goes down, does not cost the device: it sends again when that is there. Where the node has others,
        // that is waited for a short time only: it may be somebody's by now who translates it to one of those.
        let is_local = match bound {
            Some(bound) => bound == local || bound == tunnel.outside && may_wait,
            None => local.is_unspecified(),
        };
        device.mac == tunnel.mac
            && is_local
            && wanted.iter().all(|wanted| device.vxlan.contains(wanted))
    }

    async fn create(
        &self,
        tunnel: &Tunnel,
        local: IpAddr,
        notes: &mut Notes,
    ) -> anyhow::Result<Link> {
        let device = LinkMessageBuilder::<LinkVxlan>::new(DEVICE)
            .id(self.tunnel.id)
            .port(self.tunnel.port)
            .learning(false);
        let device = match local {
            IpAddr::V4(address) => device.local(address),
            IpAddr::V6(address) => device.local6(address),
        };
        let message = device.address(tunnel.mac.to_vec()).mtu(tunnel.mtu).build();
        let request = self.handle.link().add(message);
        let what = format!(
            "cannot make {DEVICE} (VXLAN {}, UDP port {}, outside {})",
            self.tunnel.id, self.tunnel.port, tunnel.outside
        );
        request
            .execute()
            .await
            .map_err(|error| refused(&what, error))?;
        let change = format!("device {DEVICE}, outside {}", tunnel.outside);
        notes.changes.push(change);
        let request = self.handle.link().get().match_name(DEVICE);
        let mut made = pin!(request.execute());
        let message = made.try_next().await;
        message
            .with_context(|| format!("cannot find {DEVICE}, which was just made"))?
            .map(read_link)
            .with_context(|| format!("{DEVICE} was deleted while it was made"))
    }

    async fn delete(&self, index: u32) -> anyhow::Result<()> {
        let request = self.handle.link().del(index);
        request
            .execute()
            .await
            .with_context(|| format!("cannot delete {DEVICE}"))
    }

    async fn keep_addresses(
        &self,
        index: u32,
        wanted: &BTreeSet<IpNet>,
        seen: &Seen,
        notes: &mut Notes,
    ) {
        let there = seen.addresses.iter().filter(|address| {
            // The kernel gives a device link-local ones of its own.
            address.message.header.index == index && !is_link_local(address.own.addr())
        });
        let handle = self.handle.address();
        let level = Level {
            concern: Concern::Node,
            say: |net: &IpNet| format!("address {net} on {DEVICE}"),
            remove: async |message| handle.del(message).execute().await,
            add: async |net: &IpNet| {
                let request = handle.add(index, net.addr(), net.prefix_len());
                request.execute().await
            },
        };
        let there = there.map(|address| (address.own, address.message.clone()));
        level.make(there, wanted, notes).await;
    }

    async fn keep_neighbours(&self, index: u32, wanted: &BTreeSet<Neighbour>, notes: &mut Notes) {
        let mut there = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            match self.permanent(index, family).await {
                Ok(entries) => there.extend(entries),
                Err(error) => return notes.errors.push(error),
            }
        }
        let handle = self.handle.neighbours();
        let level = Level {
            concern: Concern::Peer,
            say: |neighbour: &Neighbour| format!("neighbour {} on {DEVICE}", neighbour.address),
            remove: async |message| handle.del(message).execute().await,
            add: async |neighbour: &Neighbour| {
                let request = handle
                    .add(index, neighbour.address)
                    .link_layer_address(&neighbour.mac)
                    .flags(ROUTER)
                    .state(NeighbourState::Permanent)
                    .replace();
                request.execute().await
            },
        };
        // One that is as it has to be but for its flags is replaced.
        there.retain(|(known, message)| {
            message.header.flags.contains(ROUTER) || !wanted.contains(known)
        });
        level.make(there, wanted, notes).await;
    }

    async fn keep_forwarding(
        &self,
        index: u32,
        wanted: &BTreeSet<(Mac, IpAddr)>,
        notes: &mut Notes,
    ) {
        let there = match self.permanent(index, AddressFamily::Bridge).await {
            Ok(entries) => entries,
            Err(error) => return notes.errors.push(error),
        };
        let handle = self.handle.neighbours();
        let level = Level {
            concern: Concern::Peer,
            say: |(_, outside): &(Mac, IpAddr)| format!("node at {outside} behind {DEVICE}"),
            remove: async |message| handle.del(message).execute().await,
            add: async |(mac, outside): &(Mac, IpAddr)| {
                let request = handle
                    .add_bridge(index, mac)
                    .destination(*outside)
                    .flags(NeighbourFlags::Own)
                    .state(NeighbourState::Permanent)
                    .replace();
                request.execute().await
            },
        };
        let there = there
            .into_iter()
            .map(|(known, message)| ((known.mac, known.address), message));
        level.make(there, wanted, notes).await;
    }

    /// Lists the entries of the device that somebody made. `bridge` says of those for forwarding as well that they need no ARP, and of static ones
    /// that alone; the kernel says it of neighbours by itself.
    async fn permanent(
        &self,
        index: u32,
        family: AddressFamily,
    ) -> anyhow::Result<Vec<(Neighbour, NeighbourMessage)>> {
        let made = match family {
            AddressFamily::Bridge => PERMANENT | NO_ARP,
            _ => PERMANENT,
        };
        let mut request = NeighbourMessage::default();
        request.header.family = family;
        let entries = self.dump(RouteNetlinkMessage::GetNeighbour(request), |message| {
            let RouteNetlinkMessage::NewNeighbour(message) = message else {
                return None;
            };
            let is_ours =
                message.header.ifindex == index && u16::from(message.header.state) & made != 0;
            let known = neighbour(&message).filter(|_| is_ours)?;
            Some((known, message))
        });
        entries.await.context("cannot list the neighbours")
    }
}

/// Says what could not be done, and why.
fn refused(what: &str, error: rtnetlink::Error) -> anyhow::Error {
    let why = why_not(&error);
    anyhow::Error::new(error).context(format!("{what}: {why}"))
}

/// What an answer to the request for the device, or to set it up, means (`vxlan_newlink` and `vxlan_open` of
/// `drivers/net/vxlan/vxlan_core.c`).
fn why_not(error: &rtnetlink::Error) -> &'static str {
    let rtnetlink::Error::NetlinkError(message) = error else {
        return "the kernel was not asked";
    };
    match message.to_io().kind() {
        ErrorKind::AlreadyExists => "another VXLAN device has the same identifier and port",
        ErrorKind::AddrInUse => {
            "that UDP port is a server's, or a VXLAN device's of another kind, as Open vSwitch's: choose another by --vxlan-port, for all nodes"
        }
        ErrorKind::Unsupported => {
            "this kernel has no VXLAN: install its module, which may be in a package of its own"
        }
        _ => "the kernel does not say why",
    }
}

/// How one kind of things is made what it should be.
struct Level<S, R, A> {
    /// Whom each of them is for.
    concern: Concern,
    /// Names one of them.
    say: S,
    remove: R,
    add: A,
}

impl<S, R, A> Level<S, R, A> {
    /// Removes what is not wanted, then adds what is missing.
    async fn make<T, M>(
        &self,
        there: impl IntoIterator<Item = (T, M)>,
        wanted: &BTreeSet<T>,
        notes: &mut Notes,
    ) where
        T: Ord + Clone,
        S: Fn(&T) -> String,
        R: AsyncFn(M) -> Result<(), rtnetlink::Error>,
        A: AsyncFn(&T) -> Result<(), rtnetlink::Error>,
    {
        let mut missing = wanted.clone();
        for (thing, message) in there {
            if !missing.remove(&thing) {
                let change = format!("no {} any more", (self.say)(&thing));
                notes.note(self.concern, (self.remove)(message).await, change);
            }
        }
        for thing in missing {
            notes.note(self.concern, (self.add)(&thing).await, (self.say)(&thing));
        }
    }
}

/// The address that the device sends from: none in particular, where the one that others know is not this node's own, but translated to
/// one of its. From an address that is not local the kernel sends nothing.
fn local(outside: IpAddr, seen: &Seen) -> IpAddr {
    let is_ours = seen
        .addresses
        .iter()
        .any(|address| address.own.addr() == outside);
    match outside {
        _ if is_ours => outside,
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Tells whether the node has an address of this family on a link, by which it could send.
fn has_others(outside: IpAddr, seen: &Seen) -> bool {
    let links = seen.on_link();
    let mut own = links.iter().map(|link| link.own);
    own.any(|own| own.is_ipv4() == outside.is_ipv4() && !is_link_local(own))
}

fn existing(seen: &Seen) -> Option<&Link> {
    seen.links.iter().find(|link| link.name == DEVICE)
}

/// All neighbours of the device are gateways. Of IPv6 the kernel forgets the path MTUs behind a gateway that is not marked as a router half a minute
/// after they were told, and not ten (`rt6_age_examine_exception` in `net/ipv6/route.c`, since Linux 4.15).
const ROUTER: NeighbourFlags = NeighbourFlags::Router;

fn neighbour(message: &NeighbourMessage) -> Option<Neighbour> {
    let mut address = None;
    let mut mac = None;
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => {
                address = Some(IpAddr::from(*ip));
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => {
                address = Some(IpAddr::from(*ip));
            }
            // The forwarding database says an address without its family.
            NeighbourAttribute::Destination(NeighbourAddress::Other(bytes)) => {
                address = match bytes.len() {
                    4 => <[u8; 4]>::try_from(bytes.as_slice()).ok().map(IpAddr::from),
                    _ => <[u8; 16]>::try_from(bytes.as_slice())
                        .ok()
                        .map(IpAddr::from),
                };
            }
            NeighbourAttribute::LinkLayerAddress(bytes) => {
                mac = Mac::try_from(bytes.as_slice()).ok();
            }
            _ => {}
        }
    }
    Some(Neighbour {
        address: address?,
        mac: mac?,
    })
}

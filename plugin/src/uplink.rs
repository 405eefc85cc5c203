//! Which devices lead to the world, and which of their addresses the world sees. A decision from
//! what netlink said; no input or output.

use std::{collections::BTreeSet, net::IpAddr};

use underpass_abi::{
    addr::Addr,
    endpoint::{Device, device},
};
use underpass_netlink::{
    addr::Address,
    link::{InfoKind, Link},
    route::Installed,
    xdp::Attached,
};

use crate::{glob::Glob, identity::Alias};

mod look;
pub(crate) mod overlap;
pub(crate) mod reconcile;
mod tunnel;

pub(crate) use look::{Uplinks, devices};

/// Value of `rp_filter`: a packet must come in by the device that the answer would leave by.
const STRICT: i32 = 1;

/// An uplink, and what the programs should know of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Uplink {
    /// Its number in the node's network namespace.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its entry in the map `DEVICES`.
    pub device: Device,
    /// True if a default route of the main table leads by it.
    pub default_route: bool,
    /// XDP programs that it has, ours or others'.
    pub xdp: Vec<Attached>,
}

/// The state of a network namespace that the choice depends on.
#[derive(Clone, Copy, Debug)]
pub struct Surroundings<'a> {
    /// The devices that belong to no container.
    pub links: &'a [Link],
    /// Their addresses.
    pub addresses: &'a [Address],
    /// The default routes of the main table.
    pub routes: &'a [Installed],
    /// `net.ipv4.conf.all.rp_filter`.
    pub rp_filter: i32,
    /// The numbers of those that are uplinks already, of whichever network.
    pub known: &'a [u32],
}

/// Devices of which each is made on the next: the kernel lets nobody make more (`MAX_NEST_DEV`, include/linux/netdevice.h).
const DEEPEST: usize = 8;

impl Surroundings<'_> {
    /// Chooses the uplinks: those that `patterns` name, else those that carry a default route or a global
    /// address.
    #[must_use]
    pub fn uplinks(&self, patterns: Option<&[Glob]>) -> Vec<Uplink> {
        let is_chosen = |link: &Link| {
            is_not_ours(link)
                && match patterns {
                    Some(patterns) => patterns.iter().any(|pattern| pattern.matches(&link.name)),
                    None => self.leads_to_the_world(link),
                }
        };
        let chosen: Vec<&Link> = self.links.iter().filter(|link| is_chosen(link)).collect();
        // Who names a part has the whole, if that is an uplink: of this network, or already of another one.
        let wholes = self.wholes(chosen.iter().map(|link| link.index));
        let mut seen = BTreeSet::new();
        chosen
            .into_iter()
            .map(|link| self.whole_of(link, &wholes).unwrap_or(link))
            .filter(|link| seen.insert(link.index))
            .map(|link| Uplink {
                index: link.index,
                name: link.name.clone(),
                device: self.device(link),
                xdp: link.xdp.clone(),
                default_route: self.default_routes(link).next().is_some(),
            })
            .collect()
    }

    /// Lists the devices that are uplinks already, and have become parts of one of these, or of another one that is known: as the ports of a bridge and
    /// the members of a bond do. What comes and goes by a part does so by the whole as well, and what is translated at both becomes another's.
    #[must_use]
    pub fn parts(&self, uplinks: &[Uplink]) -> Vec<&Link> {
        let chosen: Vec<u32> = uplinks.iter().map(|uplink| uplink.index).collect();
        let wholes = self.wholes(chosen.iter().copied());
        let is_part = |link: &&Link| {
            self.known.contains(&link.index)
                && !chosen.contains(&link.index)
                && self.whole_of(link, &wholes).is_some()
        };
        self.links.iter().filter(is_part).collect()
    }

    /// Lists what a device can be a part of: those that were chosen, and the uplinks of whichever network.
    fn wholes(&self, chosen: impl Iterator<Item = u32>) -> Vec<u32> {
        chosen.chain(self.known.iter().copied()).collect()
    }

    /// Finds the outermost one of these of which a device is a part.
    fn whole_of(&self, link: &Link, wholes: &[u32]) -> Option<&Link> {
        let mut outermost = None;
        let mut at = link;
        for _ in 0..DEEPEST {
            // A VRF has no packets of its own.
            let controller = at.controller.filter(|_| !at.in_vrf);
            let whole = self
                .links
                .iter()
                .find(|link| Some(link.index) == controller);
            let Some(whole) = whole else { break };
            if wholes.contains(&whole.index) {
                outermost = Some(whole);
            }
            at = whole;
        }
        outermost
    }

    /// Lists the addresses of dummy devices: kube-proxy in its IPVS mode, and node-local DNS caches, hold
    /// those of Services there. To the kernel they are as local as the node's own.
    #[must_use]
    pub fn service_addresses(&self) -> Vec<IpAddr> {
        self.links
            .iter()
            .filter(|link| link.kind == Some(InfoKind::Dummy))
            .flat_map(|link| self.addresses_of(link))
            .map(|address| address.net.addr())
            .collect()
    }

    /// Names the devices by which routers may be heard: those with a default route or an IPv6 address for a while, as routers give them, and all whose
    /// other end is no guest, container or peer of a tunnel. None of these may become the node's router.
    #[must_use]
    pub fn hear_routers(&self) -> Vec<String> {
        let is_inward = |link: &Link| {
            let kind = link.kind.as_ref();
            link.is_paired()
                || kind.is_some_and(|kind| {
                    matches!(kind, InfoKind::Bridge | InfoKind::Dummy | InfoKind::Tun)
                        || tunnel::is_tunnel(kind)
                })
        };
        let has_heard = |link: &Link| {
            let mut addresses = self.addresses_of(link);
            self.default_routes(link).next().is_some()
                || addresses.any(|address| {
                    address.global && address.has_lifetime && address.net.addr().is_ipv6()
                })
        };
        let hear = self
            .links
            .iter()
            .filter(|link| is_not_ours(link) && (!is_inward(link) || has_heard(link)));
        hear.map(|link| link.name.clone()).collect()
    }

    fn leads_to_the_world(&self, link: &Link) -> bool {
        if self.default_routes(link).next().is_some() {
            return true;
        }
        // Bridges of containers and dummies for Service addresses have global addresses, and
        // nothing behind them.
        let inward = matches!(link.kind, Some(InfoKind::Bridge | InfoKind::Dummy));
        // A veth with host addresses alone is another plugin's way to one container.
        let to_one = |address: &Address| {
            link.is_paired() && address.net.prefix_len() == address.net.max_prefix_len()
        };
        !inward
            && self
                .addresses_of(link)
                .any(|address| address.global && !to_one(address))
    }

    fn device(&self, link: &Link) -> Device {
        let mut flags = 0;
        if !link.ethernet {
            flags |= device::LAYER3;
        }
        if link.kind.as_ref().is_some_and(tunnel::is_datagrams) {
            flags |= device::TUNNEL;
        }
        if self.is_of_a_bridge(link) {
            flags |= device::BRIDGE;
        }
        if link.in_vrf {
            flags |= device::VRF;
        }
        // The larger one counts: 1 is strict, 2 is loose. IPv6 has no such setting, and a firewall that does
        // the same there asks the same question; so the flag counts for both families.
        if self.rp_filter.max(link.rp_filter) == STRICT {
            flags |= device::STRICT_REVERSE_PATH;
        }
        Device {
            flags,
            mtu: link.mtu,
            mac: link.mac.0,
            masquerade4: self.masquerade(link, IpAddr::is_ipv4),
            masquerade6: self.masquerade(link, IpAddr::is_ipv6),
            ..Device::default()
        }
    }

    /// Tells whether what comes by this device came to a port of a bridge first: it is the bridge, or a device that takes
    /// packets from one by their VLAN or their MAC address.
    fn is_of_a_bridge(&self, link: &Link) -> bool {
        let mut at = link;
        for _ in 0..DEEPEST {
            match at.kind {
                Some(InfoKind::Bridge) => return true,
                // What it is made on may be in the namespace that it came from.
                Some(InfoKind::Vlan | InfoKind::MacVlan | InfoKind::IpVlan)
                    if at.peer_netns.is_none() => {}
                _ => return false,
            }
            let Some(lower) = self.links.iter().find(|link| Some(link.index) == at.peer) else {
                return false;
            };
            at = lower;
        }
        false
    }

    /// Finds the address that the kernel would choose as the source of a packet by this link; zero if it
    /// has none.
    fn masquerade(&self, link: &Link, family: fn(&IpAddr) -> bool) -> Addr {
        // Of several default routes the kernel takes the first.
        let best = self
            .default_routes(link)
            .find(|route| family(&route.route.dst.addr()));
        let preferred = best.and_then(|route| route.route.source);
        let first = || {
            self.addresses_of(link)
                .filter(|address| address.global && !address.secondary && !address.unusable)
                .map(|address| address.net.addr())
                .find(family)
        };
        preferred.or_else(first).map(Addr::from).unwrap_or_default()
    }

    fn addresses_of(&self, link: &Link) -> impl Iterator<Item = &Address> {
        let index = link.index;
        self.addresses
            .iter()
            .filter(move |address| address.index == index)
    }

    fn default_routes(&self, link: &Link) -> impl Iterator<Item = &Installed> {
        let index = link.index;
        self.routes.iter().filter(move |route| route.index == index)
    }
}

/// Tells whether a device is neither the loopback device nor an end of ours.
fn is_not_ours(link: &Link) -> bool {
    let ours = Alias::of(link).is_some();
    !link.loopback && !ours
}

/// An MTU that containers inherit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InheritedMtu<'a> {
    /// In bytes.
    pub mtu: u32,
    /// The name of the uplink that has it.
    pub uplink: &'a str,
}

/// Chooses the MTU that containers inherit: the smallest of the uplinks that carry a default route. Where
/// none does, a VPN (`tailscale0` with 1280, `wg0`) must not make all packets small, so devices without
/// Ethernet headers count only if there are no others.
#[must_use]
pub fn inherited_mtu(uplinks: &[Uplink]) -> Option<InheritedMtu<'_>> {
    let smallest = |counts: fn(&Uplink) -> bool| {
        let counting = uplinks.iter().filter(|uplink| counts(uplink));
        counting.min_by_key(|uplink| uplink.device.mtu)
    };
    smallest(|uplink| uplink.default_route)
        .or_else(|| smallest(|uplink| uplink.device.flags & device::LAYER3 == 0))
        .or_else(|| smallest(|_| true))
        .map(|uplink| InheritedMtu {
            mtu: uplink.device.mtu,
            uplink: &uplink.name,
        })
}

#[cfg(test)]
mod tests;

//! The uplinks as they are now.

use std::{collections::BTreeSet, net::IpAddr};

use underpass_abi::{
    endpoint::{Device as Known, device},
    node::Tunnels,
};
use underpass_dataplane::Maps;
use underpass_netlink::{
    Netlink,
    link::{By, Device, Link},
};

use super::{Surroundings, Uplink, is_not_ours, tunnel};
use crate::{conf::Masquerade, error::Error, finding::Finding, glob::Glob};

/// Up to so many devices are asked about one by one, which is cheaper than to have the kernel list what
/// all devices have.
const FEW: usize = 8;

/// The node's uplinks, and what else matters of the devices that belong to no container.
#[derive(Debug)]
pub(crate) struct Uplinks<'a> {
    /// The numbers of all devices of the node, containers' included.
    pub(crate) indices: BTreeSet<u32>,
    /// The numbers of containers' devices that the maps know, and of the network namespaces that these lead to.
    pub(crate) namespaces: Vec<(u32, u32)>,
    pub(crate) list: Vec<Uplink>,
    /// See [`Surroundings::service_addresses`].
    pub(crate) service_addresses: Vec<IpAddr>,
    /// The tunnels that the node is an end of, uplinks or not.
    pub(crate) tunnels: Tunnels,
    /// Devices that were uplinks, and have become [parts](Surroundings::parts) of those since.
    pub(crate) parts: Vec<Device>,
    /// See [`Surroundings::hear_routers`].
    pub(crate) hear_routers: Vec<String>,
    /// The names that were asked for.
    pub(crate) patterns: Option<&'a [Glob]>,
}

impl<'a> Uplinks<'a> {
    /// Looks at these devices as they are now. They are a few among hundreds on a node with hundreds of
    /// containers, and to look at all would be the slowest part of an ADD.
    pub(crate) fn find(
        node: &Netlink,
        maps: &Maps,
        patterns: Option<&'a [Glob]>,
    ) -> Result<Self, Error> {
        Self::look(node, Some(maps), patterns)
    }

    /// The same where nothing may be loaded yet.
    pub(crate) fn look(
        node: &Netlink,
        maps: Option<&Maps>,
        patterns: Option<&'a [Glob]>,
    ) -> Result<Self, Error> {
        let all = node.indices()?;
        let (mut pods, mut uplinks, mut namespaces) = (Vec::new(), Vec::new(), Vec::new());
        if let Some(maps) = maps {
            maps.each_device(|index, entry: &Known| {
                let is_pods = entry.flags & device::POD != 0;
                if !is_pods {
                    uplinks.push(index);
                } else if !entry.is_way() {
                    pods.push(index);
                }
                if entry.netns != 0 {
                    namespaces.push((index, entry.netns));
                }
            })?;
        }
        pods.sort_unstable();
        let others: BTreeSet<u32> = all
            .iter()
            .copied()
            .filter(|index| pods.binary_search(index).is_err())
            .collect();
        let mut links = devices(node, &others, all.len())?;
        // Many ADDs at once make many devices that the maps do not know yet.
        links.retain(is_not_ours);
        let (mut addresses, mut routes) = (Vec::new(), Vec::new());
        if links.len() <= FEW {
            for &Link { index, .. } in &links {
                addresses.extend(node.addresses_on(index)?);
                routes.extend(node.default_routes_by(index)?);
            }
        } else {
            let wanted: BTreeSet<u32> = links.iter().map(|link| link.index).collect();
            addresses = node.addresses_where(|index| wanted.contains(&index))?;
            routes = node.default_routes()?;
        }
        let surroundings = Surroundings {
            links: &links,
            addresses: &addresses,
            routes: &routes,
            rp_filter: node.rp_filter()?,
            known: &uplinks,
        };
        let list = surroundings.uplinks(patterns);
        let parts = surroundings.parts(&list);
        Ok(Self {
            indices: all,
            namespaces,
            parts: parts.into_iter().map(Device::from).collect(),
            list,
            hear_routers: surroundings.hear_routers(),
            service_addresses: surroundings.service_addresses(),
            tunnels: tunnel::tunnels(&links),
            patterns,
        })
    }

    /// Says why nothing is masqueraded, where it should be: uplinks do that, and there is none. Whoever names none has said so.
    pub(crate) fn do_not_masquerade(&self, masquerade: Masquerade) -> Option<Finding> {
        let is_meant = self.patterns.is_some_and(<[Glob]>::is_empty);
        if masquerade == Masquerade::Off || !self.list.is_empty() || is_meant {
            return None;
        }
        let named = self.patterns.unwrap_or_default();
        Some(Finding::NoUplink(
            named.iter().map(ToString::to_string).collect(),
        ))
    }
}

/// Asks about these devices of the node, which has `all` of them.
pub(crate) fn devices(
    node: &Netlink,
    wanted: &BTreeSet<u32>,
    all: usize,
) -> Result<Vec<Link>, Error> {
    // One in a list costs as much as one that is asked for.
    if wanted.len() > FEW.max(all / 2) {
        return Ok(node.links_where(|index| wanted.contains(&index))?);
    }
    let asked = wanted.iter().map(|index| node.link(By::Index(*index)));
    Ok(asked
        .filter_map(Result::transpose)
        .collect::<Result<_, _>>()?)
}

//! Programs on the host's end, and on the uplinks that its packets leave by.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use underpass_abi::endpoint::device;

use super::{link::Pair, route::is_link_local};
use crate::{
    datapath::{
        Error as DatapathError, Maps, Pins,
        attach::{self, Changed, Place},
        lock::Lock,
    },
    error::Error,
    glob::Glob,
    netlink::{
        Netlink,
        link::{By, Link},
        route::MAIN,
    },
    plan::Plan,
    uplink::{Surroundings, Uplink},
};

/// Up to so many devices are asked for one by one, which is cheaper than to list all.
const FEW: usize = 16;

/// What matters of the node's devices that are not its containers'.
#[derive(Debug)]
pub(crate) struct Outward {
    pub(crate) uplinks: Vec<Uplink>,
    /// See [`Surroundings::service_addresses`].
    pub(crate) services: Vec<IpAddr>,
}

/// Looks at the devices as they are now. On a node with hundreds of containers they are a few among
/// hundreds, and to read the others would be the slowest part of an ADD.
pub(crate) fn outward(
    node: &Netlink,
    maps: &Maps,
    patterns: Option<&[Glob]>,
) -> Result<Outward, Error> {
    let mut foreign = Foreign {
        maps,
        known: BTreeMap::new(),
        failure: None,
    };
    let addresses = node.addresses_where(|index| foreign.has(index))?;
    let routes = node.default_routes(MAIN)?;
    let with_address = addresses
        .iter()
        // Nearly every device has an IPv6 address for its link.
        .filter(|address| address.global || !is_link_local(address.net.addr()))
        .map(|address| address.index);
    let with_route = routes.iter().map(|route| route.index);
    let indices: BTreeSet<u32> = with_address
        .chain(with_route)
        .filter(|index| foreign.has(*index))
        .collect();
    if let Some(error) = foreign.failure {
        return Err(error.into());
    }
    let names: Option<Vec<&str>> = patterns
        .unwrap_or_default()
        .iter()
        .map(Glob::name)
        .collect();
    let links = match names {
        Some(names) if indices.len() + names.len() <= FEW => {
            let by_index = indices.iter().map(|index| By::Index(*index));
            look_up(node, by_index.chain(names.into_iter().map(By::Name)))?
        }
        Some(names) if names.is_empty() => node.links_where(|index| indices.contains(&index))?,
        _ => node.links()?,
    };
    let surroundings = Surroundings {
        links: &links,
        addresses: &addresses,
        routes: &routes,
    };
    Ok(Outward {
        uplinks: surroundings.uplinks(patterns),
        services: surroundings.service_addresses(),
    })
}

/// Tells the devices of containers from all others.
struct Foreign<'a> {
    maps: &'a Maps,
    known: BTreeMap<u32, bool>,
    failure: Option<DatapathError>,
}

impl Foreign<'_> {
    /// Whether a device belongs to no container.
    fn has(&mut self, index: u32) -> bool {
        *self.known.entry(index).or_insert_with(|| {
            let entry = self.maps.device(index).unwrap_or_else(|error| {
                self.failure.get_or_insert(error);
                None
            });
            entry.is_none_or(|entry| entry.flags & device::POD == 0)
        })
    }
}

/// The devices that exist, each once.
fn look_up<'a>(node: &Netlink, devices: impl Iterator<Item = By<'a>>) -> Result<Vec<Link>, Error> {
    let mut links = BTreeMap::new();
    for by in devices {
        if let Some(link) = node.link(by)? {
            links.insert(link.index, link);
        }
    }
    Ok(links.into_values().collect())
}

/// Attaches the programs to the host's end, whose map entries exist. They go with the link.
pub(crate) fn apply(node: &Netlink, pins: &Pins, plan: &Plan, pair: &Pair) -> Result<(), Error> {
    attach::attach(node, pins, &pair.host, attach::places(plan.flags))
}

/// Brings the uplinks up to date, if they are not.
pub(crate) fn repair_uplinks(
    node: &Netlink,
    maps: &mut Maps,
    uplinks: &[Uplink],
) -> Result<(), Error> {
    let lock = Lock::acquire(maps.pins().root())?;
    match attach::reconcile_uplinks(&lock, node, maps, uplinks)? {
        Changed::Yes => Ok(maps.raise_epoch()?),
        Changed::No => Ok(()),
    }
}

/// Brings the uplinks up to date, then makes every flow validate itself again: the last change of
/// an ADD to the maps.
pub(crate) fn finish(node: &Netlink, maps: &mut Maps, uplinks: &[Uplink]) -> Result<(), Error> {
    // Nearly always all is well. The kernel answers such questions one after the other, so who asked
    // with the lock in hand would let everybody behind the lock wait for everybody before the kernel.
    let mut wrong = Vec::new();
    verify_uplinks(node, maps, uplinks, &mut wrong)?;
    let lock = Lock::acquire(maps.pins().root())?;
    if !wrong.is_empty() {
        attach::reconcile_uplinks(&lock, node, maps, uplinks)?;
    }
    Ok(maps.raise_epoch()?)
}

/// The programs of the host's end and of the uplinks.
pub(crate) fn verify(
    node: &Netlink,
    maps: &Maps,
    here: &Link,
    uplinks: &[Uplink],
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    detached_from_pod(node, maps, here, wrong)?;
    verify_uplinks(node, maps, uplinks, wrong)
}

/// The programs and map entries of the uplinks.
pub(crate) fn verify_uplinks(
    node: &Netlink,
    maps: &Maps,
    uplinks: &[Uplink],
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    for uplink in uplinks {
        if maps.device(uplink.index)? != Some(uplink.device) {
            wrong.push(format!(
                "the map DEVICES has other addresses, MTU or MAC than the uplink {}: the next ADD or GC corrects it",
                uplink.name
            ));
        }
        let places = attach::places(uplink.device.flags);
        detached(node, maps, uplink.index, &uplink.name, places, wrong)?;
    }
    Ok(())
}

/// Says which programs are not on the host's end of a container's pair, or on its bridge.
pub(crate) fn detached_from_pod(
    node: &Netlink,
    maps: &Maps,
    here: &Link,
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    let known = maps.device(here.index)?;
    let places = attach::places(known.map_or(device::POD, |known| known.flags));
    detached(node, maps, here.index, &here.name, places, wrong)
}

/// Says which programs are not where they belong.
pub(crate) fn detached(
    node: &Netlink,
    maps: &Maps,
    index: u32,
    name: &str,
    places: &[Place],
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    for (_, place) in attach::missing(node, maps.pins(), &[(index, places)])? {
        wrong.push(not_attached(place, name));
    }
    Ok(())
}

/// Says that a program is not where it belongs.
pub(crate) fn not_attached(place: Place, device: &str) -> String {
    format!(
        "program {} is not attached to the {} of {device}",
        place.program,
        place.hook.name()
    )
}

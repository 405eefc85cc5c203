//! Programs on the host's end, and on the uplinks that its packets leave by.

use std::collections::BTreeSet;

use underpass_abi::endpoint::device;

use super::link::Pair;
use crate::{
    datapath::{
        Maps, Pins,
        attach::{self, Changed, Place},
        lock::Lock,
    },
    error::Error,
    glob::Glob,
    netlink::{
        Netlink,
        addr::Address,
        link::{By, Link},
        route::{Installed, MAIN},
    },
    plan::Plan,
    uplink::{Surroundings, Uplink},
};

/// Up to so many devices are asked for one by one, which is cheaper than to list all.
const FEW: usize = 16;

/// The uplinks as they are now.
pub(crate) fn uplinks(
    node: &Netlink,
    maps: &Maps,
    patterns: Option<&[Glob]>,
) -> Result<Vec<Uplink>, Error> {
    let addresses = node.addresses()?;
    let routes = node.routes(MAIN)?;
    let links = match patterns {
        Some(_) => node.links()?,
        None => outward_links(node, maps, &addresses, &routes)?,
    };
    let surroundings = Surroundings {
        links: &links,
        addresses: &addresses,
        routes: &routes,
    };
    Ok(surroundings.uplinks(patterns))
}

/// The devices that may be uplinks for their addresses and routes. On a node with hundreds of
/// containers they are a few among hundreds, and a list of all devices would be the slowest part of
/// an ADD.
fn outward_links(
    node: &Netlink,
    maps: &Maps,
    addresses: &[Address],
    routes: &[Installed],
) -> Result<Vec<Link>, Error> {
    let with_address = addresses
        .iter()
        .filter(|address| address.global)
        .map(|address| address.index);
    let with_route = routes
        .iter()
        .filter(|route| route.route.dst.prefix_len() == 0)
        .map(|route| route.index);
    let indices: BTreeSet<u32> = with_address.chain(with_route).collect();
    let mut foreign = Vec::new();
    for index in indices {
        let entry = maps.device(index)?;
        if entry.is_none_or(|entry| entry.flags & device::POD == 0) {
            foreign.push(index);
        }
    }
    if foreign.len() > FEW {
        return Ok(node.links()?);
    }
    let mut links = Vec::new();
    for index in foreign {
        links.extend(node.link(By::Index(index))?);
    }
    Ok(links)
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

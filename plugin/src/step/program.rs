//! Programs on the host's end, and on the uplinks that its packets leave by.

use std::{collections::BTreeSet, net::IpAddr};

use underpass_abi::endpoint::device;
use underpass_dataplane::{
    Changed, Maps, Pins,
    attach::{self, Place},
    lock::Lock,
    policy::{self, Rules},
};
use underpass_netlink::{
    Netlink,
    link::{By, Link},
    route::MAIN,
};

use super::link::Pair;
use crate::{
    error::Error,
    glob::Glob,
    plan::Plan,
    uplink::{self, Surroundings, Uplink, reconcile},
};

/// Up to so many devices are asked about one by one, which is cheaper than to have the kernel list what
/// all devices have.
const FEW: usize = 8;

/// What matters of the devices that belong to no container.
#[derive(Debug)]
pub(crate) struct Outward {
    pub(crate) uplinks: Vec<Uplink>,
    /// See [`Surroundings::service_addresses`].
    pub(crate) services: Vec<IpAddr>,
}

/// Looks at these devices as they are now. They are a few among hundreds on a node with hundreds of
/// containers, and to look at all would be the slowest part of an ADD.
pub(crate) fn outward(
    node: &Netlink,
    maps: &Maps,
    patterns: Option<&[Glob]>,
) -> Result<Outward, Error> {
    let all = node.indices()?;
    let mut foreign = BTreeSet::new();
    for &index in &all {
        let entry = maps.device(index)?;
        if entry.is_none_or(|entry| entry.flags & device::POD == 0) {
            foreign.insert(index);
        }
    }
    // One in a list costs as much as one that is asked for.
    let mut links = if foreign.len() <= FEW.max(all.len() / 2) {
        let asked = foreign.iter().map(|index| node.link(By::Index(*index)));
        asked
            .filter_map(Result::transpose)
            .collect::<Result<_, _>>()?
    } else {
        node.links_where(|index| foreign.contains(&index))?
    };
    // Many ADDs at once make many devices that the maps do not know yet.
    links.retain(uplink::is_foreign);
    let (mut addresses, mut routes) = (Vec::new(), Vec::new());
    if links.len() <= FEW {
        for &Link { index, .. } in &links {
            addresses.extend(node.addresses_on(index)?);
            let by = node.default_routes(MAIN, Some(index))?.into_iter();
            routes.extend(by.filter(|route| route.index == index));
        }
    } else {
        let wanted: BTreeSet<u32> = links.iter().map(|link| link.index).collect();
        addresses = node.addresses_where(|index| wanted.contains(&index))?;
        routes = node.default_routes(MAIN, None)?;
    }
    let surroundings = Surroundings {
        links: &links,
        addresses: &addresses,
        routes: &routes,
        rp_filter: node.rp_filter()?,
    };
    Ok(Outward {
        uplinks: surroundings.uplinks(patterns),
        services: surroundings.service_addresses(),
    })
}

/// Attaches the programs to the host's end, whose map entries exist. They go with the link.
pub(crate) fn apply(node: &Netlink, pins: &Pins, plan: &Plan, pair: &Pair) -> Result<(), Error> {
    Ok(attach::attach(
        node,
        pins,
        &pair.host,
        attach::places(plan.flags),
    )?)
}

/// Brings the uplinks up to date, if they are not: what there is now.
pub(crate) fn repair_uplinks(
    node: &Netlink,
    maps: &mut Maps,
    patterns: Option<&[Glob]>,
) -> Result<Outward, Error> {
    let lock = Lock::acquire(maps.pins().root())?;
    let outward = outward(node, maps, patterns)?;
    if reconcile::uplinks(&lock, node, maps, &outward.uplinks)? == Changed::Yes {
        maps.raise_epoch()?;
    }
    Ok(outward)
}

/// Brings the uplinks up to date, and what the programs must know of the node's own stack; then makes
/// every flow validate itself again: the last change of an ADD to the maps.
pub(crate) fn finish(
    node: &Netlink,
    maps: &mut Maps,
    patterns: Option<&[Glob]>,
    uplinks: &[Uplink],
) -> Result<(), Error> {
    // Nearly always all is well. The kernel answers such questions one after the other, so who asked
    // with the lock in hand would let everybody behind the lock wait for everybody before the kernel.
    let mut wrong = Vec::new();
    verify_uplinks(node, maps, uplinks, &mut wrong)?;
    let rules = Rules::wanted();
    let lock = Lock::acquire(maps.pins().root())?;
    if !wrong.is_empty() {
        // What this call saw may be older than what another one has written since.
        let outward = outward(node, maps, patterns)?;
        reconcile::uplinks(&lock, node, maps, &outward.uplinks)?;
    }
    policy::set(&lock, maps, rules)?;
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
                "the map DEVICES has other addresses, MTU, MAC or reverse path filter than the uplink {}: the next ADD or GC corrects it",
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

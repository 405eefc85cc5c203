//! Programs on the host's end, and on the uplinks that its packets leave by.

use super::link::Pair;
use crate::glob::Glob;
use crate::{
    datapath::{
        Maps, Pins,
        attach::{self, Changed, POD, Place},
        lock::Lock,
    },
    error::Error,
    netlink::{Netlink, link::Link, route::MAIN},
    uplink::{Surroundings, Uplink},
};

/// The uplinks as they are now.
pub(crate) fn uplinks(node: &Netlink, patterns: Option<&[Glob]>) -> Result<Vec<Uplink>, Error> {
    let surroundings = Surroundings {
        links: &node.links()?,
        addresses: &node.addresses()?,
        routes: &node.routes(MAIN)?,
    };
    Ok(surroundings.uplinks(patterns))
}

/// Attaches the programs to the host's end, whose map entries exist. They go with the link.
pub(crate) fn apply(node: &Netlink, pins: &Pins, pair: Pair) -> Result<(), Error> {
    attach::attach(node, pins, pair.host, POD)
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

/// Brings the uplinks up to date, then makes every flow validate itself again: the last thing that an ADD changes.
pub(crate) fn finish(node: &Netlink, maps: &mut Maps, uplinks: &[Uplink]) -> Result<(), Error> {
    let lock = Lock::acquire(maps.pins().root())?;
    attach::reconcile_uplinks(&lock, node, maps, uplinks)?;
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
    detached(node, maps, here.index, &here.name, POD, wrong)?;
    verify_uplinks(node, maps, uplinks, wrong)
}

/// The programs and map entries of the uplinks.
fn verify_uplinks(
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

/// Says which programs are not where they belong.
pub(crate) fn detached(
    node: &Netlink,
    maps: &Maps,
    index: u32,
    name: &str,
    places: [Place; 2],
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    for place in attach::missing(node, maps.pins(), index, places)? {
        wrong.push(format!(
            "program {} is not attached to the {} of {name}",
            place.program,
            place.direction.name()
        ));
    }
    Ok(())
}

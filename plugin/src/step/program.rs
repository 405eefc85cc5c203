//! Programs on the host's end, and on the uplinks that its packets leave by.

use super::link::Pair;
use crate::glob::Glob;
use crate::{
    datapath::{
        Maps, Pins,
        attach::{self, POD},
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
    for place in attach::missing(node, maps.pins(), here.index, POD)? {
        wrong.push(format!(
            "program {} is not attached to the {} of {}",
            place.program,
            place.direction.name(),
            here.name
        ));
    }
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
                "the map DEVICES has other addresses, MTU or MAC than the uplink {}: the next ADD corrects it",
                uplink.name
            ));
        }
        let places = attach::places(uplink.device.flags);
        for place in attach::missing(node, maps.pins(), uplink.index, places)? {
            wrong.push(format!(
                "program {} is not attached to the {} of the uplink {}",
                place.program,
                place.direction.name(),
                uplink.name
            ));
        }
    }
    Ok(())
}

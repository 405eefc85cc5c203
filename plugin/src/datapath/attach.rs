//! Which program sits where, and how it gets there.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    os::fd::AsFd as _,
};

use underpass_abi::{
    endpoint::{self, Device as Known, device},
    map,
};

use super::{Error as DatapathError, Maps, Pins, lock::Lock};
use crate::{
    error::Error,
    netlink::{Netlink, filter::Direction, link::Device},
    uplink::Uplink,
};

/// A program and its place on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) direction: Direction,
    /// As in [`map::PROGRAMS`].
    pub(crate) program: &'static str,
}

/// What a host veth carries.
pub(crate) const POD: &[Place] = &[
    place(Direction::Ingress, map::FROM_POD),
    place(Direction::Egress, map::TO_POD),
];
const WIRE: &[Place] = &[
    place(Direction::Ingress, map::FROM_WIRE),
    place(Direction::Egress, map::TO_WIRE),
];
const WIRE_L3: &[Place] = &[
    place(Direction::Ingress, map::FROM_WIRE_L3),
    place(Direction::Egress, map::TO_WIRE_L3),
];
/// What the loopback device carries once a host port is mapped.
const LOOPBACK: &[Place] = &[place(Direction::Egress, map::FROM_HOST)];

const fn place(direction: Direction, program: &'static str) -> Place {
    Place { direction, program }
}

/// What a device with those flags carries.
pub(crate) fn places(flags: u32) -> &'static [Place] {
    if flags & device::POD != 0 {
        POD
    } else if flags & device::LOOPBACK != 0 {
        LOOPBACK
    } else if flags & device::LAYER3 != 0 {
        WIRE_L3
    } else {
        WIRE
    }
}

/// Attaches programs to a device, in place of older ones of ours.
pub(crate) fn attach(
    netlink: &Netlink,
    pins: &Pins,
    device: &Device,
    places: &[Place],
) -> Result<(), Error> {
    netlink.add_clsact(device)?;
    for &Place {
        direction,
        program: name,
    } in places
    {
        let program = pins.program(name)?;
        let fd = program.fd().map_err(DatapathError::program(name))?;
        netlink.set_filter(device, direction, fd.as_fd(), &format!("underpass_{name}"))?;
    }
    Ok(())
}

/// Takes our programs off a device, which may be gone.
pub(crate) fn detach(netlink: &Netlink, index: u32) -> Result<(), Error> {
    for direction in [Direction::Ingress, Direction::Egress] {
        netlink.delete_filter(index, direction)?;
    }
    Ok(())
}

/// Devices and the places on them where our program is not, or is another than the pinned one.
pub(crate) fn missing(
    netlink: &Netlink,
    pins: &Pins,
    devices: &[(u32, &[Place])],
) -> Result<Vec<(u32, Place)>, Error> {
    let wanted: Vec<(u32, Place)> = devices
        .iter()
        .flat_map(|&(index, places)| places.iter().map(move |&place| (index, place)))
        .collect();
    let asked: Vec<_> = wanted
        .iter()
        .map(|(index, place)| (*index, place.direction))
        .collect();
    let mut pinned = BTreeMap::new();
    let mut missing = Vec::new();
    for ((index, place), found) in wanted.into_iter().zip(netlink.filter_programs(&asked)?) {
        let id = match pinned.entry(place.program) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(unknown) => *unknown.insert(pins.program(place.program)?.id()),
        };
        if found != Some(id) {
            missing.push((index, place));
        }
    }
    Ok(missing)
}

/// Makes the programs know the uplinks as they are now, and sit on all of them. The caller raises
/// the epoch when this returns [`Changed::Yes`], after everything else that it changes.
pub(crate) fn reconcile_uplinks(
    _lock: &Lock,
    netlink: &Netlink,
    maps: &mut Maps,
    uplinks: &[Uplink],
) -> Result<Changed, Error> {
    let mut changed = Changed::No;
    for uplink in uplinks {
        if maps.device(uplink.index)? != Some(uplink.device) {
            maps.set_device(uplink.index, uplink.device)?;
            changed = Changed::Yes;
        }
        let places = places(uplink.device.flags);
        if !missing(netlink, maps.pins(), &[(uplink.index, places)])?.is_empty() {
            let device = Device {
                index: uplink.index,
                name: uplink.name.clone(),
            };
            attach(netlink, maps.pins(), &device, places)?;
            changed = Changed::Yes;
        }
    }
    Ok(changed)
}

/// Makes the program for processes of the host sit on the loopback device, and the maps know of it.
/// The caller raises the epoch, if anything changed, after everything else that it changes.
pub(crate) fn reconcile_loopback(
    _lock: &Lock,
    netlink: &Netlink,
    maps: &mut Maps,
) -> Result<Changed, Error> {
    let wanted = Known {
        // Never a way of the bypass.
        flags: device::LOOPBACK | device::LAYER3,
        ..Known::default()
    };
    let mut changed = Changed::No;
    if maps.device(endpoint::LOOPBACK)? != Some(wanted) {
        maps.set_device(endpoint::LOOPBACK, wanted)?;
        changed = Changed::Yes;
    }
    let places = places(wanted.flags);
    if !missing(netlink, maps.pins(), &[(endpoint::LOOPBACK, places)])?.is_empty() {
        let device = Device {
            index: endpoint::LOOPBACK,
            name: "lo".to_owned(),
        };
        attach(netlink, maps.pins(), &device, places)?;
        changed = Changed::Yes;
    }
    Ok(changed)
}

/// Whether something was not as it should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Changed {
    Yes,
    No,
}

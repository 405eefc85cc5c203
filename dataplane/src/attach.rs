//! Which program sits where, and how it gets there.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    os::fd::AsFd as _,
};

use underpass_abi::{endpoint::device, map};
use underpass_netlink::{Netlink, filter::Direction, link::Device};

use crate::{Error, Pins, lock::Lock, netkit, object};

/// A hook is a place on a device where a program can sit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hook {
    /// The program is a filter of tc.
    Tc(Direction),
    /// The program sees what the other end of this netkit sends.
    NetkitPeer,
}

impl Hook {
    /// The name that people have for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tc(direction) => direction.name(),
            Self::NetkitPeer => "peer",
        }
    }
}

/// A program and its place on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Where it sits.
    pub hook: Hook,
    /// The program's name, one of [`map::PROGRAMS`].
    pub program: &'static str,
}

/// A host veth carries these programs.
const POD: &[Place] = &[
    place(Direction::Ingress, map::FROM_POD),
    place(Direction::Egress, map::TO_POD),
];
/// The host's end of a netkit pair. What comes from the container could be seen at its ingress as
/// well, but one trip over the CPU's backlog later.
const NETKIT: &[Place] = &[
    Place {
        hook: Hook::NetkitPeer,
        program: map::FROM_POD,
    },
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
/// The loopback device carries this program once a host port is mapped.
const LOOPBACK: &[Place] = &[place(Direction::Egress, map::FROM_HOST)];

const fn place(direction: Direction, program: &'static str) -> Place {
    Place {
        hook: Hook::Tc(direction),
        program,
    }
}

/// Says what a device with those flags carries.
#[must_use]
pub fn places(flags: u32) -> &'static [Place] {
    if flags & device::NETKIT != 0 {
        NETKIT
    } else if flags & device::POD != 0 {
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
pub fn attach(
    netlink: &Netlink,
    pins: &Pins,
    device: &Device,
    places: &[Place],
) -> Result<(), Error> {
    netlink.add_clsact(device)?;
    for &Place {
        hook,
        program: name,
    } in places
    {
        let program = pins.program_fd(name)?;
        let fd = program.as_fd();
        match hook {
            Hook::Tc(direction) => {
                netlink.set_filter(device, direction, fd, &format!("underpass_{name}"))?;
            }
            Hook::NetkitPeer => netkit::attach(device.index, &device.name, fd)?,
        }
    }
    Ok(())
}

/// Attaches programs to a device as [`attach`] does, and loads those that no device needed before.
pub fn load_and_attach(
    lock: &Lock,
    netlink: &Netlink,
    pins: &Pins,
    device: &Device,
    places: &[Place],
) -> Result<(), Error> {
    object::load_missing(lock, pins, places.iter().map(|place| place.program))?;
    attach(netlink, pins, device, places)
}

/// Takes our programs off a device, which may be gone. Returns whether there were any.
pub fn detach(
    netlink: &Netlink,
    pins: &Pins,
    device: &Device,
    places: &[Place],
) -> Result<bool, Error> {
    let mut found = false;
    for &Place {
        hook,
        program: name,
    } in places
    {
        found |= match hook {
            Hook::Tc(direction) => netlink.delete_filter(device.index, direction)?,
            Hook::NetkitPeer => {
                let program = pins.program_fd(name)?;
                netkit::detach(device.index, &device.name, program.as_fd())?
            }
        };
    }
    Ok(found)
}

/// Devices and the places on them where our program is not, or is another than the pinned one.
pub fn missing(
    netlink: &Netlink,
    pins: &Pins,
    devices: &[(u32, &[Place])],
) -> Result<Vec<(u32, Place)>, Error> {
    let mut pinned = BTreeMap::new();
    // None if no device needed that program before.
    let mut id = |program: &'static str| -> Result<Option<u32>, Error> {
        match pinned.entry(program) {
            Entry::Occupied(known) => Ok(*known.get()),
            Entry::Vacant(unknown) if pins.has_program(program) => {
                Ok(*unknown.insert(Some(pins.program(program)?.id())))
            }
            Entry::Vacant(unknown) => Ok(*unknown.insert(None)),
        }
    };
    let mut missing = Vec::new();
    let mut filters = Vec::new();
    let mut directions = Vec::new();
    for &(index, places) in devices {
        for &place in places {
            match place.hook {
                Hook::Tc(direction) => {
                    filters.push((index, place));
                    directions.push((index, direction));
                }
                Hook::NetkitPeer => {
                    let wanted = id(place.program)?;
                    if !netkit::programs(index)?
                        .iter()
                        .any(|found| Some(*found) == wanted)
                    {
                        missing.push((index, place));
                    }
                }
            }
        }
    }
    for ((index, place), found) in filters
        .into_iter()
        .zip(netlink.filter_programs(&directions)?)
    {
        if found.is_none() || found != id(place.program)? {
            missing.push((index, place));
        }
    }
    Ok(missing)
}

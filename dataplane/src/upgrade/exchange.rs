//! Puts the programs of one build into the places of another's, on all devices, and takes that back if it fails.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd as _, OwnedFd},
};

use aya::programs::ProgramInfo;
use underpass_abi::map;
use underpass_netlink::{
    Netlink,
    filter::Direction,
    link::{By, Device, Link},
    xdp::XdpMode,
};

use crate::{Error, Pins, bpf, netkit, pin::Folder, raw_map::RawMap};

/// A set of programs that is pinned.
struct Programs {
    /// Their names, by the kernel's numbers.
    names: BTreeMap<u32, String>,
    open: BTreeMap<String, OwnedFd>,
}

impl Programs {
    fn of(folder: &Folder) -> Result<Self, Error> {
        let (mut names, mut open) = (BTreeMap::new(), BTreeMap::new());
        for name in folder.programs()? {
            let path = folder.program(&name);
            let program = ProgramInfo::from_pin(&path)
                .map_err(io::Error::other)
                .map_err(Error::file("open the pin", &path))?;
            let fd = bpf::open_pin(&path).map_err(Error::file("open the pin", &path))?;
            names.insert(program.id(), name.clone());
            open.insert(name, fd);
        }
        Ok(Self { names, open })
    }
}

/// Where a program sits on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Hook {
    Tc(Direction),
    NetkitPeer,
    Xdp(XdpMode),
}

/// A place on a device that has a program of either build.
struct Place {
    device: Device,
    hook: Hook,
    /// The program that is there.
    id: u32,
}

/// What an upgrade works with once everything is prepared.
pub(super) struct Exchange {
    netlink: Netlink,
    old: Programs,
    new: Programs,
    places: Vec<Place>,
}

impl Exchange {
    pub(super) fn prepare(pins: &Pins, new: &Folder) -> Result<Self, Error> {
        let netlink = Netlink::open()?;
        let (old, new) = (Programs::of(&pins.folder())?, Programs::of(new)?);
        let places = places(&netlink, &old, &new)?;
        Ok(Self {
            netlink,
            old,
            new,
            places,
        })
    }

    /// Puts the programs of the next pins into the places of those that are there, and shows the pins. If that fails, all
    /// is as it was before. Returns how many places there are.
    pub(super) fn take_over(&self, pins: &Pins) -> Result<usize, Error> {
        let mut replaced = Vec::new();
        let exchanged = self
            .replace_all(&mut replaced)
            .and_then(|()| raise_epoch(&pins.next()))
            .and_then(|()| pins.show_next());
        if let Err(error) = exchanged {
            // The first error matters more than what goes wrong here. What can't be taken back is for the next call to end.
            if self.take_back(&replaced) {
                let _ = pins.forget_next();
            }
            return Err(error);
        }
        Ok(self.places.len())
    }

    /// Notes the places that have the new programs, and their names.
    fn replace_all<'a>(&'a self, replaced: &mut Vec<(&'a Place, &'a str)>) -> Result<(), Error> {
        for place in &self.places {
            if let Some(name) = self.new.names.get(&place.id) {
                // By an upgrade that was killed.
                replaced.push((place, name));
            } else if let Some(name) = self.old.names.get(&place.id) {
                self.replace(place, name, &self.old, &self.new)?;
                replaced.push((place, name));
            }
        }
        Ok(())
    }

    /// Puts the old programs back wherever they were. Returns whether all are in their places.
    fn take_back(&self, replaced: &[(&Place, &str)]) -> bool {
        let mut is_done = true;
        for (place, name) in replaced {
            is_done &= self.replace(place, name, &self.new, &self.old).is_ok();
        }
        is_done
    }

    fn replace(
        &self,
        place: &Place,
        name: &str,
        from: &Programs,
        to: &Programs,
    ) -> Result<(), Error> {
        let Place { device, hook, .. } = place;
        let (Some(old), Some(new)) = (from.open.get(name), to.open.get(name)) else {
            return Ok(());
        };
        let (old, new) = (old.as_fd(), new.as_fd());
        let answer = match *hook {
            Hook::Tc(direction) => self
                .netlink
                .set_filter(device, direction, new, &format!("underpass_{name}"))
                .map_err(Error::from),
            Hook::NetkitPeer => netkit::replace(device.index, &device.name, old, new),
            Hook::Xdp(mode) => self
                .netlink
                .replace_xdp(device, mode, old, new)
                .map_err(Error::from),
        };
        match answer {
            // It may have gone meanwhile, as devices do when their container ends.
            Err(_) if self.netlink.link(By::Index(device.index))?.is_none() => Ok(()),
            answer => answer,
        }
    }
}

/// Finds all places that have a program of either set.
fn places(netlink: &Netlink, old: &Programs, new: &Programs) -> Result<Vec<Place>, Error> {
    let links = netlink.links()?;
    let of_tc: Vec<_> = links
        .iter()
        .flat_map(|link| [Direction::Ingress, Direction::Egress].map(|way| (link, way)))
        .collect();
    let asked: Vec<_> = of_tc.iter().map(|(link, way)| (link.index, *way)).collect();
    let mut places = Vec::new();
    let mut note = |link: &Link, hook, id| {
        if old.names.contains_key(&id) || new.names.contains_key(&id) {
            places.push(Place {
                device: link.into(),
                hook,
                id,
            });
        }
    };
    for ((link, way), id) in of_tc.into_iter().zip(netlink.filter_programs(&asked)?) {
        if let Some(id) = id {
            note(link, Hook::Tc(way), id);
        }
    }
    for link in &links {
        if link.is_netkit() {
            for id in netkit::programs(link.index)? {
                note(link, Hook::NetkitPeer, id);
            }
        }
        for attached in &link.xdp {
            note(link, Hook::Xdp(attached.mode), attached.program);
        }
    }
    Ok(places)
}

/// Has every flow validate itself again, by the programs of this build. The epoch is the first word of the state in any layout.
fn raise_epoch(folder: &Folder) -> Result<(), Error> {
    // Who ends another build's upgrade may know the map by another layout.
    let path = folder.any_map(map::STATE)?;
    let raise = || -> io::Result<()> {
        let state = RawMap::open(&path)?;
        let key = 0_u32.to_ne_bytes();
        let mut value = state.value(&key)?;
        if let Some(word) = value.first_chunk_mut::<{ size_of::<u32>() }>() {
            let epoch = u32::from_ne_bytes(*word).checked_add(1).unwrap_or(1);
            *word = epoch.to_ne_bytes();
        }
        state.set_value(&key, &value)
    };
    raise().map_err(Error::file("change the map", &path))
}

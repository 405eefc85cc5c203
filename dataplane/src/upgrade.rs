//! Has this build take over what another one has loaded, while containers are attached and traffic goes on.
//!
//! The programs of this build are loaded beside those that run, with the same maps: connections, ports and addresses stay where
//! they are. Maps whose values have grown or shrunk are copied, as far as user space alone writes them ([`Content`]). Then each program
//! is put into the place of its namesake; the kernel exchanges it between two packets. The new pins are shown last.
//!
//! Nobody else has maps open meanwhile ([`Use`]). What is to come is complete, as `next-v<ABI>`, before the first program is exchanged,
//! so that the next call ends an upgrade that was killed.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    sync::Arc,
};

use aya::{maps::MapInfo, programs::ProgramInfo};
use underpass_abi::{
    map::{self, Content, Pinned},
    node::Node,
};
use underpass_netlink::{
    Netlink,
    filter::Direction,
    link::{By, Device, Link},
    xdp::XdpMode,
};

use crate::{
    Error, Loaded, Pins, bpf, feature, home,
    layout::Layout,
    lock::{Lock, Use},
    netkit,
    object::{self, build},
    pin::{Folder, Pin},
};

/// What an upgrade came to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Nothing is loaded: the next ADD loads this build.
    NotLoaded,
    /// This build is what is loaded.
    Same,
    /// This build has taken over.
    Done(Report),
}

/// What an upgrade has done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The build before, as in [`Node::build`].
    pub from: u32,
    /// Programs that are loaded now.
    pub programs: usize,
    /// Places on devices where a program was exchanged.
    pub places: usize,
    /// Maps whose entries were copied.
    pub copied: Vec<&'static str>,
    /// Maps that begin empty.
    pub dropped: Vec<&'static str>,
}

/// Has this build take over what is pinned below `root`, for the calling thread's network namespace. Changes nothing if it fails.
pub fn run(root: &Path) -> Result<Outcome, Error> {
    let pins = Pins::at(root);
    let _alone = Use::alone(root)?;
    let _lock = Lock::acquire(root)?;
    end(&pins)?;
    if pins.pinned()? != Loaded::Here {
        return match pins.layouts()?.into_iter().find(Layout::is_other) {
            None => Ok(Outcome::NotLoaded),
            Some(other) => Err(refused(
                &pins,
                format!(
                    "it is of layout {}, whose maps it does not know",
                    other.number()
                ),
            )),
        };
    }
    let _shared = pins.lock()?;
    let fates = fates(&pins)?;
    let before = constants(&pins, &fates)?;
    if before.build == build() && fates.iter().all(|(_, fate)| *fate == Fate::Shared) {
        return Ok(Outcome::Same);
    }
    object::require_loadable()?;
    let programs = programs(&pins)?;
    let node = Node {
        build: build(),
        features: feature::present()?,
        ..before
    };
    let unfinished = pins.begin()?;
    if let Err(error) = prepare(&pins, unfinished.folder(), &fates, node, &programs) {
        unfinished.abandon();
        return Err(error);
    }
    unfinished.complete_as_next(&pins)?;
    let places = take_over(&pins)?;
    let with = |wanted: fn(&Fate) -> bool| {
        let found = fates.iter().filter(|(_, fate)| wanted(fate));
        found.map(|(map, _)| map.name).collect()
    };
    Ok(Outcome::Done(Report {
        from: before.build,
        programs: programs.len(),
        places,
        copied: with(|fate| matches!(fate, Fate::Copied(_))),
        dropped: with(|fate| *fate == Fate::Dropped),
    }))
}

/// Ends an upgrade that was killed, if one was. Who holds maps open does not come here.
pub fn settle(pins: &Pins) -> Result<(), Error> {
    settled(pins).map(drop)
}

/// Waits for an upgrade that is running, ends one that was killed, and keeps later ones waiting.
pub(crate) fn settled(pins: &Pins) -> Result<Arc<Use>, Error> {
    let shared = Use::shared(pins.root())?;
    if !pins.next().exists() {
        return Ok(shared);
    }
    drop(shared);
    let alone = Use::alone(pins.root())?;
    let lock = Lock::acquire(pins.root())?;
    end(pins)?;
    drop((lock, alone));
    Use::shared(pins.root())
}

/// Ends an upgrade that was killed, if one was for the calling thread's network namespace.
fn end(pins: &Pins) -> Result<(), Error> {
    // To look at what is pinned may end it.
    let is_killed =
        pins.next().exists() && matches!(pins.pinned(), Ok(Loaded::Here)) && pins.next().exists();
    if is_killed {
        take_over(pins).map(drop)
    } else {
        Ok(())
    }
}

/// What becomes of a map.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Fate {
    /// Both builds know its entries.
    Shared,
    /// Its entries are copied from the map that has this pin.
    Copied(Pin),
    /// It begins empty.
    Dropped,
}

/// Says what becomes of each map of this build, or that it can't take over.
fn fates(pins: &Pins) -> Result<Vec<(&'static Pinned, Fate)>, Error> {
    let there = pins.folder().maps()?;
    let mut fates = Vec::new();
    for map in map::MAPS {
        let old = there.iter().find(|pin| pin.name == map.name);
        let fate = match (old, map.content) {
            (Some(pin), _) if pin.is(map) => Fate::Shared,
            // A map that the other build has not: what it is for begins with this one.
            (_, Content::Dropped) | (None, Content::Copied) => Fate::Dropped,
            (Some(pin), Content::Copied) if pin.layout == map.layout => Fate::Copied(pin.clone()),
            (Some(pin), _) => {
                return Err(refused(
                    pins,
                    format!("its map is {pin}, and would have to be {map}"),
                ));
            }
            (None, Content::Needed) => {
                return Err(refused(pins, format!("it has no map {}", map.name)));
            }
        };
        fates.push((map, fate));
    }
    Ok(fates)
}

fn refused(pins: &Pins, reason: String) -> Error {
    Error::NotUpgradable {
        root: pins.root().to_owned(),
        reason,
    }
}

/// Reads what the programs were loaded with.
fn constants(pins: &Pins, fates: &[(&'static Pinned, Fate)]) -> Result<Node, Error> {
    let path = match fates.iter().find(|(map, _)| map.name == map::CONSTANTS) {
        Some((_, Fate::Copied(pin))) => pins.folder().pin(pin),
        _ => pins.folder().map(map::CONSTANTS),
    };
    let read = || -> io::Result<Node> {
        let mut bytes = bpf::value(&bpf::open_pin(&path)?, &0_u32.to_ne_bytes(), info(&path)?.1)?;
        bytes.resize(size_of::<Node>(), 0);
        // SAFETY: there are as many bytes as the type has, and any bytes are a value of it.
        Ok(unsafe { bytes.as_ptr().cast::<Node>().read_unaligned() })
    };
    read().map_err(Error::file("read the map", &path))
}

/// Lists the programs that are loaded. Fails if this build lacks one of them.
fn programs(pins: &Pins) -> Result<Vec<&'static str>, Error> {
    let mut programs = Vec::new();
    for name in pins.folder().programs()? {
        match map::PROGRAMS.iter().find(|known| **known == name) {
            Some(known) => programs.push(*known),
            None => return Err(refused(pins, format!("it has no program {name}"))),
        }
    }
    for name in map::USUAL_PROGRAMS {
        if !programs.contains(name) {
            programs.push(name);
        }
    }
    Ok(programs)
}

/// Makes the pins of this build, in a folder that nobody sees.
fn prepare(
    pins: &Pins,
    folder: &Folder,
    fates: &[(&'static Pinned, Fate)],
    node: Node,
    programs: &[&'static str],
) -> Result<(), Error> {
    home::pin(&folder.home())?;
    let old = pins.folder();
    for (map, fate) in fates {
        // It says which build it is of, so each has its own.
        if *fate == Fate::Shared && map.name != map::CONSTANTS {
            let (from, to) = (old.map(map.name), folder.map(map.name));
            bpf::open_pin(&from)
                .and_then(|map| bpf::pin(map, &to))
                .map_err(Error::file("pin again the map", &from))?;
        }
    }
    let mut object = object::parse(&node, folder)?;
    for (map, fate) in fates {
        if let Fate::Copied(pin) = fate {
            let (from, to) = (old.pin(pin), folder.map(map.name));
            copy(&from, &to).map_err(Error::file("copy the map", &from))?;
        }
    }
    object::fill(&mut object, map::CONSTANTS, node)?;
    object::load_programs(&mut object, programs, folder)
}

/// Copies all entries of a map that nobody changes. Values become as long as those of the other map: what is appended is zero.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let (key_size, old_size) = info(from)?;
    let (_, new_size) = info(to)?;
    let (from, to) = (bpf::open_pin(from)?, bpf::open_pin(to)?);
    for key in bpf::keys(&from, key_size)? {
        let mut value = match bpf::value(&from, &key, old_size) {
            // The kernel takes devices that go out of the maps of devices.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            value => value?,
        };
        value.resize(new_size, 0);
        bpf::set_value(&to, &key, &mut value)?;
    }
    Ok(())
}

/// Asks for the bytes of a pinned map's keys and values.
fn info(path: &Path) -> io::Result<(usize, usize)> {
    let info = MapInfo::from_pin(path).map_err(io::Error::other)?;
    Ok((info.key_size() as usize, info.value_size() as usize))
}

/// A set of programs that is pinned.
struct Programs {
    folder: Folder,
    /// Their names, by the kernel's numbers.
    names: BTreeMap<u32, String>,
}

impl Programs {
    fn of(folder: Folder) -> Result<Self, Error> {
        let mut names = BTreeMap::new();
        for name in folder.programs()? {
            let path = folder.program(&name);
            let program = ProgramInfo::from_pin(&path)
                .map_err(io::Error::other)
                .map_err(Error::file("open the pin", &path))?;
            names.insert(program.id(), name);
        }
        Ok(Self { folder, names })
    }

    fn open(&self, name: &str) -> Result<OwnedFd, Error> {
        let path = self.folder.program(name);
        bpf::open_pin(&path).map_err(Error::file("open the pin", &path))
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

/// Puts the programs of the next pins into the places of those that are there, and shows the pins. If that fails, all
/// is as it was before. Returns how many places there are.
fn take_over(pins: &Pins) -> Result<usize, Error> {
    let netlink = Netlink::open()?;
    let (old, new) = (Programs::of(pins.folder())?, Programs::of(pins.next())?);
    let exchanged = exchange(&netlink, &old, &new)
        .and_then(|places| raise_epoch(&pins.next()).map(|()| places))
        .and_then(|places| pins.show_next().map(|()| places));
    if exchanged.is_err() {
        // The first error matters more than what goes wrong here.
        if exchange(&netlink, &new, &old).is_ok() {
            let _ = pins.forget_next();
        }
    }
    exchanged
}

/// Replaces the programs of one set by those of another, wherever they sit. Those that are there already stay.
fn exchange(netlink: &Netlink, old: &Programs, new: &Programs) -> Result<usize, Error> {
    let places = places(netlink, old, new)?;
    for place in &places {
        let Some(name) = old.names.get(&place.id) else {
            continue;
        };
        let answer = replace(netlink, place, name, &old.open(name)?, &new.open(name)?);
        if let Err(error) = answer {
            // It may have gone meanwhile, as devices do when their container ends.
            if netlink.link(By::Index(place.device.index))?.is_some() {
                return Err(error);
            }
        }
    }
    Ok(places.len())
}

fn replace(
    netlink: &Netlink,
    place: &Place,
    name: &str,
    old: &OwnedFd,
    new: &OwnedFd,
) -> Result<(), Error> {
    let Place { device, hook, .. } = place;
    let (old, new) = (old.as_fd(), new.as_fd());
    match *hook {
        Hook::Tc(direction) => {
            netlink.set_filter(device, direction, new, &format!("underpass_{name}"))?;
        }
        Hook::NetkitPeer => netkit::replace(device.index, &device.name, old, new)?,
        Hook::Xdp(mode) => netlink.replace_xdp(device, mode, old, new)?,
    }
    Ok(())
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
    let path = folder.map(map::STATE);
    let raise = || -> io::Result<()> {
        let state = bpf::open_pin(&path)?;
        let key = 0_u32.to_ne_bytes();
        let mut value = bpf::value(&state, &key, info(&path)?.1)?;
        if let Some(word) = value.first_chunk_mut::<{ size_of::<u32>() }>() {
            let epoch = u32::from_ne_bytes(*word).checked_add(1).unwrap_or(1);
            *word = epoch.to_ne_bytes();
        }
        bpf::set_value(&state, &key, &mut value)
    };
    raise().map_err(Error::file("change the map", &path))
}

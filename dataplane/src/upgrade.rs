//! Has this build take over what another one has loaded, while containers are attached and traffic goes on.
//!
//! The programs of this build are loaded beside those that run, with the same maps: connections, ports and addresses stay where
//! they are. Maps whose values have grown or shrunk are copied, as far as user space alone writes them ([`Content`]). Then each program
//! is put into the place of its namesake; the kernel exchanges it between two packets. The new pins are shown last.
//!
//! Nobody else has maps open meanwhile ([`Use`]). What is to come is complete, as `next-v<ABI>`, before the first program is exchanged,
//! so that the next call ends an upgrade that was killed.

use std::{io, path::Path, sync::Arc};

use underpass_abi::{
    map::{self, Content, Pinned},
    node::Node,
};

use crate::{
    Error, Loaded, Pins, bpf, feature, home,
    layout::Layout,
    lock::{Lock, Order, Use},
    object::{self, build},
    pin::{Folder, Pin},
    raw_map::RawMap,
};

mod exchange;

use exchange::Exchange;

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
    if let Some(outcome) = look(&pins)? {
        return Ok(outcome);
    }
    let _alone = Use::alone(root, || {})?;
    let _lock = Lock::acquire(root)?;
    end(&pins)?;
    // Where there is nothing no folder is made for the lock.
    let _shared = match pins.pinned()? {
        Loaded::Here => Some(pins.lock()?),
        _ => None,
    };
    let Exchangeable {
        fates,
        before,
        programs,
    } = match need(&pins)? {
        Need::Nothing(outcome) => return Ok(outcome),
        Need::Exchange(exchangeable) => exchangeable,
    };
    object::require_loadable(0)?;
    let features = feature::present()?;
    let node = Node {
        build: build(),
        features,
        // An earlier build may have known fewer of them; 0 would be none.
        timeout: Node::new(
            object::jiffies_per_second(),
            before.key,
            features,
            before.flows,
        )
        .timeout,
        ..before
    };
    let unfinished = pins.begin()?;
    let prepared = prepare(&pins, unfinished.folder(), &fates, node, &programs)
        .and_then(|()| Exchange::prepare(&pins, unfinished.folder()));
    let exchange = match prepared {
        Ok(exchange) => exchange,
        Err(error) => {
            unfinished.abandon();
            return Err(error);
        }
    };
    unfinished.complete_as_next(&pins)?;
    let places = exchange.take_over(&pins)?;
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

/// Looks while calls go on: none has to wait for an upgrade that has nothing to do, or is refused. Says nothing where only who is alone
/// can tell.
fn look(pins: &Pins) -> Result<Option<Outcome>, Error> {
    // Beside another upgrade there is nothing to be seen yet.
    let Some(_calls) = Use::glance(pins.root())? else {
        return Ok(None);
    };
    if pins.next().exists() {
        return Ok(None);
    }
    match need(pins) {
        Ok(Need::Nothing(Outcome::Same)) => Ok(Some(Outcome::Same)),
        // Of pins that somebody removes meanwhile some were missing.
        Err(refused @ Error::NotUpgradable { .. })
            if matches!(need(pins), Err(Error::NotUpgradable { .. })) =>
        {
            Err(refused)
        }
        Ok(Need::Exchange(_)) => object::require_loadable(0).map(|()| None),
        // A call may be about to load another build.
        Ok(_) | Err(_) => Ok(None),
    }
}

/// What there is to do.
enum Need {
    /// Nothing.
    Nothing(Outcome),
    /// To exchange the programs.
    Exchange(Exchangeable),
}

/// What is known of the programs that are to be exchanged.
struct Exchangeable {
    /// What becomes of each map.
    fates: Vec<(&'static Pinned, Fate)>,
    /// What the programs of before were loaded with.
    before: Node,
    /// Which are to be loaded.
    programs: Vec<&'static str>,
}

/// Says what there is to do, or that this build can't take over.
fn need(pins: &Pins) -> Result<Need, Error> {
    if pins.pinned()? != Loaded::Here {
        return match pins.layouts()?.into_iter().find(Layout::is_other) {
            None => Ok(Need::Nothing(Outcome::NotLoaded)),
            Some(other) => Err(refused(
                pins,
                format!(
                    "it is of layout {}, whose maps it does not know",
                    other.number()
                ),
            )),
        };
    }
    let fates = fates(pins)?;
    let before = constants(pins)?;
    let is_same = before.build == build() && fates.iter().all(|(_, fate)| *fate == Fate::Shared);
    Ok(if is_same {
        Need::Nothing(Outcome::Same)
    } else {
        Need::Exchange(Exchangeable {
            fates,
            before,
            programs: programs(pins)?,
        })
    })
}

/// Ends an upgrade that was killed, if one was. Who holds maps open does not come here.
pub fn settle(pins: &Pins) -> Result<(), Error> {
    settled(pins).map(drop)
}

/// Waits for an upgrade that is running, ends one that was killed, and keeps later ones waiting.
pub(crate) fn settled(pins: &Pins) -> Result<Arc<Use>, Error> {
    let (shared, order) = Use::shared(pins.root())?;
    // Who has maps open already would wait for itself.
    if order == Order::Later || !pins.next().exists() {
        return Ok(shared);
    }
    drop(shared);
    let alone = Use::alone(pins.root(), || {})?;
    let lock = Lock::acquire(pins.root())?;
    end(pins)?;
    drop((lock, alone));
    Ok(Use::shared(pins.root())?.0)
}

/// Ends an upgrade that was killed, if one was for the calling thread's network namespace.
fn end(pins: &Pins) -> Result<(), Error> {
    // To look at what is pinned may end it.
    let is_killed =
        pins.next().exists() && matches!(pins.pinned(), Ok(Loaded::Here)) && pins.next().exists();
    if is_killed {
        let _shared = pins.lock()?;
        Exchange::prepare(pins, &pins.next())?.take_over(pins)?;
    }
    Ok(())
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
            (_, Content::Dropped) => Fate::Dropped,
            (Some(pin), Content::Copied) if pin.layout == map.layout => Fate::Copied(pin.clone()),
            (Some(pin), _) => {
                return Err(refused(
                    pins,
                    format!("its map is {pin}, and would have to be {map}"),
                ));
            }
            (None, _) => {
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
fn constants(pins: &Pins) -> Result<Node, Error> {
    let path = pins.folder().any_map(map::CONSTANTS)?;
    let read = || -> io::Result<Node> {
        let mut bytes = RawMap::open(&path)?.value(&0_u32.to_ne_bytes())?;
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
    let (from, to) = (RawMap::open(from)?, RawMap::open(to)?);
    for key in from.keys()? {
        let mut value = match from.value(&key) {
            // The kernel takes devices that go out of the maps of devices.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            value => value?,
        };
        value.resize(to.value_size()?, 0);
        to.set_value(&key, &value)?;
    }
    Ok(())
}

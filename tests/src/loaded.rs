//! Maps and programs that were loaded before the test: the verifier takes a second and a half for those of a node, in an emulated machine
//! more than the rest of the test does.
//!
//! `cargo xtask test` names a folder for sets of them. A [`Node`] gets one that nobody holds, emptied, as its own pins, and holds it while it
//! lives. A test that finds none, or only such that were just given back, leaves what its node has loaded in an empty place: the kernel may
//! still be taking away the devices of the test that had a set before. Once no place is empty it takes the set that was used longest ago. In an
//! emulated machine, where to load takes ten seconds and more, it waits for that one instead.

use std::{
    collections::BTreeSet,
    env,
    fs::{self, File},
    io,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    thread,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result};
use aya::{
    maps::{Array, Map, MapData, MapInfo, MapType, PerCpuArray, PerCpuValues, RingBuf},
    programs::ProgramInfo,
};
use nix::fcntl::{Flock, FlockArg};
use underpass_abi::{ABI, counter::Counter, map, node::State};
use underpass_dataplane::{Pins, bpf, raw_map::RawMap};

use crate::{netns::Netns, node::Node, patience};

/// The folder of the sets, on a bpffs.
const VARIABLE: &str = "UNDERPASS_TEST_LOADED";

/// How many sets there are at most. A node that finds all of them held loads its own.
const SETS: usize = 12;

/// How long after a test its set is rather left alone than given to the next. A network namespace is taken away a moment after its last
/// process, in an emulated machine a second or two.
const REST: Duration = Duration::from_secs(4);

/// A set that nobody else uses while this is held.
#[derive(Debug)]
pub(crate) struct Set {
    folder: PathBuf,
    _lock: Flock<File>,
}

/// Gives a set to a node, if there are any.
pub(crate) fn lend(node: &Node) -> Result<Option<Set>> {
    let Some(folder) = env::var_os(VARIABLE) else {
        return Ok(None);
    };
    let version = format!("v{ABI}");
    let Some(set) = Set::hold(Path::new(&folder), &version)? else {
        return Ok(None);
    };
    let pins = set.folder.join(&version);
    let root = node.bpf_root();
    if pins.exists() {
        give(&pins, node.netns(), root)?;
        return Ok(Some(set));
    }
    node.underpass(&["load"])?;
    let objects = node.netns().run(|| objects(&root.join(version)))?;
    // Whoever is killed leaves no set that is not whole.
    let unfinished = set.folder.join("unfinished");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)?;
    }
    pin_all(&unfinished, &objects)?;
    fs::rename(&unfinished, pins)?;
    Ok(Some(set))
}

impl Set {
    /// Takes a set that nobody holds, or a place for one. `version` is the folder of its pins.
    fn hold(folder: &Path, version: &str) -> Result<Option<Self>> {
        let now = SystemTime::now();
        let mut sets = (0..SETS)
            .map(|number| {
                let set = folder.join(number.to_string());
                match fs::create_dir(&set) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
                    _ => {
                        let used = fs::metadata(&set)?.modified()?;
                        let is_slow = patience::factor() > 1;
                        let turn = turn(set.join(version).exists(), used, now, is_slow);
                        Ok((turn, used, set))
                    }
                }
            })
            .collect::<Result<Vec<_>, _>>()
            .with_context(|| format!("list the sets in {}", folder.display()))?;
        sets.sort();
        for (turn, used, set) in sets {
            if let Ok(lock) = Flock::lock(File::open(&set)?, FlockArg::LockExclusiveNonblock) {
                let held = Self {
                    folder: set,
                    _lock: lock,
                };
                held.used()?;
                if turn == Turn::Resting {
                    thread::sleep(REST.saturating_sub(used.elapsed().unwrap_or_default()));
                }
                return Ok(Some(held));
            }
        }
        Ok(None)
    }

    /// Notes the time, for who chooses.
    fn used(&self) -> io::Result<()> {
        File::open(&self.folder)?.set_modified(SystemTime::now())
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        // The order of sets is all that this is for.
        let _ = self.used();
    }
}

/// When a set comes before others.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    Rested,
    /// Used just now, on a machine that had better wait.
    Resting,
    Empty,
    JustUsed,
}

fn turn(loaded: bool, used: SystemTime, now: SystemTime, is_slow: bool) -> Turn {
    let rested = now.duration_since(used).is_ok_and(|unused| unused >= REST);
    match (loaded, rested) {
        (false, _) => Turn::Empty,
        (true, true) => Turn::Rested,
        (true, false) if is_slow => Turn::Resting,
        (true, false) => Turn::JustUsed,
    }
}

/// Has a node use what is pinned, emptied.
fn give(pins: &Path, netns: &Netns, root: &Path) -> Result<()> {
    // The node has a bpffs of its own, from which this one is not seen.
    let objects = objects(pins)?;
    let mut maps = BTreeSet::new();
    for map in map::MAPS {
        let pin = pins.join("maps").join(map.to_string());
        maps.insert(MapInfo::from_pin(pin)?.id());
    }
    for name in map::PROGRAMS {
        // Some maps are known to programs alone.
        let program = ProgramInfo::from_pin(pins.join("programs").join(name))?;
        let known = program.map_ids()?;
        maps.extend(known.context("the kernel does not tell the maps of a program")?);
    }
    for id in maps {
        let map = MapData::from_id(id)?;
        let name = map.info()?.name_as_str().unwrap_or_default().to_owned();
        empty(map, &name).with_context(|| format!("empty {name}"))?;
    }
    netns.run(|| -> Result<()> {
        pin_all(&root.join(format!("v{ABI}")), &objects)?;
        Ok(Pins::at(root).settle()?)
    })
}

/// Opens all that is pinned in a folder, by its path below that.
fn objects(pins: &Path) -> Result<Vec<(PathBuf, OwnedFd)>> {
    let maps = map::MAPS
        .iter()
        .map(|map| Path::new("maps").join(map.to_string()));
    let programs = map::PROGRAMS
        .iter()
        .map(|name| Path::new("programs").join(name));
    maps.chain(programs)
        .map(|name| Ok((name.clone(), open(&pins.join(name))?)))
        .collect()
}

fn open(pin: &Path) -> Result<OwnedFd> {
    bpf::open_pin(pin).with_context(|| format!("use the pin {}", pin.display()))
}

fn pin_all(pins: &Path, objects: &[(PathBuf, OwnedFd)]) -> Result<()> {
    for folder in ["maps", "programs"] {
        let folder = pins.join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    }
    for (name, object) in objects {
        bpf::pin(object, &pins.join(name))
            .with_context(|| format!("pin {} to {}", name.display(), pins.display()))?;
    }
    Ok(())
}

/// Makes a map what it was when it had just been loaded.
fn empty(data: MapData, name: &str) -> Result<()> {
    let info = data.info()?;
    match (info.map_type()?, name) {
        (MapType::Array, map::STATE) => {
            let mut state: Array<_, State> = Map::Array(data).try_into()?;
            let loaded = state.get(&0, 0)?;
            let fresh = State {
                epoch: 1,
                trace: 0,
                ..loaded
            };
            state.set(0, fresh, 0)?;
        }
        (MapType::PerCpuArray, map::COUNTERS) => {
            let mut counters: PerCpuArray<_, u64> = Map::PerCpuArray(data).try_into()?;
            let zeros = vec![0; aya::util::nr_cpus().map_err(|(_, error)| error)?];
            for &counter in Counter::ALL {
                counters.set(counter as u32, PerCpuValues::try_from(zeros.clone())?, 0)?;
            }
        }
        // Constants, keys that lead nowhere once their flows are gone, and what a program writes before it reads
        // it.
        (MapType::Array | MapType::PerCpuArray, _) => {}
        (MapType::RingBuf, _) => {
            let mut records: RingBuf<_> = Map::RingBuf(data).try_into()?;
            while records.next().is_some() {}
        }
        _ => RawMap::of(data.fd().as_fd().try_clone_to_owned()?)?.remove_all()?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_loaded_while_a_set_has_rested() {
        let now = SystemTime::UNIX_EPOCH + REST;
        let just_used = turn(true, now, now, false);
        let empty = turn(false, now, now, false);
        let rested = turn(true, now - REST, now, false);
        assert!(rested < empty && empty < just_used);
        // A clock that was set back.
        assert_eq!(turn(true, now + REST, now, false), Turn::JustUsed);
        let resting = turn(true, now, now, true);
        assert!(rested < resting && resting < empty);
        assert_eq!(turn(true, now - REST, now, true), rested);
    }
}

//! Maps and programs that were loaded before the test, for machines where the verifier takes most of a test's time.
//!
//! `cargo xtask test vm` loads a few sets of them in a guest and names one to each test. A [`Node`](crate::Node) gets that set, emptied, as
//! its own pins. Sets go round, so the devices of the test before, which the kernel may still be taking away, have another.

use std::{
    collections::BTreeSet,
    env, fs,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context as _, Result};
use aya::{
    maps::{Array, Map, MapData, MapInfo, MapType, PerCpuArray, PerCpuValues, RingBuf},
    programs::ProgramInfo,
};
use underpass_abi::{ABI, counter::Counter, map, node::State};
use underpass_dataplane::{Pins, bpf};

use crate::netns::Netns;

/// `bpfRoot` of a set that no other test uses at the same time.
const VARIABLE: &str = "UNDERPASS_TEST_LOADED";

/// Gives the set to a node whose `bpfRoot` is `root`. Does nothing if there is none, or this process has given it away before.
pub(crate) fn lend(netns: &Netns, root: &Path) -> Result<()> {
    static LENT: AtomicBool = AtomicBool::new(false);
    let Some(set) = env::var_os(VARIABLE) else {
        return Ok(());
    };
    if LENT.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    let version = format!("v{ABI}");
    let pins = Path::new(&set).join(&version);
    // The node has a bpffs of its own, from which this one is not seen.
    let mut objects = Vec::new();
    let mut maps = BTreeSet::new();
    for map in map::MAPS {
        let name = Path::new("maps").join(map.to_string());
        objects.push((name.clone(), open(&pins.join(&name))?));
        maps.insert(MapInfo::from_pin(pins.join(name))?.id());
    }
    for name in map::PROGRAMS {
        let name = Path::new("programs").join(name);
        objects.push((name.clone(), open(&pins.join(&name))?));
        // Some maps are known to programs alone.
        let known = ProgramInfo::from_pin(pins.join(name))?.map_ids()?;
        maps.extend(known.context("the kernel does not tell the maps of a program")?);
    }
    for id in maps {
        let map = MapData::from_id(id)?;
        let name = map.info()?.name_as_str().unwrap_or_default().to_owned();
        empty(map, &name).with_context(|| format!("empty {name}"))?;
    }
    netns.run(|| -> Result<()> {
        pin_all(&root.join(version), &objects)?;
        Ok(Pins::at(root).settle()?)
    })
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
        _ => bpf::remove_all(data.fd().as_fd(), info.key_size() as usize)?,
    }
    Ok(())
}

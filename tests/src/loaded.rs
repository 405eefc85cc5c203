//! Maps and programs that were loaded before the test, for machines where the verifier takes most of a test's time.
//!
//! `cargo xtask test vm` loads a few sets of them in a guest and names one to each test. A [`Node`](crate::Node) gets that set, emptied, as
//! its own pins. Sets go round, so the devices of the test before, which the kernel may still be taking away, have another.

use std::{
    env, fs,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context as _, Result};
use aya::maps::{Array, Map, MapData, MapType, PerCpuArray, PerCpuValues, RingBuf};
use underpass_abi::{ABI, counter::Counter, map, node::State};

use crate::{netns::Netns, program};

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
    for (folder, names) in [("maps", map::MAPS), ("programs", map::PROGRAMS)] {
        for name in names {
            let name = Path::new(folder).join(name);
            let object = program::open_pin(&pins.join(&name))
                .with_context(|| format!("open {} of {}", name.display(), pins.display()))?;
            objects.push((name, object));
        }
    }
    for name in map::MAPS {
        empty(&pins.join("maps").join(name)).with_context(|| format!("empty {name}"))?;
    }
    netns.run(|| pin_all(&root.join(version), &objects))
}

fn pin_all(pins: &Path, objects: &[(PathBuf, OwnedFd)]) -> Result<()> {
    for folder in ["maps", "programs"] {
        let folder = pins.join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    }
    for (name, object) in objects {
        program::pin_again(object, &pins.join(name))
            .with_context(|| format!("pin {} to {}", name.display(), pins.display()))?;
    }
    Ok(())
}

/// Makes a map what it was when it had just been loaded.
fn empty(path: &Path) -> Result<()> {
    let data = MapData::from_pin(path)?;
    match data.info()?.map_type()? {
        MapType::Array if path.ends_with(map::STATE) => {
            let mut state: Array<_, State> = Map::Array(data).try_into()?;
            state.set(0, State { epoch: 1, trace: 0 }, 0)?;
        }
        // Constants of the programs.
        MapType::Array => {}
        MapType::PerCpuArray => {
            let mut counters: PerCpuArray<_, u64> = Map::PerCpuArray(data).try_into()?;
            let zeros = vec![0; aya::util::nr_cpus().map_err(|(_, error)| error)?];
            for &counter in Counter::ALL {
                counters.set(counter as u32, PerCpuValues::try_from(zeros.clone())?, 0)?;
            }
        }
        MapType::RingBuf => {
            let mut records: RingBuf<_> = Map::RingBuf(data).try_into()?;
            while records.next().is_some() {}
        }
        _ => {
            let key = data.info()?.key_size() as usize;
            program::remove_all(data.fd().as_fd(), key)?;
        }
    }
    Ok(())
}

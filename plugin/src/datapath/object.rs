//! Loads the eBPF object: once per boot, so that no ADD after the first parses BTF or waits for the
//! verifier. Programs that few nodes need are loaded when the first device needs them.

use std::{
    collections::BTreeMap, fs::File, io::Read as _, panic::resume_unwind, path::Path, thread,
};

use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{Array, Map},
    programs::Program,
};
use nix::{
    sys::{
        resource::{RLIM_INFINITY, Resource, setrlimit},
        sysinfo::sysinfo,
    },
    time::{ClockId, clock_getres},
};
use underpass_abi::{
    map,
    node::{NODE_SYMBOL, Node, State},
};

use super::{Error, Pins, feature, lock::Lock, pin::Folder};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/underpass-ebpf"));

/// Memory per flow that the node has in all: a 4 GiB machine keeps 32,768 flows of each family.
const MEMORY_PER_FLOW: u64 = 128 * 1024;
/// Bounds for the number of flows of each family.
const FLOWS_MIN: u64 = 1 << 14;
const FLOWS_MAX: u64 = 1 << 19;
/// Flows heard from one end only have a quarter of the room of the others.
const OPENING_SHARE: u32 = 4;
/// One pod may have half-open flows for a quarter of that room: a masqueraded flow has two entries.
const QUOTA_SHARE: u32 = 8;

/// Opens the pins, after loading and pinning the maps and the usual programs if this is the first call since boot.
pub(crate) fn open_or_load(root: &Path) -> Result<Pins, Error> {
    let pins = Pins::at(root);
    if pins.are_complete() {
        return Ok(pins);
    }
    pins.require_bpffs()?;
    let _lock = Lock::acquire(root)?;
    // Another call may have been first.
    if !pins.are_complete() {
        load(&pins)?;
    }
    Ok(pins)
}

/// Kernels before 5.11 count maps and programs against this limit; on later ones it does not matter whether it can be raised.
pub(super) fn raise_memory_limit() {
    let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
}

/// Loads and pins those of the programs that no device needed before. The pins are complete.
pub(crate) fn load_missing(
    _lock: &Lock,
    pins: &Pins,
    programs: impl IntoIterator<Item = &'static str>,
) -> Result<(), Error> {
    let mut missing: Vec<_> = programs.into_iter().collect();
    missing.retain(|name| !pins.has_program(name));
    if missing.is_empty() {
        return Ok(());
    }
    raise_memory_limit();
    let constants: Array<_, Node> = super::map::open(pins, map::CONSTANTS, Map::Array)?;
    let node = constants.get(&0, 0).map_err(Error::map(map::CONSTANTS))?;
    let folder = pins.folder();
    load_programs(&mut parse(&node, &folder)?, &missing, &folder)
}

fn load(pins: &Pins) -> Result<(), Error> {
    raise_memory_limit();
    let node = Node::new(jiffies_per_second(), random_key()?, feature::present()?);
    let unfinished = pins.begin()?;
    match load_into(unfinished.folder(), node) {
        Ok(()) => unfinished.complete(),
        Err(error) => {
            unfinished.abandon();
            Err(error)
        }
    }
}

fn load_into(folder: &Folder, node: Node) -> Result<(), Error> {
    let mut object = parse(&node, folder)?;
    fill(&mut object, map::CONSTANTS, node)?;
    fill(&mut object, map::STATE, State { epoch: 1, trace: 0 })?;
    load_programs(&mut object, map::USUAL_PROGRAMS, folder)
}

/// Reads the object, and makes and pins those of its maps that are not pinned there.
fn parse(node: &Node, folder: &Folder) -> Result<Ebpf, Error> {
    let flows = flow_count(memory());
    let mut loader = EbpfLoader::new();
    loader.override_global(NODE_SYMBOL, node, true);
    for name in [map::FLOWS4, map::FLOWS6] {
        loader.map_max_entries(name, flows);
    }
    for name in [map::OPENING4, map::OPENING6] {
        loader.map_max_entries(name, opening_count(flows));
    }
    for &name in map::MAPS {
        loader.map_pin_path(name, folder.map(name));
    }
    Ok(loader.load(OBJECT)?)
}

/// Sets the one element of an array.
fn fill<T: Pod>(object: &mut Ebpf, name: &'static str, value: T) -> Result<(), Error> {
    let array = object.map_mut(name).ok_or(Error::Missing(name))?;
    Array::<_, T>::try_from(array)
        .and_then(|mut array| array.set(0, value, 0))
        .map_err(Error::map(name))
}

/// Loads and pins programs, at the same time: nearly all of a node's first ADD is the verifier's work on them.
fn load_programs(object: &mut Ebpf, names: &[&'static str], folder: &Folder) -> Result<(), Error> {
    let mut programs: BTreeMap<_, _> = object.programs_mut().collect();
    thread::scope(|scope| {
        let mut loading = Vec::new();
        for &name in names {
            let program = programs.remove(name).ok_or(Error::Missing(name))?;
            loading.push(scope.spawn(move || load_program(program, name, folder)));
        }
        loading
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

fn load_program(program: &mut Program, name: &'static str, folder: &Folder) -> Result<(), Error> {
    let path = folder.program(name);
    let pinned = match program {
        Program::SchedClassifier(program) => {
            program.load().map_err(Error::program(name))?;
            program.pin(path)
        }
        Program::Xdp(program) => {
            program.load().map_err(Error::program(name))?;
            program.pin(path)
        }
        _ => return Err(Error::Missing(name)),
    };
    pinned.map_err(Error::pin(name))
}

/// The tick of the coarse clock is the jiffy.
fn jiffies_per_second() -> u32 {
    const NANOSECONDS: i64 = 1_000_000_000;
    const USUAL: u32 = 250;
    let Ok(jiffy) = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE) else {
        return USUAL;
    };
    let nanoseconds = jiffy.tv_sec() * NANOSECONDS + jiffy.tv_nsec();
    if nanoseconds <= 0 {
        return USUAL;
    }
    u32::try_from((NANOSECONDS + nanoseconds / 2) / nanoseconds).unwrap_or(USUAL)
}

fn random_key() -> Result<[u64; 2], Error> {
    let path = Path::new("/dev/urandom");
    let mut bytes = [0; 16];
    File::open(path)
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(Error::file("read", path))?;
    let key = u128::from_ne_bytes(bytes);
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of the key")]
    let halves = [key as u64, (key >> 64) as u64];
    Ok(halves)
}

fn memory() -> u64 {
    sysinfo().map_or(0, |info| info.ram_total())
}

/// Entries of a flow map on a node with that many bytes of memory: a power of two.
fn flow_count(memory: u64) -> u32 {
    let fitting = (memory / MEMORY_PER_FLOW).clamp(FLOWS_MIN, FLOWS_MAX);
    1 << fitting.ilog2()
}

/// Entries of a map of opening flows, beside one of so many flows.
const fn opening_count(flows: u32) -> u32 {
    flows / OPENING_SHARE
}

/// How many half-open flows a pod of this node may have, unless its network says otherwise.
pub(crate) fn half_open_limit() -> u32 {
    opening_count(flow_count(memory())) / QUOTA_SHARE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flow_maps_grow_with_the_machine() {
        const GIB: u64 = 1 << 30;
        assert_eq!(flow_count(GIB / 2), 1 << 14);
        assert_eq!(flow_count(4 * GIB), 1 << 15);
        assert_eq!(flow_count(4 * GIB - 1), 1 << 14);
        assert_eq!(flow_count(1024 * GIB), 1 << 19);
    }

    #[test]
    fn a_jiffy_is_one_of_the_usual_lengths() {
        let hz = jiffies_per_second();
        assert!([100, 250, 300, 1000].contains(&hz), "{hz}");
    }
}

//! Loads the eBPF object: once per boot, so that no ADD after the first parses BTF or waits for the
//! verifier. Programs that few nodes need are loaded when the first device needs them.

use std::{
    collections::BTreeMap, fs::File, io::Read as _, ops::RangeInclusive, panic::resume_unwind,
    path::Path, thread,
};

use aya::{Ebpf, EbpfLoader, Pod, maps::Array, programs::Program, util::online_cpus};
use nix::{
    sys::sysinfo::sysinfo,
    time::{ClockId, clock_getres},
};
use sha2::{Digest as _, Sha256};
use underpass_abi::{
    map,
    node::{FEWEST_FLOWS, NODE_SYMBOL, Node, State, flows6, slots},
};

use crate::{
    Error, Loaded, Pins, bpf, feature, home, kernel, lock::Lock, memory, pin::Folder, policy::Rules,
};

/// The programs, deflated: only what loads them needs them, and a node has them loaded for months.
static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/underpass-ebpf"));

/// Memory per entry of a flow table that the node has in all: a 4 GiB machine has 65,536 of each family, or of IPv4 alone. What
/// is there from the first is 88 bytes for each, of the two families together.
const MEMORY_PER_FLOW: u64 = 64 * 1024;
/// Bounds for the entries of a flow table, unless somebody asks for more or less.
const FLOWS_MIN: u64 = 1 << 15;
const FLOWS_MAX: u64 = 1 << 20;
/// How many entries of each flow table may be asked for: a power of two within these bounds.
pub const FLOWS_ASKED: RangeInclusive<u32> = FEWEST_FLOWS..=1 << 22;
/// One pod may have half-open flows for a sixteenth of a flow table: a masqueraded flow has two entries.
const QUOTA_SHARE: u32 = 32;

/// Tables that evict what was not used for the longest time.
///
/// Each CPU that inserts into such a table takes up to 128 free entries for itself (`LOCAL_FREE_TARGET` of
/// `kernel/bpf/bpf_lru_list.c`), so a small table on a machine with many CPUs would be spent by those
/// that have no use for it. They have room for that many twice.
const EVICTING: [Evicting; 4] = [
    Evicting::new(map::FRAGMENTS4, 1 << 12, 256),
    Evicting::new(map::FRAGMENTS6, 1 << 12, 256),
    Evicting::new(map::HALF_OPEN, 1 << 14, 256),
    // Of the programs alone, so its name is not in the ABI. An entry takes 2 KiB: each CPU has room for what
    // it keeps, and no more.
    Evicting::new("HELD", 1 << 8, 130),
];

/// A table that evicts.
#[derive(Clone, Copy, Debug)]
struct Evicting {
    name: &'static str,
    /// Entries at least.
    least: u32,
    /// Entries for each CPU, at least.
    each: u32,
}

impl Evicting {
    const fn new(name: &'static str, least: u32, each: u32) -> Self {
        Self { name, least, each }
    }

    /// Counts the entries on a machine with so many CPUs.
    fn entries(self, cpus: u32) -> u32 {
        self.each.saturating_mul(cpus).max(self.least)
    }
}

/// Loads and pins the maps and the usual programs if this is the first call since boot, with flow tables of so many entries.
pub(crate) fn load_unless_loaded(pins: &Pins, flows: Option<u32>) -> Result<(), Error> {
    if pins.loaded()? == Loaded::Here {
        return Ok(());
    }
    pins.require_bpffs()?;
    let _lock = Lock::acquire(pins.root())?;
    let _shared = pins.lock()?;
    // Another call may have been first.
    let loaded = pins.loaded()?;
    if loaded == Loaded::Here {
        return Ok(());
    }
    if loaded == Loaded::Leftover {
        // Its devices are gone, and whatever was attached to them.
        pins.remove()?;
    }
    load(pins, flows.unwrap_or_else(|| flow_count(memory())))
}

/// Removes what calls have left that were killed while they loaded, where nothing is loaded; else the next call that loads would
/// do it, and until then the kernel would keep their maps.
pub fn sweep(root: &Path) -> Result<(), Error> {
    let pins = Pins::at(root);
    if pins.unfinished()?.is_empty() {
        return Ok(());
    }
    let _lock = Lock::acquire(root)?;
    let _shared = pins.lock()?;
    pins.sweep()
}

/// Fails unless the kernel takes what every one since 5.10 does. The library tries that out with a few bytes each, and takes
/// any error for a kernel that lacks it: one that was short of memory for a moment would have the verifier look at
/// functions anew for each of their callers, for more than a minute, or give a map entries of another size.
///
/// Names of programs are not asked about: nothing depends on them, and the library tries them with a program for trace points, which a kernel
/// without tracing (`CONFIG_BPF_EVENTS`, as it often is in routers) refuses.
///
/// Who may not load such programs is told so by the kernel when they are loaded.
fn require_usual() -> Result<(), Error> {
    if !kernel::lets_load() {
        return Ok(());
    }
    let features = aya::features();
    let types = features
        .btf()
        .is_some_and(|btf| btf.btf_func() && btf.btf_func_global() && btf.btf_datasec());
    if types && features.bpf_global_data() && features.devmap_prog_id() {
        return Ok(());
    }
    Err(Error::Unusual(kernel::release()))
}

/// Gives the number of this build: the first bytes of the SHA-256 of its object, as it is embedded.
#[must_use]
pub fn build() -> u32 {
    let [a, b, c, d, ..] = <[u8; 32]>::from(Sha256::digest(OBJECT));
    u32::from_be_bytes([a, b, c, d])
}

/// Loads and pins those of the programs that no device needed before. The pins are complete. Fails if another
/// build loaded the others: programs of one node share maps whose layout alone does not say that they agree on
/// what is in them.
pub fn load_missing(
    _lock: &Lock,
    pins: &Pins,
    programs: impl IntoIterator<Item = &'static str>,
) -> Result<(), Error> {
    let mut missing: Vec<_> = programs.into_iter().collect();
    missing.retain(|name| !pins.has_program(name));
    if missing.is_empty() {
        return Ok(());
    }
    require_loadable(0)?;
    let node = crate::map::node(pins)?;
    if node.build != build() {
        return Err(Error::OtherBuild {
            root: pins.root().to_owned(),
            programs: missing.join(", "),
        });
    }
    let folder = pins.folder();
    load_programs(&mut parse(&node, &folder)?, &missing, &folder)
}

/// Fails unless programs can be loaded, with new flow tables of so many entries.
pub(crate) fn require_loadable(flows: u32) -> Result<(), Error> {
    bpf::raise_memory_limit();
    kernel::require_uninterrupted()?;
    memory::require(flows, flows6(flows, feature::of_boot()), cpus())?;
    require_usual()
}

/// Fails where the first ADD could not load the programs.
pub fn require_first_load() -> Result<(), Error> {
    require_loadable(flow_count(memory()))
}

fn load(pins: &Pins, flows: u32) -> Result<(), Error> {
    require_loadable(flows)?;
    let (hz, key, features) = (jiffies_per_second(), random_key()?, feature::present()?);
    let node = Node {
        build: build(),
        ..Node::new(hz, key, features, flows)
    };
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
    home::pin(&folder.home())?;
    let mut object = parse(&node, folder)?;
    fill(&mut object, map::CONSTANTS, node)?;
    let mut state = State {
        epoch: 1,
        ..State::default()
    };
    Rules::wanted().put(&mut state);
    fill(&mut object, map::STATE, state)?;
    load_programs(&mut object, map::USUAL_PROGRAMS, folder)
}

/// Reads the object, and makes and pins those of its maps that are not pinned there.
pub(crate) fn parse(node: &Node, folder: &Folder) -> Result<Ebpf, Error> {
    let mut loader = EbpfLoader::new();
    loader.override_global(NODE_SYMBOL, node, true);
    for (flow_table, slot_table, flows) in [
        (map::FLOWS4, map::SLOTS4, node.flows),
        (map::FLOWS6, map::SLOTS6, node.flows6()),
    ] {
        loader.map_max_entries(flow_table, flows);
        loader.map_max_entries(slot_table, slots(flows));
    }
    let cpus = cpus();
    for table in EVICTING {
        loader.map_max_entries(table.name, table.entries(cpus));
    }
    for map in map::MAPS {
        loader.map_pin_path(map.name, folder.map(map.name));
    }
    Ok(loader.load(&inflate(OBJECT))?)
}

/// So many bytes go before what is deflated, see `build.rs`.
const HEADER: usize = 16;

/// Gives an embedded object as the linker left it, which takes a few milliseconds. It is aligned as `malloc` aligns: for any of its
/// structures, which are read in place.
pub(crate) fn inflate(embedded: &[u8]) -> Vec<u8> {
    miniz_oxide::inflate::decompress_to_vec(&embedded[HEADER..])
        .unwrap_or_else(|error| unreachable!("the build has deflated it: {error}"))
}

/// Sets the one element of an array.
pub(crate) fn fill<T: Pod>(object: &mut Ebpf, name: &'static str, value: T) -> Result<(), Error> {
    let array = object.map_mut(name).ok_or(Error::Missing(name))?;
    Array::<_, T>::try_from(array)
        .and_then(|mut array| array.set(0, value, 0))
        .map_err(Error::map(name))
}

/// Loads and pins programs, at the same time: nearly all of a node's first ADD is the verifier's work on them.
pub(crate) fn load_programs(
    object: &mut Ebpf,
    names: &[&'static str],
    folder: &Folder,
) -> Result<(), Error> {
    let mut programs: BTreeMap<_, _> = object.programs_mut().collect();
    thread::scope(|scope| {
        let mut loading = Vec::new();
        for &name in names {
            let program = programs.remove(name).ok_or(Error::Missing(name))?;
            let load = move || load_program(program, name, folder);
            let thread = thread::Builder::new().spawn_scoped(scope, load);
            loading.push(thread.map_err(Error::Thread)?);
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
pub(crate) fn jiffies_per_second() -> u32 {
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

/// Counts the CPUs that are online, whether this process may run there or not: packets are handled on all of them. That is not what `sysconf`
/// of every C library counts. One where there is no sysfs.
fn cpus() -> u32 {
    online_cpus()
        .ok()
        .and_then(|cpus| u32::try_from(cpus.len()).ok())
        .unwrap_or(1)
}

/// Counts the entries of a flow table on a node with that many bytes of memory: a power of two.
fn flow_count(memory: u64) -> u32 {
    let fitting = (memory / MEMORY_PER_FLOW).clamp(FLOWS_MIN, FLOWS_MAX);
    1 << fitting.ilog2()
}

/// Says how many half-open flows a pod may have beside flow tables of so many entries, unless its network says
/// otherwise.
#[must_use]
pub const fn half_open_limit(flows: u32) -> u32 {
    flows / QUOTA_SHARE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flow_tables_grow_with_the_machine() {
        const GIB: u64 = 1 << 30;
        assert_eq!(flow_count(GIB / 2), 1 << 15);
        assert_eq!(flow_count(4 * GIB), 1 << 16);
        assert_eq!(flow_count(4 * GIB - 1), 1 << 15);
        assert_eq!(flow_count(1024 * GIB), 1 << 20);
    }

    #[test]
    fn whatever_the_size_of_a_table_a_pod_has_a_quota() {
        assert_eq!(half_open_limit(1 << 14), 512);
        assert_eq!(half_open_limit(1 << 19), 16_384);
        assert_eq!(half_open_limit(*FLOWS_ASKED.start()), 32);
    }

    #[test]
    fn tables_that_evict_have_room_for_what_each_cpu_keeps() {
        let entries = |cpus| EVICTING.map(|table| (table.name, table.entries(cpus)));
        let of = |fragments, half_open, held| {
            [
                (map::FRAGMENTS4, fragments),
                (map::FRAGMENTS6, fragments),
                (map::HALF_OPEN, half_open),
                ("HELD", held),
            ]
        };
        assert_eq!(entries(1), of(4_096, 16_384, 256));
        assert_eq!(entries(2), of(4_096, 16_384, 260));
        assert_eq!(entries(32), of(8_192, 16_384, 4_160));
        assert_eq!(entries(256), of(65_536, 65_536, 33_280));
        assert!(cpus() >= 1);
    }

    #[test]
    fn a_jiffy_is_one_of_the_usual_lengths() {
        let hz = jiffies_per_second();
        assert!([100, 250, 300, 1000].contains(&hz), "{hz}");
    }
}

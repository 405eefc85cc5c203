//! Every map and constant of the programs.

use aya_ebpf::{
    Global,
    bindings::BPF_F_NO_PREALLOC,
    helpers::generated::bpf_jiffies64,
    macros::map,
    maps::{Array, DevMapHash, HashMap, LpmTrie, LruHashMap, PerCpuArray},
};
use underpass_abi::{
    addr::{Addr, Addr4, Addr6},
    counter::{COUNTER_SLOTS, Counter},
    endpoint::{Attachment, Destination, Device, Endpoint, Owner, excluded},
    flow::{Flow, FragmentKey, FragmentPorts, Key, SIGNED, Signed, protocol},
    node::{Node, State},
    port::{HostPort, PortTarget, ShadowedPort},
};
use underpass_ebpf::ip::{V4, V6};

use crate::model::{
    held::{Held, HeldKey},
    work::Work,
};

/// Constants of the node. Not static: user space overrides the symbol before the programs are
/// loaded.
#[unsafe(no_mangle)]
pub static NODE: Global<Node> = Global::new(Node::new(250, [0, 0], 0, 1 << 16));

// A hash has 16 bytes for each entry that it may hold, used or not; user space scans all of them to
// read the whole map. So the limits are a few times what the largest nodes have, and no more.
#[map]
static CONSTANTS: Array<Node> = Array::with_max_entries(1, 0);
#[map]
static STATE: Array<State> = Array::with_max_entries(1, 0);
#[map]
static ENDPOINTS: HashMap<Addr, Endpoint> = HashMap::with_max_entries(1 << 15, BPF_F_NO_PREALLOC);
#[map]
pub static XDP_PODS: DevMapHash = DevMapHash::with_max_entries(1 << 12, 0);
#[map]
static DEVICES: HashMap<u32, Device> = HashMap::with_max_entries(1 << 14, BPF_F_NO_PREALLOC);
#[map]
static OWNERS: HashMap<Owner, Attachment> = HashMap::with_max_entries(1 << 14, BPF_F_NO_PREALLOC);
#[map]
static NO_MASQUERADE: LpmTrie<Destination, u32> =
    LpmTrie::with_max_entries(1 << 16, BPF_F_NO_PREALLOC);
// User space gives the flow tables and their slots a size that fits the machine. Not LRU: a flow that
// lives is not evicted for another. Not preallocated: memory follows use.
#[map]
pub(super) static FLOWS4: HashMap<Key<Addr4>, Flow<Addr4>> =
    HashMap::with_max_entries(1 << 16, BPF_F_NO_PREALLOC);
#[map]
pub(super) static FLOWS6: HashMap<Key<Addr6>, Flow<Addr6>> =
    HashMap::with_max_entries(1 << 16, BPF_F_NO_PREALLOC);
#[map]
pub(super) static SLOTS4: Array<Key<Addr4>> = Array::with_max_entries(1 << 16, 0);
#[map]
pub(super) static SLOTS6: Array<Key<Addr6>> = Array::with_max_entries(1 << 16, 0);
#[map]
pub(super) static FRAGMENTS4: LruHashMap<FragmentKey<Addr4>, FragmentPorts> =
    LruHashMap::with_max_entries(1 << 12, 0);
#[map]
pub(super) static FRAGMENTS6: LruHashMap<FragmentKey<Addr6>, FragmentPorts> =
    LruHashMap::with_max_entries(1 << 12, 0);
#[map]
pub(super) static SIGNED4: PerCpuArray<Signed<Addr4>> = PerCpuArray::with_max_entries(SIGNED, 0);
#[map]
pub(super) static SIGNED6: PerCpuArray<Signed<Addr6>> = PerCpuArray::with_max_entries(SIGNED, 0);
// Late fragments are rare, and their frames are large.
#[map]
pub static HELD: LruHashMap<HeldKey, Held> = LruHashMap::with_max_entries(1 << 8, 0);
#[map]
pub static HELD_ROOM: PerCpuArray<Held> = PerCpuArray::with_max_entries(1, 0);
#[map]
static PORTS: HashMap<HostPort, PortTarget> = HashMap::with_max_entries(1 << 16, BPF_F_NO_PREALLOC);
#[map]
static SHADOWED_PORTS: HashMap<ShadowedPort, PortTarget> =
    HashMap::with_max_entries(1 << 14, BPF_F_NO_PREALLOC);
#[map]
static SERVICE_ADDRESSES: HashMap<Addr, u32> =
    HashMap::with_max_entries(1 << 15, BPF_F_NO_PREALLOC);
#[map]
static HALF_OPEN: LruHashMap<u32, u64> = LruHashMap::with_max_entries(1 << 14, 0);
#[map]
static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(COUNTER_SLOTS, 0);
#[map]
pub(super) static WORK4: PerCpuArray<Work<V4>> = PerCpuArray::with_max_entries(1, 0);
#[map]
pub(super) static WORK6: PerCpuArray<Work<V6>> = PerCpuArray::with_max_entries(1, 0);

/// One constant of the node, by the name of its field. (`Global::load` reads all of them, at a
/// load for each.)
macro_rules! constant {
    ($($field:ident).+) => {{
        let node = (&raw const $crate::kernel::maps::NODE).cast::<underpass_abi::node::Node>();
        // SAFETY: a `Global` is its value. Volatile, because user space gives the static another
        // value than the compiler knows.
        unsafe { (&raw const (*node).$($field).+).read_volatile() }
    }};
}
pub(crate) use constant;

/// Coarse time, see [`Node::tick_shift`]. Reading jiffies costs one load (5.5, inlined by the JIT).
#[inline(always)]
pub fn tick() -> u32 {
    // SAFETY: the helper has no arguments and no effects.
    let jiffies = unsafe { bpf_jiffies64() };
    #[expect(
        clippy::cast_possible_truncation,
        reason = "time in ticks wraps after a century"
    )]
    let tick = (jiffies >> (constant!(tick_shift) & 63)) as u32;
    tick
}

/// What a flow's half is stamped with while nothing changes: epoch and tick.
#[inline(always)]
pub fn stamp() -> u64 {
    let epoch = STATE.get(0).map_or(0, |state| state.epoch);
    u64::from(epoch) << 32 | u64::from(tick())
}

/// What a translated flow's half whose packets the stack carries is stamped with while nothing changes: whose it is has been looked at, and both of
/// its entries have been taken note of. No [`stamp`] is the same, for 68 years.
#[inline(always)]
pub fn stamp_of_stack() -> u64 {
    stamp() | 1 << 31
}

/// What the node's network stack asks of the bypass: bits of
/// [`policy`](underpass_abi::node::policy).
#[inline(always)]
pub fn policy() -> u32 {
    STATE.get(0).map_or(0, |state| state.policy)
}

/// After how many ticks connection tracking must hear of a flow of this protocol again.
#[inline(always)]
pub fn feed_interval(protocol: u8) -> u32 {
    STATE.get(0).map_or(0, |state| match protocol {
        protocol::TCP => state.feed.tcp,
        protocol::UDP => state.feed.udp,
        protocol::SCTP => state.feed.sctp,
        _ => state.feed.icmp,
    })
}

/// After how many ticks of silence connection tracking may have forgotten TCP.
#[inline(always)]
pub fn tcp_forgotten() -> u32 {
    STATE.get(0).map_or(0, |state| state.tcp_forgotten)
}

/// Whether an end of a tunnel on this node takes packets out of such ones, see
/// [`Tunnels::packet`](underpass_abi::node::Tunnels::packet).
#[inline(always)]
pub fn is_tunnel(packet: u32) -> bool {
    let Some(state) = STATE.get(0) else {
        return false;
    };
    for known in state.tunnels.packets {
        if known == 0 {
            return false;
        }
        if known == packet {
            return true;
        }
    }
    false
}

/// The level that somebody traces at; 0 if nobody does.
#[inline(always)]
pub fn trace_level() -> u32 {
    STATE.get(0).map_or(0, |state| state.trace)
}

/// Counts one packet or event.
#[inline(always)]
pub fn count(counter: Counter) {
    count_at(counter as u32);
}

/// Counts one packet or event, by its counter's index.
#[inline(always)]
pub fn count_at(index: u32) {
    if let Some(slot) = COUNTERS.get_ptr_mut(index) {
        // SAFETY: the slot belongs to this CPU, and programs of one CPU don't interrupt each other
        // at tc, see `kernel::work_area`.
        unsafe { *slot += 1 };
    }
}

/// The host veth that owns a pod's address.
#[inline(always)]
pub fn endpoint(addr: Addr) -> Option<&'static Endpoint> {
    // SAFETY: entries are replaced whole, by user space; freed ones stay readable until the program
    // ends (RCU).
    unsafe { ENDPOINTS.get(addr) }
}

/// What is known of a device.
#[inline(always)]
pub fn device(ifindex: u32) -> Option<&'static Device> {
    // SAFETY: entries are replaced whole, by user space; freed ones stay readable until the program
    // ends (RCU).
    unsafe { DEVICES.get(ifindex) }
}

/// Who serves a port of the host.
#[inline(always)]
pub fn port(key: &HostPort) -> Option<&'static PortTarget> {
    // SAFETY: entries are replaced whole, by user space; freed ones stay readable until the program
    // ends (RCU).
    unsafe { PORTS.get(key) }
}

/// When the quota of a pod's half-open flows will be all there again, see
/// [`quota`](underpass_abi::quota). Several CPUs may write it: what one of them loses runs off like
/// everything else.
#[inline(always)]
pub fn half_open(pod: u32) -> Option<&'static mut u64> {
    // SAFETY: an entry stays readable and writable until the program ends (RCU); it is one word.
    HALF_OPEN
        .get_ptr_mut(&pod)
        .map(|until| unsafe { &mut *until })
}

/// The first half-open flow of a pod.
#[inline(always)]
pub fn set_half_open(pod: u32, until: u64) {
    let _ = HALF_OPEN.insert(&pod, &until, 0);
}

/// Whether a local address is one of a Service, see
/// [`SERVICE_ADDRESSES`](underpass_abi::map::SERVICE_ADDRESSES).
#[inline(always)]
pub fn is_service_address(addr: Addr) -> bool {
    SERVICE_ADDRESSES.get_ptr(&addr).is_some()
}

/// Whether packets of `network` to `dst`, of an address family (`AF_*`), keep their source address.
#[inline(always)]
pub fn keeps_source(network: u32, dst: Addr, family: u8) -> bool {
    let key = Destination {
        network,
        addr: dst_bytes(dst),
    };
    NO_MASQUERADE
        .get(aya_ebpf::maps::lpm_trie::Key::new(160, key))
        .is_some_and(|of| *of == u32::from(family) || *of == excluded::ANY)
}

#[inline(always)]
fn dst_bytes(addr: Addr) -> [u8; 16] {
    // SAFETY: both are 16 bytes without padding, in the same order.
    unsafe { core::mem::transmute(addr) }
}

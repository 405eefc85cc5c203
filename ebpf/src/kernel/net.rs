//! What the families have of their own.

use aya_ebpf::{
    bindings::{bpf_fib_lookup, bpf_redir_neigh, bpf_sock_tuple},
    maps::{Array, HashMap, LruHashMap},
};
use underpass_abi::{
    addr::{Addr, Addr4, Addr6},
    endpoint::Device,
    flow::{Flow, FragmentKey, FragmentPorts, Key, Signed, Tuple},
    node::{flows6, policy},
};
use underpass_ebpf::ip::{Ip, V4, V6};

use crate::{
    kernel::{
        maps::{
            FLOWS4, FLOWS6, FRAGMENTS4, FRAGMENTS6, SIGNED4, SIGNED6, SLOTS4, SLOTS6, WORK4, WORK6,
            constant,
        },
        memory::zeroed,
    },
    model::work::Work,
};

/// What a family has of its own in the kernel: tables and the addresses of helpers' arguments.
pub trait Net: Ip {
    /// Address family number.
    const FAMILY: u8;
    /// Size of a socket tuple.
    const SOCKET_TUPLE: u32;
    /// Bit of [`policy`](mod@policy): connection tracking sees packets at the ports of bridges.
    const BRIDGES: u32;

    /// All flows.
    fn flows() -> &'static HashMap<Key<Self::Addr>, Flow<Self::Addr>>;
    /// How many of them there is room for.
    fn flow_count() -> u32;
    /// Their keys.
    fn slots() -> &'static Array<Key<Self::Addr>>;
    /// Datagrams in pieces.
    fn fragments() -> &'static LruHashMap<FragmentKey<Self::Addr>, FragmentPorts>;
    /// One of the tuples that were signed last on this CPU.
    fn signed(place: u32) -> Option<*mut Signed<Self::Addr>>;
    /// The work area of this CPU, see [`WorkArea`](crate::kernel::work_area::WorkArea).
    fn work() -> Option<*mut Work<Self>>;
    /// The address of this family that an entry for both holds.
    fn narrow(addr: Addr) -> Self::Addr;
    /// The address of the loopback device that every host has.
    fn loopback() -> Self::Addr;
    /// Whether the address means the host itself on every host: never that of a packet on a wire.
    fn is_loopback(addr: Self::Addr) -> bool;
    /// The neighbour that has an address.
    fn neighbour(next_hop: &mut bpf_redir_neigh, addr: Self::Addr);
    /// The address that packets are masqueraded with on an uplink, or of a pod, if it has one.
    fn masquerade_address(device: &Device) -> Option<Self::Addr>;
    /// Arguments of a FIB lookup.
    fn set_fib(params: &mut bpf_fib_lookup, src: Self::Addr, dst: Self::Addr);
    /// What else of the header a route may depend on: the TOS of IPv4, traffic class and flow label
    /// of IPv6.
    fn set_class(params: &mut bpf_fib_lookup, header: &Self::Header);
    /// The source address that a FIB lookup found.
    fn fib_source(params: &bpf_fib_lookup) -> Self::Addr;
    /// The next hop that a FIB lookup found.
    #[inline(always)]
    fn set_next_hop(next_hop: &mut bpf_redir_neigh, params: &bpf_fib_lookup) {
        next_hop.nh_family = u32::from(params.family);
        // SAFETY: the larger member; which one counts is what the family says.
        next_hop.__bindgen_anon_1.ipv6_nh = unsafe { params.__bindgen_anon_4.ipv6_dst };
    }
    /// The socket of this host that packets with this tuple would reach.
    fn socket_tuple(incoming: &Tuple<Self::Addr>) -> bpf_sock_tuple;
    /// Whether the address is on-link only, or none yet: fine from a pod, and never forwarded.
    fn is_local_scope(addr: Self::Addr) -> bool;
}

impl Net for V4 {
    const FAMILY: u8 = 2;
    const SOCKET_TUPLE: u32 = 12;
    const BRIDGES: u32 = policy::BRIDGES4;

    #[inline(always)]
    fn flows() -> &'static HashMap<Key<Addr4>, Flow<Addr4>> {
        &FLOWS4
    }

    #[inline(always)]
    fn flow_count() -> u32 {
        constant!(flows)
    }

    #[inline(always)]
    fn slots() -> &'static Array<Key<Addr4>> {
        &SLOTS4
    }

    #[inline(always)]
    fn fragments() -> &'static LruHashMap<FragmentKey<Addr4>, FragmentPorts> {
        &FRAGMENTS4
    }

    #[inline(always)]
    fn signed(place: u32) -> Option<*mut Signed<Addr4>> {
        SIGNED4.get_ptr_mut(place)
    }

    #[inline(always)]
    fn work() -> Option<*mut Work<V4>> {
        WORK4.get_ptr_mut(0)
    }

    #[inline(always)]
    fn narrow(addr: Addr) -> Addr4 {
        let [_, _, _, _, a, b, c, d] = addr.1.to_ne_bytes();
        Addr4(u32::from_ne_bytes([a, b, c, d]))
    }

    #[inline(always)]
    fn loopback() -> Addr4 {
        Addr4(u32::from_ne_bytes([127, 0, 0, 1]))
    }

    #[inline(always)]
    fn is_loopback(addr: Addr4) -> bool {
        addr.0.to_ne_bytes()[0] == 127
    }

    #[inline(always)]
    fn neighbour(next_hop: &mut bpf_redir_neigh, addr: Addr4) {
        next_hop.nh_family = u32::from(Self::FAMILY);
        next_hop.__bindgen_anon_1.ipv4_nh = addr.0;
    }

    #[inline(always)]
    fn masquerade_address(device: &Device) -> Option<Addr4> {
        let addr = Self::narrow(device.masquerade4);
        (addr.0 != 0).then_some(addr)
    }

    #[inline(always)]
    fn set_fib(params: &mut bpf_fib_lookup, src: Addr4, dst: Addr4) {
        params.__bindgen_anon_3.ipv4_src = src.0;
        params.__bindgen_anon_4.ipv4_dst = dst.0;
    }

    #[inline(always)]
    fn set_class(params: &mut bpf_fib_lookup, header: &Self::Header) {
        params.__bindgen_anon_2.tos = Self::class(header).to_le_bytes()[0];
    }

    #[inline(always)]
    fn fib_source(params: &bpf_fib_lookup) -> Addr4 {
        // SAFETY: every member of the union is valid for any bytes; the family says which one
        // counts.
        Addr4(unsafe { params.__bindgen_anon_3.ipv4_src })
    }

    #[inline(always)]
    fn socket_tuple(incoming: &Tuple<Addr4>) -> bpf_sock_tuple {
        // SAFETY: all bytes zero is a valid tuple; writing a member of the union is safe.
        let mut tuple: bpf_sock_tuple = unsafe { zeroed() };
        tuple.__bindgen_anon_1.ipv4.saddr = incoming.src.0;
        tuple.__bindgen_anon_1.ipv4.daddr = incoming.dst.0;
        tuple.__bindgen_anon_1.ipv4.sport = incoming.sport;
        tuple.__bindgen_anon_1.ipv4.dport = incoming.dport;
        tuple
    }

    #[inline(always)]
    fn is_local_scope(_addr: Addr4) -> bool {
        false
    }
}

impl Net for V6 {
    const FAMILY: u8 = 10;
    const SOCKET_TUPLE: u32 = 36;
    const BRIDGES: u32 = policy::BRIDGES6;

    #[inline(always)]
    fn flows() -> &'static HashMap<Key<Addr6>, Flow<Addr6>> {
        &FLOWS6
    }

    #[inline(always)]
    fn flow_count() -> u32 {
        flows6(constant!(flows), constant!(features))
    }

    #[inline(always)]
    fn slots() -> &'static Array<Key<Addr6>> {
        &SLOTS6
    }

    #[inline(always)]
    fn fragments() -> &'static LruHashMap<FragmentKey<Addr6>, FragmentPorts> {
        &FRAGMENTS6
    }

    #[inline(always)]
    fn signed(place: u32) -> Option<*mut Signed<Addr6>> {
        SIGNED6.get_ptr_mut(place)
    }

    #[inline(always)]
    fn work() -> Option<*mut Work<V6>> {
        WORK6.get_ptr_mut(0)
    }

    #[inline(always)]
    fn narrow(addr: Addr) -> Addr6 {
        Addr6(addr.0, addr.1)
    }

    #[inline(always)]
    fn loopback() -> Addr6 {
        Addr6(0, 1u64.to_be())
    }

    #[inline(always)]
    fn is_loopback(addr: Addr6) -> bool {
        addr == Self::loopback()
    }

    #[inline(always)]
    fn neighbour(next_hop: &mut bpf_redir_neigh, addr: Addr6) {
        next_hop.nh_family = u32::from(Self::FAMILY);
        next_hop.__bindgen_anon_1.ipv6_nh = words(addr);
    }

    #[inline(always)]
    fn masquerade_address(device: &Device) -> Option<Addr6> {
        let addr = Self::narrow(device.masquerade6);
        (addr.0 | addr.1 != 0).then_some(addr)
    }

    #[inline(always)]
    fn set_fib(params: &mut bpf_fib_lookup, src: Addr6, dst: Addr6) {
        params.__bindgen_anon_3.ipv6_src = words(src);
        params.__bindgen_anon_4.ipv6_dst = words(dst);
    }

    #[inline(always)]
    fn set_class(params: &mut bpf_fib_lookup, header: &Self::Header) {
        params.__bindgen_anon_2.flowinfo = Self::class(header);
    }

    #[inline(always)]
    fn fib_source(params: &bpf_fib_lookup) -> Addr6 {
        // SAFETY: every member of the union is valid for any bytes; both types are 16 bytes in the
        // same order.
        unsafe { core::mem::transmute::<[u32; 4], Addr6>(params.__bindgen_anon_3.ipv6_src) }
    }

    #[inline(always)]
    fn socket_tuple(incoming: &Tuple<Addr6>) -> bpf_sock_tuple {
        // SAFETY: all bytes zero is a valid tuple; writing a member of the union is safe.
        let mut tuple: bpf_sock_tuple = unsafe { zeroed() };
        tuple.__bindgen_anon_1.ipv6.saddr = words(incoming.src);
        tuple.__bindgen_anon_1.ipv6.daddr = words(incoming.dst);
        tuple.__bindgen_anon_1.ipv6.sport = incoming.sport;
        tuple.__bindgen_anon_1.ipv6.dport = incoming.dport;
        tuple
    }

    /// `::`, `fe80::/10` and multicast listener reports from them.
    #[inline(always)]
    fn is_local_scope(addr: Addr6) -> bool {
        let [a, b, ..] = addr.0.to_ne_bytes();
        addr.0 | addr.1 == 0 || (a == 0xfe && b & 0xc0 == 0x80)
    }
}

#[inline(always)]
fn words(addr: Addr6) -> [u32; 4] {
    // SAFETY: both are 16 bytes without padding, in the same order.
    unsafe { core::mem::transmute(addr) }
}

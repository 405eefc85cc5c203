//! Asking the kernel's routing table.

use core::num::NonZeroU32;

use aya_ebpf::{
    bindings::{__sk_buff, bpf_fib_lookup},
    helpers::generated,
};
use underpass_abi::{
    endpoint::{LOOPBACK, device as flags},
    node::{feature, flag::BPF_FIB_LOOKUP_SRC},
};

use underpass_ebpf::ip::{Head, V6};

use crate::{
    kernel::{
        global::{global, number},
        maps::{constant, device},
        memory::{self, zeroed},
        net::Net,
        skb::{Skb, size},
        work_area::WorkArea,
    },
    model::work::Work,
};

/// `BPF_FIB_LOOKUP_DIRECT`: no rules, the table of the device's VRF or the main table.
const FIB_LOOKUP_DIRECT: u32 = 1;
const RET_SUCCESS: i64 = 0;
const RET_NO_NEIGHBOUR: i64 = 7;
const RET_FRAG_NEEDED: i64 = 8;

const RET_NOT_FORWARDED: i64 = 4;
/// Of IPv6 by what the device says, `net.ipv6.conf.<device>.forwarding`. The kernel forwards what comes by it all the same, if `all` says so
/// (`ip6_forward`): the device's own setting is whether it hears routers.
const RET_FORWARDING_IS_OFF: i64 = 5;

global!(
    /// Whether the destination of the packet in [`Work::head`], which came in by `in_ifindex`, is an
    /// address of this host.
    ///
    /// Seen from the input side, with forwarding on, the kernel answers `NOT_FWDED` for what it
    /// delivers locally (and for what it has no route for). By the rules 5.10 finds the table of a VRF
    /// at some times and not at others, so that is asked for by itself.
    pub fn is_local<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff, in_ifindex: u32) -> bool {
        let is_in_vrf = device(in_ifindex).is_some_and(|uplink| uplink.flags & flags::VRF != 0);
        let mut answer = inquire(work, ctx, in_ifindex, 0);
        if is_in_vrf && answer != RET_NOT_FORWARDED {
            answer = inquire(work, ctx, in_ifindex, FIB_LOOKUP_DIRECT);
        } else if !is_in_vrf && answer == RET_FORWARDING_IS_OFF && I::FAMILY == V6::FAMILY {
            // Not in a VRF: of another device the kernel would ask another table.
            answer = inquire(work, ctx, LOOPBACK, 0);
        }
        answer == RET_NOT_FORWARDED
    }
);

global!(
    /// Whether packets with the inner tuple of [`Work::request`], which its owner sends, leave by an uplink: whom they are for is not on this node then.
    pub fn answers_leave<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> bool {
        const INSIDE: u32 = flags::POD | flags::LOOPBACK;
        let Work { head, request, .. } = &mut **work;
        let mut params = ask::<I>(head, request.owner);
        I::set_fib(&mut params, request.inner.src, request.inner.dst);
        (params.sport, params.dport) = (request.inner.sport, request.inner.dport);
        let result = look(ctx, &mut params, 0);
        matches!(result, RET_SUCCESS | RET_NO_NEIGHBOUR)
            && device(params.ifindex).is_some_and(|out| out.flags & INSIDE == 0)
    }
);

/// What the kernel says of the packet in [`Work::head`], as if it came in by `in_ifindex`.
#[inline(always)]
fn inquire<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff, in_ifindex: u32, how: u32) -> i64 {
    let Work { head, .. } = &mut **work;
    let mut params = ask::<I>(head, in_ifindex);
    look(ctx, &mut params, how)
}

/// Asks the kernel, which answers in `params`.
#[inline(always)]
fn look(ctx: *mut __sk_buff, params: &mut bpf_fib_lookup, flags: u32) -> i64 {
    // SAFETY: the context is valid, the arguments have the size that is passed.
    unsafe {
        generated::bpf_fib_lookup(
            ctx.cast(),
            params,
            size::<bpf_fib_lookup>().cast_signed(),
            flags,
        )
    }
}

/// The MTU that the kernel has told, in bytes; else the length that it was asked about.
#[inline(always)]
fn told(params: &bpf_fib_lookup) -> u32 {
    // SAFETY: both members of the union are the same integer.
    u32::from(unsafe { params.__bindgen_anon_1.mtu_result })
}

#[inline(always)]
fn ask<I: Net>(head: &Head<I>, in_ifindex: u32) -> bpf_fib_lookup {
    let tuple = &head.tuple;
    // SAFETY: all bytes zero are valid arguments.
    let mut params: bpf_fib_lookup = unsafe { zeroed() };
    params.family = I::FAMILY;
    params.l4_protocol = tuple.protocol;
    params.sport = tuple.sport;
    params.dport = tuple.dport;
    params.ifindex = in_ifindex;
    params.__bindgen_anon_1.tot_len = 1;
    I::set_class(&mut params, &head.header);
    I::set_fib(&mut params, tuple.src, tuple.dst);
    params
}

number!(
    /// What [`find_route`] is to find out.
    pub enum Asked {
        /// All but [`Route::source`].
        Way,
        /// All of it. For IPv6 the kernel compares the addresses of every device of the node, so this
        /// takes the longer the more containers there are.
        Source,
    }
);

global!(
    /// Looks up the route of the packet in [`Work::head`] as if it came in by `in_ifindex`; the device
    /// to leave by, the rest is in [`Work::route`] and [`Work::next_hop`]. [`None`] if the kernel does
    /// not forward it, or not simply (blackhole, tunnel, policy).
    ///
    /// `tot_len` is given, as 1: without it the kernel compares the packet with the MTU by rules that
    /// are wrong for GSO packets and for devices without Ethernet headers; with it `mtu_result` is
    /// filled since 5.12, if the neighbour is known. Else the kernel only says whether a length fits, so it is asked again with the
    /// packet's own, and [`Route::mtu`] is that; a packet that is too long is one for the stack.
    pub fn find_route<I: Net>(
        work: &mut WorkArea<I>,
        ctx: *mut __sk_buff,
        in_ifindex: u32,
        asked: Asked,
    ) -> Option<NonZeroU32> {
        let Work {
            head,
            route,
            next_hop,
            ..
        } = &mut **work;
        let mut params = ask::<I>(head, in_ifindex);
        let tells_source = asked == Asked::Source && constant!(features) & feature::FIB_SRC != 0;
        // A kernel that does not know the flag refuses the whole lookup.
        let flags = if tells_source { BPF_FIB_LOOKUP_SRC } else { 0 };
        let mut result = look(ctx, &mut params, flags);
        let mut mtu = told(&params);
        if matches!(result, RET_SUCCESS | RET_NO_NEIGHBOUR) && mtu == 1 {
            mtu = Skb::new(ctx).wire_length(head.l3, head.headers_length());
            params = ask::<I>(head, in_ifindex);
            params.__bindgen_anon_1.tot_len = u16::try_from(mtu).unwrap_or(u16::MAX);
            result = look(ctx, &mut params, flags);
            if result == RET_FRAG_NEEDED {
                // Less than this packet has.
                mtu -= 1;
                params = ask::<I>(head, in_ifindex);
                result = look(ctx, &mut params, flags);
            }
        }
        // Before 5.13 an unresolved neighbour left the incoming device in its place.
        if !(result == RET_SUCCESS || result == RET_NO_NEIGHBOUR && params.ifindex != in_ifindex) {
            return None;
        }
        let device = device(params.ifindex)?;
        route.mtu = if mtu > 1 { mtu } else { device.mtu };
        if result == RET_SUCCESS {
            let [destination, source] = &mut route.eth;
            memory::copy(destination, &params.dmac);
            memory::copy(source, &params.smac);
        } else {
            memory::clear(&mut route.eth);
        }
        route.source = if tells_source {
            Some(I::fib_source(&params))
        } else {
            None
        };
        I::set_next_hop(next_hop, &params);
        NonZeroU32::new(params.ifindex)
    }
);

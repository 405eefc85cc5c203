//! Settling a flow: at the first packet of each tick, after every change on the node, and when the
//! flow's own state changes. Is it still alive, is its pod still there, does the route still lead
//! where it led?

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{counter::Counter, endpoint::device as flags, flow::action};

use super::{
    flow::{ABSENT, find, half},
    learn,
    parse::PARSED,
    route,
};
use crate::{
    ETHERNET,
    call::Call,
    maps::{Place, Work, count, device, stamp},
    memory,
};

/// What [`settle`] found: the direction is as its half says.
pub const SETTLED: u32 = 0;
/// What [`settle`] found: the stack decides.
pub const STALE: u32 = 1;

/// Checks the direction that the packet belongs to, and brings it up to date. A flow whose ends are
/// gone is removed.
#[inline(always)]
pub fn settle<I: Call>(ctx: *mut __sk_buff) -> u32 {
    let Some(Work {
        place: Place { key, end },
        half: copy,
        partner_place,
        route,
        ..
    }) = I::work()
    else {
        return STALE;
    };
    if I::parse_whole(ctx, ETHERNET) != PARSED {
        return STALE;
    }
    if I::copy_live() == ABSENT {
        return STALE;
    }
    I::note();
    count(Counter::Revalidated);
    if copy.rewrite != 0 && !partner_place.is_known() {
        I::restore();
    }
    let Some((flow, _)) = find::<I>(key) else {
        return STALE;
    };
    let half = half(flow, *end);
    if half.in_ifindex != 0
        && device(half.in_ifindex).is_none_or(|pod| pod.flags & flags::BYPASS == 0)
    {
        return STALE;
    }
    if half.action == action::PEER {
        let Some(pod) = device(half.out_ifindex) else {
            return STALE;
        };
        if pod.flags & flags::BYPASS == 0 {
            return STALE;
        }
        half.mtu = pod.mtu;
        learn::shape(half, pod);
        if !learn::is_reachable(half.queue, pod) {
            return STALE;
        }
        let [destination, source] = &mut half.eth;
        memory::copy(destination, &pod.peer_mac);
        memory::copy(source, &pod.mac);
    } else if half.action == action::WIRE {
        let uplink = I::route(ctx, half.in_ifindex, route::WAY);
        if device(uplink).is_none_or(|uplink| uplink.flags & (flags::POD | flags::LAYER3) != 0) {
            return STALE;
        }
        half.out_ifindex = uplink;
        half.mtu = route.mtu;
        memory::copy(&mut half.eth, &route.eth);
    } else {
        return STALE;
    }
    // An unresolved neighbour left no Ethernet addresses: the next packet asks again.
    half.stamp = if half.eth[0] == [0; 6] { 0 } else { stamp() };
    SETTLED
}

//! Revalidating a flow: at the first packet of each tick, after every change on the node, and when
//! its TCP ends. Is it still alive, is its pod still there, does the route still lead where it led,
//! and must connection tracking hear of it?

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    counter::Counter,
    endpoint::device as flags,
    flow::{Half, STREAM, action, protocol, rewrite, state},
    node::policy,
};

use crate::{
    flow::{
        entry::find,
        join::{stick, suspend},
        tracking::{Noted, look_up, note},
        way,
    },
    kernel::{
        ETHERNET,
        global::global,
        maps::{count, device, feed_interval, policy, stamp, tcp_forgotten, tick},
        memory,
        net::Net,
        route::{Asked, find_route},
        work_area::WorkArea,
    },
    model::{
        direction::{half_of, outgoing},
        work::{Place, Work},
    },
    nat::mapping::{asks, restore},
    parse::parse_packet,
};

global!(
    /// Checks the direction that the packet belongs to, and brings it up to date: whether it is as
    /// its half says. A flow whose ends are
    /// gone is removed; one of which a direction has no way any more, be it for a moment, goes back to the stack, with both.
    pub fn revalidate<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> bool {
        if !parse_packet(work, ctx, ETHERNET) || !look_up(work) {
            return false;
        }
        if policy() & policy::XFRM != 0 {
            suspend(work);
            return false;
        }
        let is_by_stack = work.state & state::BY_STACK != 0;
        if work.state & state::STICKY == 0 {
            if must_stick(work) {
                stick(work);
            } else if is_due(&work.half, work.place.key.0.protocol, work.since) {
                count(Counter::Fed);
                if let Some(flow) = find::<I>(&work.place.key) {
                    half_of(flow, work.place.end).stamp = ASKED;
                }
                return false;
            }
        }
        match note(work) {
            Noted::Gone => return false,
            Noted::Incomplete if is_by_stack || !restore(work) && asks(work) => {
                suspend(work);
                return false;
            }
            Noted::Incomplete | Noted::Whole => {}
        }
        count(Counter::Revalidated);
        let is_settled = follow(work, ctx);
        if !is_settled {
            suspend(work);
        }
        is_settled
    }
);

/// Whether connection tracking must hear of this direction: until the stack lets a packet of it
/// through, all of them go there.
#[inline(always)]
fn is_due<A>(half: &Half<A>, protocol: u8, since: u32) -> bool {
    /// Ticks after which what connection tracking sees makes a stream of UDP, with a longer timer: two seconds after the first packet. Until
    /// it has seen one that late it must see each tick's. A flow counts from its first answer, so the question may have passed before that.
    const YOUNG: i32 = STREAM.cast_signed() + 2;
    let now = tick();
    let age = half.passed.wrapping_sub(since).cast_signed();
    let interval = if protocol == protocol::UDP && age < YOUNG {
        1
    } else {
        feed_interval(protocol)
    };
    now.wrapping_sub(half.passed) >= interval
}

/// Stamp of a direction whose packets go to the stack, which has not let one through yet. No tick has
/// it.
const ASKED: u64 = u64::MAX;

/// Whether connection tracking would not know this TCP any more, whose direction is in
/// [`Work::half`]: it has become strict, or both ends were silent for longer than the shortest of its
/// timers. Not if the stack, as long as it is liberal, was asked about either direction and gave no answer: a rule may have come
/// that drops the connection, and who is cut off by it is why nothing passes.
#[inline(always)]
fn must_stick<I: Net>(work: &mut WorkArea<I>) -> bool {
    let Work {
        place: Place { key, end },
        half: copy,
        partner_place,
        state: known,
        ..
    } = &mut **work;
    if key.0.protocol != protocol::TCP {
        return false;
    }
    if policy() & policy::LIBERAL == 0 {
        // Whether the stack was asked or not: it calls the middle of a connection invalid.
        return true;
    }
    if copy.stamp == ASKED {
        return false;
    }
    let is_old = |passed: u32| tick().wrapping_sub(passed) >= tcp_forgotten();
    if !is_old(copy.passed) {
        return false;
    }
    let opposite = if copy.rewrite == 0 && *known & state::BY_STACK == 0 {
        find::<I>(key).map(|flow| half_of(flow, end.other()))
    } else {
        partner_place.set(&outgoing::<I>(copy, key.0.protocol));
        find::<I>(&partner_place.key).map(|partner| half_of(partner, partner_place.end.other()))
    };
    opposite.is_none_or(|half| half.stamp != ASKED && is_old(half.passed))
}

global!(
    /// Brings the way of the direction at [`Work::place`] up to date. Whether it has one.
    fn follow<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> bool {
        let Some(flow) = find::<I>(&work.place.key) else {
            return false;
        };
        let is_sticky = flow.state & state::STICKY != 0;
        let half = half_of(flow, work.place.end);
        if half.in_ifindex != 0
            && device(half.in_ifindex).is_none_or(|pod| pod.flags & flags::BYPASS == 0)
        {
            return false;
        }
        if half.action == action::PEER {
            let Some(pod) = device(half.out_ifindex) else {
                return false;
            };
            if pod.flags & flags::BYPASS == 0 {
                return false;
            }
            half.mtu = pod.mtu;
            way::shape(half, pod);
            if !way::is_reachable(half.queue, pod) {
                return false;
            }
            let [destination, source] = &mut half.eth;
            memory::copy(destination, &pod.peer_mac);
            memory::copy(source, &pod.mac);
            half.stamp = stamp();
            return true;
        }
        if half.action != action::WIRE {
            return false;
        }
        let in_ifindex = half.in_ifindex;
        if half.rewrite & rewrite::DST != 0 {
            // The stack translates destinations before it looks for a way, and sources after it.
            let (dst, dport) = (half.dst, half.dport);
            let tuple = &mut work.head.tuple;
            (tuple.dst, tuple.dport) = (dst, dport);
        }
        let Some(uplink) = find_route(work, ctx, in_ifindex, Asked::Way) else {
            // The stack says so to the sender.
            return false;
        };
        let uplink = uplink.get();
        let kind = device(uplink).map_or(flags::LAYER3, |uplink| uplink.flags);
        if kind & (flags::POD | flags::LAYER3) != 0 {
            return false;
        }
        if half.out_ifindex != uplink {
            if !is_sticky {
                return false;
            }
            half.out_ifindex = uplink;
            // The answers are expected where the questions leave.
            if half.rewrite != 0 {
                let partner = outgoing::<I>(half, work.place.key.0.protocol);
                work.partner_place.set(&partner);
                if let Some(partner) = find::<I>(&work.partner_place.key) {
                    half_of(partner, work.partner_place.end.other()).uplink = uplink;
                }
            } else {
                half_of(flow, work.place.end.other()).uplink = uplink;
            }
        }
        let Some(flow) = find::<I>(&work.place.key) else {
            return false;
        };
        let half = half_of(flow, work.place.end);
        way::settle_on_wire(half, &work.route, kind);
        true
    }
);

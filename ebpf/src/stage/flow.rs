//! Finding a flow, telling whether it still lives, and keeping its state.

use aya_ebpf::bindings::BPF_ANY;
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    flow::{End, Flow, Half, Key, Tuple, action, protocol, rewrite, state},
};
use underpass_ebpf::l4::tcp;

use super::{learn::leave_to_wire, port};
use crate::{
    call::refund,
    maps::{Net, Place, Work, constant, count, endpoint, tick},
    memory,
};

/// Which table an entry is in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// Heard from both ends.
    Flows,
    /// Heard from one end.
    Opening,
}

/// No flow.
pub const ABSENT: u32 = 0;
/// A flow.
pub const PRESENT: u32 = 1;

/// The entry under a key.
#[inline(always)]
pub fn find<I: Net>(key: &Key<I::Addr>) -> Option<(&'static mut Flow<I::Addr>, Table)> {
    if let Some(flow) = I::flows().get_ptr_mut(key) {
        // SAFETY: an entry stays readable until the program ends (RCU). Several CPUs may write its
        // fields; each field is one word, and a reader that meets a half that is being
        // written finds a wrong stamp or device and asks the stack.
        return Some((unsafe { &mut *flow }, Table::Flows));
    }
    let flow = I::opening().get_ptr_mut(key)?;
    // SAFETY: as above.
    Some((unsafe { &mut *flow }, Table::Opening))
}

/// The half for packets from `end`.
#[inline(always)]
pub fn half<A>(flow: &mut Flow<A>, end: End) -> &mut Half<A> {
    match end {
        End::A => &mut flow.halves[0],
        End::B => &mut flow.halves[1],
    }
}

/// The tuple that packets of this half leave with.
#[inline(always)]
pub fn outgoing<I: Net>(half: &Half<I::Addr>, protocol: u8) -> Tuple<I::Addr> {
    Tuple::new(protocol, half.src, half.sport, half.dst, half.dport)
}

/// Whether packets of this half leave with that tuple, whose protocol is theirs.
#[inline(always)]
pub fn leaves_as<I: Net>(half: &Half<I::Addr>, tuple: &Tuple<I::Addr>) -> bool {
    half.src == tuple.src
        && half.dst == tuple.dst
        && half.sport == tuple.sport
        && half.dport == tuple.dport
}

/// Makes packets of this half leave with `tuple`.
#[inline(always)]
pub fn set_outgoing<I: Net>(half: &mut Half<I::Addr>, tuple: &Tuple<I::Addr>) {
    half.src = tuple.src;
    half.dst = tuple.dst;
    half.sport = tuple.sport;
    half.dport = tuple.dport;
}

/// Whether a packet came within the flow's timeout.
#[inline(always)]
pub const fn is_alive<A>(flow: &Flow<A>, tick: u32) -> bool {
    flow.expires.wrapping_sub(tick).cast_signed() >= 0
}

/// A packet came: the flow lives for another timeout, which depends on its state.
#[inline(always)]
pub fn prolong<A>(flow: &mut Flow<A>, protocol: u8, tick: u32) {
    let answered = flow.state & state::ANSWERED == state::ANSWERED;
    let limit = match protocol {
        protocol::TCP
            if flow.state & state::RST != 0 || flow.state & state::FINISHED == state::FINISHED =>
        {
            constant!(timeout.tcp_closing)
        }
        protocol::TCP if answered => constant!(timeout.tcp_established),
        protocol::TCP => constant!(timeout.tcp_opening),
        protocol::UDP | protocol::SCTP if answered => constant!(timeout.udp),
        protocol::UDP | protocol::SCTP => constant!(timeout.udp_opening),
        _ => constant!(timeout.icmp),
    };
    flow.expires = tick + limit;
}

/// The flow's state after a packet from `end` with these TCP flags (0 for other protocols).
#[inline(always)]
const fn after(before: u32, end: End, flags: u8) -> u32 {
    if flags & tcp::RST != 0 {
        // A refusal is no answer: a flood of connections to closed ports must not leave the table
        // of unanswered flows.
        return before | state::RST;
    }
    // An end that ignored the RST goes on; one that did not would send another.
    let before = before & !state::RST;
    if flags & (tcp::SYN | tcp::ACK) == tcp::SYN | tcp::ACK {
        // Nor is an offer: a flood of connections to open ports must not either. The opener has to
        // take it up.
        return before & !state::FINISHED | state::OFFERED;
    }
    let mut after = before | end.heard();
    if flags & tcp::SYN != 0 {
        after &= !(state::FINISHED | state::OFFERED);
    } else if before & state::OFFERED != 0 {
        after |= state::ANSWERED;
    }
    if flags & tcp::FIN != 0 {
        after |= end.fin();
    }
    after
}

/// Copies what is known of the direction of the packet in [`Work::head`] to [`Work::half`]:
/// [`PRESENT`] if its flow lives. One that was idle for too long is removed, and one whose pod is
/// gone, or whose host port leads elsewhere.
///
/// The two entries of a translated flow live as long as the livelier of them.
#[inline(always)]
pub fn copy_live<I: Net>() -> u32 {
    let Some(Work {
        head,
        place: Place { key, end },
        half: copy,
        state,
        partner_place,
        ..
    }) = I::work()
    else {
        return ABSENT;
    };
    let Some((flow, _)) = find::<I>(key) else {
        return ABSENT;
    };
    memory::copy(copy, half(flow, *end));
    *state = flow.state;
    if !is_owned::<I>(copy, head.tuple.src) || !port::is_current::<I>(&head.tuple, copy, *state) {
        remove::<I>(key, copy, partner_place);
        return ABSENT;
    }
    let tick = tick();
    if is_alive(flow, tick) {
        return PRESENT;
    }
    let translating = if copy.rewrite != 0 {
        &*copy
    } else {
        &*half(flow, end.other())
    };
    if translating.rewrite != 0 {
        partner_place.set(&outgoing::<I>(translating, head.tuple.protocol));
        if find::<I>(&partner_place.key).is_some_and(|(partner, _)| is_alive(partner, tick)) {
            return PRESENT;
        }
    }
    count(Counter::Expired);
    remove::<I>(key, translating, partner_place);
    ABSENT
}

/// Whether the pods at either end of a direction are still those that it was learned for: their
/// addresses may belong to others by now, or to nobody, and then lead out of the node again.
#[inline(always)]
pub fn is_owned<I: Net>(half: &Half<I::Addr>, src: I::Addr) -> bool {
    (half.in_ifindex == 0 || owns::<I>(half.in_ifindex, src)) && has_target::<I>(half)
}

/// Whether the pod that a direction leads to, if it leads to one, is still there.
#[inline(always)]
pub fn has_target<I: Net>(half: &Half<I::Addr>) -> bool {
    let to_pod = half.action == action::PEER
        || half.rewrite & rewrite::DST != 0 && half.action != action::WIRE;
    !to_pod || half.out_ifindex == 0 || owns::<I>(half.out_ifindex, half.dst)
}

#[inline(always)]
fn owns<I: Net>(ifindex: u32, addr: I::Addr) -> bool {
    endpoint(addr.wide()).is_some_and(|endpoint| endpoint.ifindex == ifindex)
}

/// Takes note of the packet in [`Work::head`]: when it was, and what it does to its flow's state.
///
/// An answered flow moves to the other table, together with its partner if it is translated: look
/// it up again.
#[inline(always)]
pub fn note<I: Net>() -> u32 {
    let Some(Work {
        head,
        place: Place { key, end },
        partner,
        partner_place,
        ..
    }) = I::work()
    else {
        return ABSENT;
    };
    let Some((flow, table)) = find::<I>(key) else {
        return ABSENT;
    };
    let protocol = head.tuple.protocol;
    let tick = tick();
    flow.state = after(flow.state, *end, head.tcp_flags);
    let half = half(flow, *end);
    *partner = outgoing::<I>(half, protocol);
    if half.rewrite == 0 {
        prolong(flow, protocol, tick);
        settle_in::<I>(key, flow, table);
        return PRESENT;
    }
    // Each entry hears one end only; together they know whether the flow was answered.
    prolong(flow, protocol, tick);
    partner_place.set(partner);
    let Some((other, other_table)) = find::<I>(&partner_place.key) else {
        return ABSENT;
    };
    // Of the packet's key, not of its own tuple: on its way to a process of the host it has another for a
    // while.
    let answer = match end {
        End::A => key.0.reversed(),
        End::B => key.0,
    };
    if !leaves_as::<I>(self::half(other, partner_place.end.other()), &answer) {
        // It was evicted, and somebody else has the tuple now.
        remove_one::<I>(key);
        return PRESENT;
    }
    other.state = after(other.state, partner_place.end, head.tcp_flags);
    if is_answered(flow, other) {
        flow.state |= state::ANSWERED;
        other.state |= state::ANSWERED;
    }
    prolong(flow, protocol, tick);
    prolong(other, protocol, tick);
    settle_in::<I>(key, flow, table);
    settle_in::<I>(&partner_place.key, other, other_table);
    PRESENT
}

/// Whether either entry of a translated flow heard both ends.
#[inline(always)]
const fn is_answered<A>(one: &Flow<A>, other: &Flow<A>) -> bool {
    one.state & state::ANSWERED == state::ANSWERED
        || other.state & state::ANSWERED == state::ANSWERED
}

/// Moves an entry to the table where it belongs, and gives its pod's quota back.
#[inline(always)]
fn settle_in<I: Net>(key: &Key<I::Addr>, flow: &mut Flow<I::Addr>, table: Table) {
    if table == Table::Opening && flow.state & state::ANSWERED == state::ANSWERED {
        for end in [End::A, End::B] {
            if flow.state & end.charged() != 0 {
                flow.state &= !end.charged();
                refund(half(flow, end).in_ifindex);
            }
        }
        promote::<I>(key, flow);
    }
}

/// The bypass takes over the flow of the packet in [`Work::head`]: its pod's packets leave by this
/// uplink, replies to a translated flow go to the pod.
#[inline(always)]
pub fn leave_by_wire<I: Net>(uplink: u32) -> u32 {
    let Some(Work {
        head,
        place: Place { key, end },
        partner_place,
        ..
    }) = I::work()
    else {
        return ABSENT;
    };
    let Some((flow, _)) = find::<I>(key) else {
        return ABSENT;
    };
    let half = half(flow, *end);
    leave_to_wire(half, uplink);
    half.action = action::WIRE;
    count(Counter::Learned);
    if half.rewrite != 0 {
        partner_place.set(&outgoing::<I>(half, head.tuple.protocol));
        if let Some((partner, _)) = find::<I>(&partner_place.key) {
            let back = self::half(partner, partner_place.end.other());
            back.stamp = 0;
            back.action = action::PEER;
        }
    }
    PRESENT
}

#[inline(always)]
fn promote<I: Net>(key: &Key<I::Addr>, flow: &Flow<I::Addr>) {
    if I::flows().insert(key, flow, u64::from(BPF_ANY)).is_ok() {
        let _ = I::opening().remove(key);
    }
}

/// Removes an entry, and its partner if `half` translates. `partner_place` is overwritten.
#[inline(always)]
pub fn remove<I: Net>(key: &Key<I::Addr>, half: &Half<I::Addr>, partner_place: &mut Place<I>) {
    if half.rewrite != 0 {
        partner_place.set(&outgoing::<I>(half, key.0.protocol));
        remove_one::<I>(&partner_place.key);
    }
    remove_one::<I>(key);
}

/// Removes one entry.
#[inline(always)]
pub fn remove_one<I: Net>(key: &Key<I::Addr>) {
    let _ = I::flows().remove(key);
    let _ = I::opening().remove(key);
}

/// The stack used the tuple in [`Work::head`] for something else than what was learned: it decides
/// again.
///
/// A translated flow keeps its translation, which does not depend on who forwards; it goes by the
/// stack from now on.
#[inline(always)]
pub fn forget<I: Net>() -> u32 {
    let Some(Work {
        head,
        place: Place { key, end },
        partner_place,
        ..
    }) = I::work()
    else {
        return ABSENT;
    };
    let Some((flow, _)) = find::<I>(key) else {
        return ABSENT;
    };
    let half = half(flow, *end);
    if half.rewrite != 0 {
        leave_to_stack(half);
        partner_place.set(&outgoing::<I>(half, head.tuple.protocol));
        if let Some((partner, _)) = find::<I>(&partner_place.key) {
            leave_to_stack(self::half(partner, partner_place.end.other()));
        }
        return PRESENT;
    }
    if flow.state & state::OUTER == 0 && flow.halves[0].rewrite | flow.halves[1].rewrite == 0 {
        count(Counter::Forgotten);
        remove_one::<I>(key);
    }
    PRESENT
}

#[inline(always)]
fn leave_to_stack<A>(half: &mut Half<A>) {
    if half.rewrite & (rewrite::SRC | rewrite::DST) != 0
        && (half.action == action::WIRE || half.action == action::PEER)
    {
        half.action = action::STACK;
        count(Counter::Forgotten);
    }
}

//! What is known of a packet's flow, and what the packet does to it.

use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    flow::{End, Flow, Half, Key, STREAM, Tuple, action, protocol, rewrite, state},
    quota::{TRANSLATED, WINDOW, WORLD},
};
use underpass_ebpf::{ip::Head, l4::tcp};

use crate::{
    filter::quota::refund,
    flow::entry::{
        find, is_alive, is_owned, is_partner, prolong, prolong_with, remove_all, remove_one,
    },
    kernel::{
        global::{global, number},
        host_ports::serving,
        maps::{count, stamp_of_stack, tick},
        memory,
        net::Net,
        work_area::WorkArea,
    },
    model::{
        direction::{half_of, is_answer, is_answer_to, outgoing},
        state::{
            acknowledges_last, after, begins_anew, is_answered, is_finished, is_guest, is_shared,
            says_nothing, unlearn,
        },
        work::{Place, Work},
    },
};

number!(
    /// What an earlier look has seen of a packet's flow.
    pub enum Seen {
        /// There may be one.
        Perhaps,
        /// There is none under its tuple.
        None,
        /// It is there, and the direction of the packet is in [`Work::half`].
        Flow,
    }
);

/// Whether the flow of the packet in [`Work::head`], which no bypass took, is known; then its direction is in [`Work::half`]. What
/// ends on the bypass may be INVALID in the stack.
#[inline(always)]
pub fn is_known<I: Net>(work: &mut WorkArea<I>, seen: Seen) -> bool {
    const BOUND: u32 = state::BYPASS | state::STICKY;
    if seen == Seen::Flow {
        return true;
    }
    let is_found = seen == Seen::Perhaps && look_up(work);
    if is_found && work.state & BOUND == BOUND && work.head.tcp_flags & tcp::SYN == 0 {
        count(Counter::CameBack);
    }
    is_found
}

number!(
    /// What [`note`] found of a flow.
    pub enum Noted {
        /// The other one of its entries is not there.
        Incomplete,
        /// There was a flow until now: its own entry has made room on another CPU, or somebody else has the tuple that its packets would leave with.
        Gone,
        /// All of it.
        Whole,
    }
);

global!(
    /// Copies what is known of the direction of the packet in [`Work::head`] to [`Work::half`]:
    /// whether its flow lives. One that was idle for too long is removed, and one whose pod is
    /// gone, or whose host port leads elsewhere.
    ///
    /// The two entries of a translated flow live as long as the livelier of them. What the stack translates is
    /// nobody else's business: the copy says nothing of it.
    pub fn look_up<I: Net>(work: &mut WorkArea<I>) -> bool {
        let Work {
            head,
            place: Place { key, end },
            half: copy,
            state,
            since,
            stamp,
            is_noted,
            partner_place,
            ..
        } = &mut **work;
        *is_noted = false;
        let Some(flow) = find::<I>(key) else {
            return false;
        };
        memory::copy(copy, half_of(flow, *end));
        *state = flow.state;
        *since = flow.since;
        if flow.tag != key.tag() {
            return false;
        }
        // Before whose it is is looked at: what changes afterwards changes the stamp.
        *stamp = stamp_of_stack();
        let is_stamped = is_stamped(copy, *stamp);
        if !is_stamped
            && (!is_owned::<I>(copy, head.tuple.src) || !is_current::<I>(&head.tuple, copy, *state))
        {
            withdraw(work);
            return false;
        }
        *is_noted = is_stamped && is_as_noted(flow, *end, head.tcp_flags);
        let tick = tick();
        let mut lives = is_alive(flow, tick);
        if !lives {
            let from = if copy.rewrite != 0 { *end } else { end.other() };
            lives = live_partner::<I>(flow, key, from, partner_place, tick).is_some();
        }
        if lives {
            if flow.state & state::BY_STACK != 0 {
                copy.rewrite = 0;
            }
            return true;
        }
        count(Counter::Expired);
        if is_shared(flow)
            && let Some(partner) = live_partner::<I>(flow, key, end.other(), partner_place, tick)
        {
            inherit(flow, end.other(), partner);
            withdraw(work);
            // The other flow in it lives, and may be in the way of this packet.
            return copy_half(work);
        }
        remove_all::<I>(key, flow);
        false
    }
);

/// Whether this direction's packets go by the stack, and one of them has been taken note of since the last change on the node, in this tick.
#[inline(always)]
pub fn is_stamped<A>(half: &Half<A>, stamp: u64) -> bool {
    half.action == action::STACK && half.stamp == stamp
}

/// Whether a packet from `end` with these TCP flags says nothing of the flow that the last one that was taken note of has not said.
#[inline(always)]
pub fn is_as_noted<A>(flow: &Flow<A>, end: End, tcp_flags: u8) -> bool {
    !is_shared(flow) && says_nothing(flow.state, end, tcp_flags)
}

/// What is left of an entry that has expired lives as long as the second entry of its direction from `end`, and says of a guest's
/// conversation what that says.
#[inline(always)]
fn inherit<A>(flow: &mut Flow<A>, end: End, second: &Flow<A>) {
    flow.expires = second.expires;
    if is_guest(flow, end) {
        flow.state &= !KEPT;
        if second.state & KEPT == KEPT {
            flow.state |= KEPT;
        }
    }
}

/// Copies the direction at [`Work::place`] to [`Work::half`], if there is its entry.
#[inline(always)]
fn copy_half<I: Net>(work: &mut WorkArea<I>) -> bool {
    let Work {
        place: Place { key, end },
        half: copy,
        state,
        ..
    } = &mut **work;
    let Some(flow) = find::<I>(key) else {
        return false;
    };
    memory::copy(copy, half_of(flow, *end));
    *state = flow.state;
    true
}

/// The other entry of the direction from `from`, if it is there and lives; `partner_place` becomes its place.
#[inline(always)]
fn live_partner<I: Net>(
    flow: &mut Flow<I::Addr>,
    key: &Key<I::Addr>,
    from: End,
    partner_place: &mut Place<I>,
    tick: u32,
) -> Option<&'static mut Flow<I::Addr>> {
    let half = half_of(flow, from);
    if half.rewrite == 0 {
        return None;
    }
    partner_place.set(&outgoing::<I>(half, key.0.protocol));
    let partner = find::<I>(&partner_place.key)?;
    let lives =
        is_alive(partner, tick) && is_partner::<I>(flow, key, from, partner, partner_place.end);
    lives.then_some(partner)
}

global!(
    /// Takes note of the packet in [`Work::head`]: when it was, and what it does to its flow's state.
    pub fn note<I: Net>(work: &mut WorkArea<I>) -> Noted {
        let Work {
            head,
            place: Place { key, end },
            partner,
            partner_place,
            stamp,
            ..
        } = &mut **work;
        let Some(flow) = find::<I>(key) else {
            return Noted::Gone;
        };
        let protocol = head.tuple.protocol;
        let tick = tick();
        let as_guest = is_guest(flow, *end);
        let is_pods = half_of(flow, *end).in_ifindex != 0;
        let before = flow.state;
        if !as_guest {
            advance(flow, *end, head.tcp_flags, is_pods);
        }
        let half = half_of(flow, *end);
        *partner = outgoing::<I>(half, protocol);
        if half.rewrite == 0 {
            mature(flow, *end, before, head, tick);
            prolong(flow, protocol, tick);
            return Noted::Whole;
        }
        // Each entry hears one end only; together they know whether the flow was answered.
        prolong(flow, protocol, tick);
        partner_place.set(partner);
        let Some(other) = find::<I>(&partner_place.key) else {
            return Noted::Incomplete;
        };
        // Of the packet's key, not of its own tuple: on its way to a process of the host it has another for a
        // while.
        let from = partner_place.end.other();
        if !is_answer_to::<I>(half_of(other, from), key, *end) {
            if flow.state & state::BY_STACK != 0 {
                return Noted::Incomplete;
            }
            leave::<I>(key, flow, *end);
            return Noted::Gone;
        }
        if is_guest(other, from) {
            prolong(other, protocol, tick);
            mature(flow, *end, before, head, tick);
            prolong(flow, protocol, tick);
            return Noted::Whole;
        }
        let others = other.state;
        advance(other, partner_place.end, head.tcp_flags, is_pods);
        if as_guest {
            mature(other, partner_place.end, others, head, tick);
            prolong(other, protocol, tick);
            return Noted::Whole;
        }
        if is_answered(flow, other) {
            flow.state |= state::ANSWERED;
            other.state |= state::ANSWERED;
        }
        mature(flow, *end, before, head, tick);
        mature(other, partner_place.end, others, head, tick);
        let both = flow.state | other.state;
        prolong_with(flow, both, protocol, tick);
        prolong_with(other, both, protocol, tick);
        let half = half_of(flow, *end);
        if half.action == action::STACK {
            half.stamp = *stamp;
        }
        Noted::Whole
    }
);

global!(
    /// Removes the flow whose direction at [`Work::place`] is in [`Work::half`]: its entry and, if it is
    /// translated, the other one. Of an entry that is shared only its own half goes.
    pub fn withdraw<I: Net>(work: &mut WorkArea<I>) {
        let Work {
            place: Place { key, end },
            half: copy,
            partner_place,
            ..
        } = &mut **work;
        if copy.rewrite != 0 {
            partner_place.set(&outgoing::<I>(copy, key.0.protocol));
            let back = partner_place.end.other();
            if let Some(partner) = find::<I>(&partner_place.key)
                && is_answer_to::<I>(half_of(partner, back), key, *end)
            {
                leave::<I>(&partner_place.key, partner, back);
            }
        }
        if let Some(flow) = find::<I>(key) {
            leave::<I>(key, flow, *end);
        }
    }
);

/// Takes note of what a packet from `end`, which may be a pod's own, does to the state of an entry.
#[inline(always)]
fn advance<A>(flow: &mut Flow<A>, end: End, tcp_flags: u8, is_pods: bool) {
    let next = next(flow.state, end, tcp_flags, is_pods);
    flow.state = next & !ANEW;
    if next & ANEW != 0 {
        unlearn(flow);
    }
}

/// Beside a state: a new connection begins on the tuple of one that has ended.
const ANEW: u32 = 1 << 31;

global!(
    /// The state of a flow after a packet from `end`, which may be a pod's own, and [`ANEW`] if that is so.
    fn next(before: u32, end: End, tcp_flags: u8, is_pods: bool) -> u32 {
        let after = after(before, end, tcp_flags);
        if begins_anew(before, tcp_flags) {
            after | ANEW
        } else if is_pods && tcp_flags & tcp::RST != 0 && after & state::STICKY != 0 {
            // No stray one.
            after | state::FINISHED
        } else {
            after
        }
    }
);

/// What is left of an entry whose own flow went.
const KEPT: u32 = state::ANSWERED | state::ASSURED;

/// Removes the entry of a flow that has this half of it, or the half alone.
#[inline(always)]
fn leave<I: Net>(key: &Key<I::Addr>, flow: &mut Flow<I::Addr>, end: End) {
    if !is_shared(flow) {
        remove_one::<I>(key);
        return;
    }
    let is_host = !is_guest(flow, end);
    let is_outer = half_of(flow, end.other()).rewrite & rewrite::SRC == 0;
    let own = half_of(flow, end);
    own.rewrite = 0;
    own.passed = 0;
    own.stamp = 0;
    own.action = if is_outer {
        action::TAKEN
    } else {
        action::NONE
    };
    if is_host {
        flow.state &= KEPT;
        if is_alive(flow, tick()) {
            prolong(flow, key.0.protocol, tick());
        }
    }
}

/// Tells a conversation from what is none yet, or no more; gives an answered flow's quota back. `before` is the state before the packet: how
/// long a flow is answered counts from its first answer, as connection tracking makes a stream of what comes after that. `from` is the end that sent it.
#[inline(always)]
fn mature<I: Net>(flow: &mut Flow<I::Addr>, from: End, before: u32, head: &Head<I>, tick: u32) {
    let age = tick.wrapping_sub(flow.since);
    let is_acknowledged = acknowledges_last(before, from, head.tcp_flags);
    let now = matured(flow.state, is_acknowledged, head.tuple.protocol, age);
    flow.state = now;
    if now & state::ANSWERED != state::ANSWERED {
        return;
    }
    if before & state::ANSWERED != state::ANSWERED {
        flow.since = tick;
    }
    for end in [End::A, End::B] {
        if flow.state & end.charged() != 0 {
            flow.state &= !end.charged();
            // After that time the charge has run off.
            if age < WINDOW {
                refund(account(flow, end));
            }
        }
    }
}

global!(
    /// The state of a flow that is so many ticks old, of which it is said as well whether it is a conversation. A connection is until its second
    /// FIN is acknowledged: who has sent that one waits to hear that it arrived.
    fn matured(flow_state: u32, is_acknowledged: bool, protocol: u8, age: u32) -> u32 {
        if flow_state & state::ANSWERED != state::ANSWERED {
            return flow_state & !state::ASSURED;
        }
        let is_assured = match protocol {
            protocol::TCP => {
                flow_state & state::RST == 0 && !(is_acknowledged && is_finished(flow_state))
            }
            protocol::UDP | protocol::SCTP => age >= STREAM,
            _ => false,
        };
        let others = flow_state & !(state::ASSURED | state::SURPLUS);
        if is_assured {
            others | state::ASSURED
        } else {
            others
        }
    }
);

/// The account that a flow was charged to for who is at this end; if that is the world, it is one of the pod that was reached.
#[inline(always)]
fn account<A>(flow: &mut Flow<A>, end: End) -> u32 {
    let kind = if flow.state & state::BY_STACK != 0 {
        TRANSLATED
    } else {
        0
    };
    let half = half_of(flow, end);
    match half.in_ifindex {
        0 => half.out_ifindex | WORLD | kind,
        pod => pod | kind,
    }
}

/// Whether a flow to a host port still goes where the port leads, as told by its half for packets
/// with `tuple`.
#[inline(always)]
fn is_current<I: Net>(tuple: &Tuple<I::Addr>, half: &Half<I::Addr>, flow_state: u32) -> bool {
    if flow_state & state::PORT == 0 || half.rewrite & rewrite::ASIDE != 0 {
        return true;
    }
    if half.rewrite & rewrite::DST != 0 && !is_answer(half.rewrite, flow_state) {
        return serving::<I>(tuple)
            .is_some_and(|target| target.addr == half.dst.wide() && target.port == half.dport);
    }
    if half.rewrite & rewrite::SRC != 0 {
        let asked = Tuple::new(tuple.protocol, half.dst, half.dport, half.src, half.sport);
        return serving::<I>(&asked)
            .is_some_and(|target| target.addr == tuple.src.wide() && target.port == tuple.sport);
    }
    true
}

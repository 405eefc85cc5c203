//! Finding a flow, telling whether it still lives, and keeping its state.

use underpass_abi::{
    addr::Family as _,
    flow::{End, Flow, Half, Key, STREAM, Tuple, action, protocol, rewrite, state},
    quota::WINDOW,
};
use underpass_ebpf::l4::tcp;

use crate::{
    filter::quota::refund,
    flow::table::{remove_all, remove_one},
    kernel::{
        global::{global, number},
        maps::{Place, Work, constant, count, endpoint, tick},
        memory,
        net::Net,
    },
    nat::host_port,
};

number!(
    /// What [`note`] found of a flow.
    pub enum Noted {
        /// One of its entries is not there.
        Incomplete,
        /// There was a flow until now: somebody else has the tuple that its packets would leave with.
        Gone,
        /// All of it.
        Whole,
    }
);

/// The entry under a key.
///
/// Since Linux 6.1 the memory of an entry that is removed may become another's while it is read: who
/// acts on what it says without a look at `Flow::tag` afterwards, must be able to stand the other's.
#[inline(always)]
pub fn find<I: Net>(key: &Key<I::Addr>) -> Option<&'static mut Flow<I::Addr>> {
    let flow = I::flows().get_ptr_mut(key)?;
    // SAFETY: an entry's memory stays readable, and an entry, until the program ends. Several CPUs
    // may write its fields; each field is one word, and a reader that meets a half that is being
    // written finds a wrong stamp or device and asks the stack.
    Some(unsafe { &mut *flow })
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
    let is_assured = flow.state & state::ASSURED != 0;
    let limit = match protocol {
        // A stray RST, which its receiver ignores, must not cost a connection its life.
        protocol::TCP if flow.state & state::RST != 0 => constant!(timeout.tcp_opening),
        protocol::TCP if is_ending(flow.state) => constant!(timeout.tcp_closing),
        protocol::TCP if is_assured => constant!(timeout.tcp_established),
        protocol::TCP => constant!(timeout.tcp_opening),
        protocol::UDP | protocol::SCTP if is_assured => constant!(timeout.udp),
        protocol::UDP | protocol::SCTP => constant!(timeout.udp_opening),
        _ => constant!(timeout.icmp),
    };
    flow.expires = tick + limit;
}

/// Whether a TCP connection was reset, or ended by both ends.
#[inline(always)]
const fn is_ending(flow_state: u32) -> bool {
    flow_state & state::RST != 0 || flow_state & state::FINISHED == state::FINISHED
}

/// Whether a packet with these TCP flags begins a new connection on the tuple of one that has ended.
#[inline(always)]
pub const fn begins_anew(flow_state: u32, flags: u8) -> bool {
    begins(flags) && is_ending(flow_state)
}

/// Whether a packet with these TCP flags asks for a connection.
#[inline(always)]
pub const fn begins(flags: u8) -> bool {
    flags & (tcp::SYN | tcp::ACK) == tcp::SYN
}

/// What is forgotten of a flow on whose tuple a new one begins.
const ENDED: u32 = state::ANSWERED
    | state::FINISHED
    | state::RST
    | state::OFFERED
    | state::BYPASS
    | state::STICKY
    | state::ASSURED
    | state::SYN
    | state::SYN_ACK;

/// The flow's state after a packet from `end` with these TCP flags (0 for other protocols).
#[inline(always)]
const fn after(before: u32, end: End, flags: u8) -> u32 {
    let before = if begins_anew(before, flags) {
        before & !ENDED
    } else {
        before
    };
    // What ends a connection, and what follows, is for connection tracking to see; unless that has
    // not seen the middle of it.
    let tracked = if before & state::STICKY == 0 && flags & (tcp::RST | tcp::FIN) != 0 {
        before & !state::BYPASS
    } else {
        before
    };
    if flags & tcp::RST != 0 {
        // A refusal is no answer: a flood of connections to closed ports must not look like
        // conversations.
        return tracked | state::RST;
    }
    // An end that ignored the RST goes on; one that did not would send another.
    let tracked = tracked & !state::RST;
    if flags & (tcp::SYN | tcp::ACK) == tcp::SYN | tcp::ACK {
        // Nor is an offer: a flood of connections to open ports must not either. The opener has to
        // take it up.
        return tracked & !state::FINISHED | state::OFFERED;
    }
    if tracked & state::OFFERED != 0 && tracked & state::ANSWERED == end.other().heard() {
        // Who made the offer goes on before it was taken up.
        return tracked;
    }
    let mut after = tracked | end.heard();
    if flags & tcp::SYN != 0 {
        after &= !(state::FINISHED | state::OFFERED);
    } else if tracked & state::OFFERED != 0 {
        after |= state::ANSWERED;
    }
    if flags & tcp::FIN != 0 {
        after |= end.fin();
    }
    after
}

global!(
    /// Copies what is known of the direction of the packet in [`Work::head`] to [`Work::half`]:
    /// whether its flow lives. One that was idle for too long is removed, and one whose pod is
    /// gone, or whose host port leads elsewhere.
    ///
    /// The two entries of a translated flow live as long as the livelier of them.
    pub fn look_up<I: Net>() -> bool {
        let Some(Work {
            head,
            place: Place { key, end },
            half: copy,
            state,
            since,
            partner_place,
            ..
        }) = I::work()
        else {
            return false;
        };
        let Some(flow) = find::<I>(key) else {
            return false;
        };
        memory::copy(copy, half(flow, *end));
        *state = flow.state;
        *since = flow.since;
        if flow.tag != key.tag() {
            return false;
        }
        if !is_owned::<I>(copy, head.tuple.src)
            || !host_port::is_current::<I>(&head.tuple, copy, *state)
        {
            withdraw::<I>();
            return false;
        }
        let tick = tick();
        if is_alive(flow, tick) {
            return true;
        }
        let translating = if copy.rewrite != 0 {
            &*copy
        } else {
            &*half(flow, end.other())
        };
        if translating.rewrite != 0 {
            partner_place.set(&outgoing::<I>(translating, head.tuple.protocol));
            if let Some(partner) = find::<I>(&partner_place.key)
                && is_alive(partner, tick)
            {
                return true;
            }
        }
        count(underpass_abi::counter::Counter::Expired);
        if is_shared(flow) {
            withdraw::<I>();
        } else {
            remove_all::<I>(key, flow);
        }
        false
    }
);

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

global!(
    /// Takes note of the packet in [`Work::head`]: when it was, and what it does to its flow's state.
    pub fn note<I: Net>() -> Noted {
        let Some(Work {
            head,
            place: Place { key, end },
            partner,
            partner_place,
            ..
        }) = I::work()
        else {
            return Noted::Incomplete;
        };
        let Some(flow) = find::<I>(key) else {
            return Noted::Incomplete;
        };
        let protocol = head.tuple.protocol;
        let tick = tick();
        let is_new = begins_anew(flow.state, head.tcp_flags);
        flow.state = after(flow.state, *end, head.tcp_flags);
        if is_new {
            unlearn(flow);
        }
        let half = half(flow, *end);
        *partner = outgoing::<I>(half, protocol);
        if half.rewrite == 0 {
            mature(flow, protocol, tick);
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
        let back = self::half(other, partner_place.end.other());
        if !is_answer_to::<I>(back, key, *end) {
            remove_one::<I>(key);
            return Noted::Gone;
        }
        if back.rewrite & rewrite::SRC != 0 && is_shared(other) {
            // The host's own flow, in the entry of a pod's: what that is like is the pod's.
            prolong(other, protocol, tick);
            mature(flow, protocol, tick);
            prolong(flow, protocol, tick);
            return Noted::Whole;
        }
        other.state = after(other.state, partner_place.end, head.tcp_flags);
        if is_new {
            unlearn(other);
        }
        if is_answered(flow, other) {
            flow.state |= state::ANSWERED;
            other.state |= state::ANSWERED;
        }
        mature(flow, protocol, tick);
        mature(other, protocol, tick);
        prolong(flow, protocol, tick);
        prolong(other, protocol, tick);
        Noted::Whole
    }
);

/// Whether packets of this half leave with the tuple of those that go to `end`, in the flow under `key`.
#[inline(always)]
fn is_answer_to<I: Net>(half: &Half<I::Addr>, key: &Key<I::Addr>, end: End) -> bool {
    let (own, other) = ((key.0.src, key.0.sport), (key.0.dst, key.0.dport));
    let (to, from) = match end {
        End::A => (own, other),
        End::B => (other, own),
    };
    (half.src, half.sport) == from && (half.dst, half.dport) == to
}

/// Whether two flows are in one entry, a direction of each: the inner one of the first has the tuple
/// that is the outer one of the second.
#[inline(always)]
pub const fn is_shared<A>(flow: &Flow<A>) -> bool {
    flow.halves[0].rewrite != 0 && flow.halves[1].rewrite != 0
}

/// Whether either entry of a translated flow heard both ends.
#[inline(always)]
const fn is_answered<A>(one: &Flow<A>, other: &Flow<A>) -> bool {
    one.state & state::ANSWERED == state::ANSWERED
        || other.state & state::ANSWERED == state::ANSWERED
}

/// Tells a conversation from what is none yet, or no more; gives an answered flow's quota back.
#[inline(always)]
fn mature<A>(flow: &mut Flow<A>, protocol: u8, tick: u32) {
    let is_answered = flow.state & state::ANSWERED == state::ANSWERED;
    let is_assured = is_answered
        && match protocol {
            protocol::TCP => !is_ending(flow.state),
            protocol::UDP | protocol::SCTP => tick.wrapping_sub(flow.since) >= STREAM,
            _ => false,
        };
    if is_assured {
        flow.state |= state::ASSURED;
    } else {
        flow.state &= !state::ASSURED;
    }
    if !is_answered {
        return;
    }
    flow.state &= !state::SURPLUS;
    let may_refund = tick.wrapping_sub(flow.since) < WINDOW;
    for end in [End::A, End::B] {
        if flow.state & end.charged() != 0 {
            flow.state &= !end.charged();
            // After that time the charge has run off.
            if may_refund {
                refund(half(flow, end).in_ifindex);
            }
        }
    }
}

global!(
    /// Removes the flow whose direction at [`Work::place`] is in [`Work::half`]: its entry and, if it is
    /// translated, the other one. Of an entry that is shared only its own half goes.
    pub fn withdraw<I: Net>() {
        let Some(Work {
            place: Place { key, end },
            half: copy,
            partner_place,
            ..
        }) = I::work()
        else {
            return;
        };
        if copy.rewrite != 0 {
            partner_place.set(&outgoing::<I>(copy, key.0.protocol));
            let back = partner_place.end.other();
            if let Some(partner) = find::<I>(&partner_place.key)
                && is_answer_to::<I>(half(partner, back), key, *end)
            {
                leave::<I>(&partner_place.key, partner, back);
            }
        }
        if let Some(flow) = find::<I>(key) {
            leave::<I>(key, flow, *end);
        }
    }
);

/// Removes the entry of a flow that has this half of it, or the half alone.
#[inline(always)]
fn leave<I: Net>(key: &Key<I::Addr>, flow: &mut Flow<I::Addr>, end: End) {
    /// What is left of an entry whose own flow went.
    const KEPT: u32 = state::ANSWERED | state::ASSURED;
    if !is_shared(flow) {
        remove_one::<I>(key);
        return;
    }
    let is_outer = half(flow, end.other()).rewrite & rewrite::SRC == 0;
    let own = half(flow, end);
    own.rewrite = 0;
    own.passed = 0;
    own.stamp = 0;
    own.action = if is_outer {
        action::TAKEN
    } else {
        action::NONE
    };
    if !is_outer {
        flow.state &= KEPT;
        prolong(flow, key.0.protocol, tick());
    }
}

/// Neither direction has passed.
#[inline(always)]
pub fn unlearn<A>(flow: &mut Flow<A>) {
    flow.state &= !(state::BYPASS | state::STICKY);
    flow.halves[0].passed = 0;
    flow.halves[1].passed = 0;
}

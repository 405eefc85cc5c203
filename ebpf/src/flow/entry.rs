//! One entry of a flow table: finding it, telling whether it still lives, and removing it.

use underpass_abi::{
    addr::Family as _,
    flow::{End, Flow, Half, Key, action, protocol, rewrite, state},
    quota::WINDOW,
};

use crate::{
    kernel::{
        global::global,
        maps::{constant, endpoint},
        net::Net,
    },
    model::{
        direction::{TWICE, half_of, is_answer_to, outgoing},
        state::{is_ending, is_shared},
    },
};

/// The entry under a key.
///
/// Since Linux 6.1 the memory of an entry that is removed may become another's while it is read: who
/// acts on what it says without a look at `Flow::tag` afterwards, must be able to stand the other's.
#[inline(always)]
pub fn find<I: Net>(key: &Key<I::Addr>) -> Option<&'static mut Flow<I::Addr>> {
    let flow = I::flows().get_ptr_mut(key)?;
    // SAFETY: an entry's memory stays readable, and an entry, until the program ends; any bytes are valid in it. Several CPUs may write
    // its fields, so what is longer than a word (an IPv6 address, an Ethernet header) may be found half written. Addresses are written
    // when the entry is made; of the rest a reader finds a wrong stamp or device beside it, and asks the stack.
    Some(unsafe { &mut *flow })
}

/// Whether a packet came within the flow's timeout.
#[inline(always)]
pub const fn is_alive<A>(flow: &Flow<A>, tick: u32) -> bool {
    flow.expires.wrapping_sub(tick).cast_signed() >= 0
}

/// A flow begins, before its draft is stored: how long it lives goes by when that was.
#[inline(always)]
pub fn begin<A>(draft: &mut Flow<A>, protocol: u8, tick: u32) {
    draft.since = tick;
    prolong(draft, protocol, tick);
}

/// A packet came: the flow lives for another timeout, which depends on its state.
#[inline(always)]
pub fn prolong<A>(flow: &mut Flow<A>, protocol: u8, tick: u32) {
    prolong_with(flow, flow.state, protocol, tick);
}

/// The same where another entry has a part of the flow's state. What was charged for and nobody has answered does not outlive what its quota goes by,
/// however often it is asked again: then it is a new flow, and charged for as that.
#[inline(always)]
pub fn prolong_with<A>(flow: &mut Flow<A>, both: u32, protocol: u8, tick: u32) {
    let lifetime = lifetime(flow.state, protocol);
    let until = tick + lifetime;
    let is_charged = both & (state::CHARGED_A | state::CHARGED_B) != 0;
    let last = flow.since + lifetime.max(WINDOW);
    flow.expires = if is_charged && until.wrapping_sub(last).cast_signed() > 0 {
        last
    } else {
        until
    };
}

/// Whether a flow that lives may give its tuple to another: TCP that both ends have closed and know to be closed, with nothing to send again, and what
/// was refused, or is no conversation, and has been silent for a while. (Not what was reset after an answer: the RST may be a stray one.)
#[inline(always)]
pub fn is_spare<A>(flow: &Flow<A>, protocol: u8, tick: u32) -> bool {
    let has = |bits: u32| flow.state & bits == bits;
    let silence = if protocol != protocol::TCP {
        constant!(timeout.quiet)
    } else if has(state::FINISHED) {
        LINGER
    } else if has(state::RST) && !has(state::ANSWERED) {
        constant!(timeout.quiet)
    } else {
        return false;
    };
    !has(state::ASSURED) && is_silent(flow, protocol, tick, silence)
}

/// Whether a flow that lives is over, as far as can be seen: its place is worth less than that of a question which waits for its answer.
#[inline(always)]
pub fn is_over<A>(flow: &Flow<A>, protocol: u8, tick: u32) -> bool {
    let has = |bits: u32| flow.state & bits == bits;
    if protocol != protocol::TCP {
        return has(state::ANSWERED)
            && !has(state::ASSURED)
            && is_silent(flow, protocol, tick, LINGER);
    }
    has(state::FINISHED) && !has(state::ASSURED)
        || has(state::RST) && is_silent(flow, protocol, tick, constant!(timeout.quiet))
}

/// Ticks in which whoever has not heard that his FIN, or his answer, arrived sends it again.
const LINGER: u32 = 3;

/// Whether no packet came for so many ticks.
#[inline(always)]
fn is_silent<A>(flow: &Flow<A>, protocol: u8, tick: u32, ticks: u32) -> bool {
    let last = flow.expires.wrapping_sub(timeout(flow.state, protocol));
    tick.wrapping_sub(last).cast_signed() >= ticks.cast_signed()
}

global!(
    /// [`timeout`], for who is not deep in calls.
    fn lifetime(flow_state: u32, protocol: u8) -> u32 {
        timeout(flow_state, protocol)
    }
);

/// Ticks without a packet after which a flow in this state expires.
#[inline(always)]
fn timeout(flow_state: u32, protocol: u8) -> u32 {
    let is_assured = flow_state & state::ASSURED != 0;
    match protocol {
        // A stray RST, which its receiver ignores, must not cost a connection its life.
        protocol::TCP if flow_state & state::RST != 0 => constant!(timeout.tcp_opening),
        protocol::TCP if is_ending(flow_state) => constant!(timeout.tcp_closing),
        // The other end may have vanished, and never says so. Connection tracking waits for a minute or two.
        protocol::TCP if flow_state & state::FINISHED != 0 => constant!(timeout.tcp_opening),
        protocol::TCP if is_assured => constant!(timeout.tcp_established),
        protocol::TCP => constant!(timeout.tcp_opening),
        protocol::UDP | protocol::SCTP if is_assured => constant!(timeout.udp),
        protocol::UDP | protocol::SCTP => constant!(timeout.udp_opening),
        _ => constant!(timeout.icmp),
    }
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
    let to_pod = match half.action {
        action::PEER => true,
        action::WIRE => false,
        // A masqueraded direction without bypass leads to an uplink.
        action::STACK => half.rewrite & TWICE != rewrite::SRC,
        _ => half.rewrite & rewrite::DST != 0,
    };
    !to_pod || half.out_ifindex == 0 || owns::<I>(half.out_ifindex, half.dst)
}

#[inline(always)]
fn owns<I: Net>(ifindex: u32, addr: I::Addr) -> bool {
    endpoint(addr.wide()).is_some_and(|endpoint| endpoint.ifindex == ifindex)
}

/// Whether a slot has this key.
#[inline(always)]
pub fn has_key<I: Net>(slot: &Key<I::Addr>, key: &Key<I::Addr>) -> bool {
    let (Key(slot), Key(key)) = (slot, key);
    slot.src == key.src
        && slot.dst == key.dst
        && slot.sport == key.sport
        && slot.dport == key.dport
        && slot.protocol == key.protocol
}

/// Removes a flow: the entry under `key`, and the other one of each direction that it translates. What the stack translates has
/// entries that live by themselves.
#[inline(always)]
pub fn remove_all<I: Net>(key: &Key<I::Addr>, flow: &Flow<I::Addr>) {
    // The others first: the memory of an entry that was removed may be another's at once.
    remove_partners::<I>(key, flow);
    remove_one::<I>(key);
}

#[inline(always)]
pub fn remove_partners<I: Net>(key: &Key<I::Addr>, flow: &Flow<I::Addr>) {
    if flow.state & state::BY_STACK != 0 {
        return;
    }
    for half in &flow.halves {
        if half.rewrite != 0 {
            let (partner, _) = outgoing::<I>(half, key.0.protocol).key();
            // Another flow's entry stays; the half that leads nowhere goes when a packet meets it.
            let is_own =
                |other: &Flow<I::Addr>| !is_shared(other) && other.state & state::BY_STACK == 0;
            if find::<I>(&partner).is_some_and(|other| is_own(other)) {
                remove_one::<I>(&partner);
            }
        }
    }
}

/// Whether `other`, whose `other_end` is the source of what the packets from `end` of a flow leave as, is of the same flow. What the stack
/// translates may have got the tuple that it had given to another flow before.
#[inline(always)]
pub fn is_partner<I: Net>(
    flow: &Flow<I::Addr>,
    key: &Key<I::Addr>,
    end: End,
    other: &mut Flow<I::Addr>,
    other_end: End,
) -> bool {
    if (flow.state ^ other.state) & state::BY_STACK != 0 {
        return false;
    }
    flow.state & state::BY_STACK == 0
        || is_answer_to::<I>(half_of(other, other_end.other()), key, end)
}

/// Removes one entry, and frees its slot at once: one that was written in this tick would be left
/// alone until the next.
#[inline(always)]
pub fn remove_one<I: Net>(key: &Key<I::Addr>) {
    if let Some(flow) = find::<I>(key)
        && let Some(slot) = I::slots().get_ptr_mut(flow.slot)
    {
        // SAFETY: a slot is a key; whoever reads one that is half written finds no such flow.
        let slot = unsafe { &mut *slot };
        if has_key::<I>(slot, key) {
            slot.0.protocol = 0;
        }
    }
    let _ = I::flows().remove(key);
}

//! One direction of a flow: what its packets leave with.

use underpass_abi::flow::{End, Flow, Half, Key, Tuple, rewrite, state};
use underpass_ebpf::ip::Ip;

/// [`Half::rewrite`](underpass_abi::flow::Half::rewrite) of both directions.
pub const TWICE: u8 = rewrite::SRC | rewrite::DST;

/// What [`Half::rewrite`] says of packets from a pod, to a host port that another pod serves.
pub const TO_PORT: u8 = rewrite::EARLY | rewrite::DST;

/// What [`Half::rewrite`] says of packets to a pod, from a host port that another pod serves.
pub const FROM_PORT: u8 = rewrite::EARLY | rewrite::SRC;

/// The half for packets from `end`.
#[inline(always)]
pub fn half_of<A>(flow: &mut Flow<A>, end: End) -> &mut Half<A> {
    match end {
        End::A => &mut flow.halves[0],
        End::B => &mut flow.halves[1],
    }
}

/// The tuple that packets of this half leave with.
#[inline(always)]
pub fn outgoing<I: Ip>(half: &Half<I::Addr>, protocol: u8) -> Tuple<I::Addr> {
    Tuple::new(protocol, half.src, half.sport, half.dst, half.dport)
}

/// Whether packets of this half leave with that tuple, whose protocol is theirs.
#[inline(always)]
pub fn leaves_as<I: Ip>(half: &Half<I::Addr>, tuple: &Tuple<I::Addr>) -> bool {
    half.src == tuple.src
        && half.dst == tuple.dst
        && half.sport == tuple.sport
        && half.dport == tuple.dport
}

/// Makes packets of this half leave with `tuple`.
#[inline(always)]
pub fn set_outgoing<I: Ip>(half: &mut Half<I::Addr>, tuple: &Tuple<I::Addr>) {
    half.src = tuple.src;
    half.dst = tuple.dst;
    half.sport = tuple.sport;
    half.dport = tuple.dport;
}

/// Whether packets of this half leave with the tuple of those that go to `end`, in the flow under `key`.
#[inline(always)]
pub fn is_answer_to<I: Ip>(half: &Half<I::Addr>, key: &Key<I::Addr>, end: End) -> bool {
    let Key(tuple) = key;
    match end {
        End::A => {
            half.src == tuple.dst
                && half.dst == tuple.src
                && half.sport == tuple.dport
                && half.dport == tuple.sport
        }
        End::B => {
            half.src == tuple.src
                && half.dst == tuple.dst
                && half.sport == tuple.sport
                && half.dport == tuple.dport
        }
    }
}

/// Whether a direction of a host port's flow is that of the container's answers.
#[inline(always)]
pub const fn is_answer(rewrites: u8, flow_state: u32) -> bool {
    rewrites & rewrite::SRC != 0 && (rewrites & rewrite::DST == 0 || flow_state & state::OUTER != 0)
}

/// Whether a direction that is translated is in the entry of the inner tuple.
#[inline(always)]
pub const fn is_inner(rewrites: u8, flow_state: u32) -> bool {
    rewrites & rewrite::SRC != 0 && (rewrites & rewrite::DST == 0 || flow_state & state::OUTER == 0)
}

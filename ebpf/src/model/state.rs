//! What packets do to a flow's state.

use underpass_abi::flow::{End, Flow, protocol, rewrite, state};
use underpass_ebpf::{
    ip::{Head, Ip},
    l4::tcp,
};

/// Whether a packet with these TCP flags asks for a connection.
#[inline(always)]
pub const fn begins(flags: u8) -> bool {
    flags & (tcp::SYN | tcp::ACK) == tcp::SYN
}

/// Whether a TCP connection was asked for, and nobody has said anything to that.
#[inline(always)]
pub const fn is_asking(flow_state: u32) -> bool {
    flow_state & (state::OFFERED | state::RST) == 0
        && flow_state & state::ANSWERED != state::ANSWERED
}

/// Whether a packet with these TCP flags begins a new connection on the tuple of one that has ended. Not what ends on the bypass, if all that
/// tells of its end is an RST: both may be anybody's who forges. When a pod at its end begins another, `begin_again` says so.
#[inline(always)]
pub const fn begins_anew(flow_state: u32, flags: u8) -> bool {
    begins(flags)
        && is_ending(flow_state)
        && (flow_state & state::STICKY == 0 || is_finished(flow_state))
}

/// Whether a TCP connection was ended by both ends. An RST that a pod itself has sent counts as that.
#[inline(always)]
pub const fn is_finished(flow_state: u32) -> bool {
    flow_state & state::FINISHED == state::FINISHED
}

/// The flow's state after a packet from `end` with these TCP flags (0 for other protocols).
#[inline(always)]
pub const fn after(before: u32, end: End, flags: u8) -> u32 {
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
    let was_answered = before & state::ANSWERED == state::ANSWERED;
    // A SYN says nothing of how a connection goes on that ends on the bypass: it may be anybody's who forges.
    let is_news = before & state::STICKY == 0 || flags & tcp::SYN == 0;
    // An end that ignored the RST goes on; one that did not would send another.
    let tracked = if is_news {
        tracked & !state::RST
    } else {
        tracked
    };
    if flags & (tcp::SYN | tcp::ACK) == tcp::SYN | tcp::ACK {
        // Nor is an offer: a flood of connections to open ports must not either. The opener has to
        // take it up. Where both ends have closed nobody has asked for it: a SYN would have begun the connection anew.
        let open = if is_news && !(was_answered && is_finished(tracked)) {
            tracked & !state::FINISHED
        } else {
            tracked
        };
        return open | state::OFFERED;
    }
    if tracked & state::OFFERED != 0 && tracked & state::ANSWERED == end.other().heard() {
        // Who made the offer goes on before it was taken up: to the end, where the question came with the SYN.
        return if flags & tcp::FIN != 0 {
            close(tracked, end)
        } else {
            tracked
        };
    }
    let mut after = tracked | end.heard();
    if flags & tcp::SYN != 0 {
        if is_news || !was_answered {
            after &= !(state::FINISHED | state::OFFERED);
        }
    } else if tracked & state::OFFERED != 0 {
        after |= state::ANSWERED;
    }
    if flags & tcp::FIN != 0 {
        after = close(after, end);
    } else if before & state::STICKY != 0 && flags & tcp::PSH != 0 {
        // Past connection tracking nobody looks at sequence numbers, so a FIN may be anybody's who forges. Who has closed sends no more data.
        after &= !end.fin();
    }
    after
}

/// Whether a packet from `end` with these TCP flags says nothing of a flow that is not known already.
#[inline(always)]
pub const fn says_nothing(before: u32, end: End, flags: u8) -> bool {
    !is_ending(before) && after(before, end, flags) == before
}

/// The state after a FIN. One that is sent again waits for its acknowledgement again.
#[inline(always)]
const fn close(before: u32, end: End) -> u32 {
    let closed = before | end.fin();
    if before & end.other().fin() != 0 {
        closed & !state::FIN_B_LAST | end.fin_last()
    } else {
        closed
    }
}

/// Whether a packet with these TCP flags is what acknowledges the second FIN of a connection that both ends had closed, as far as can be told without
/// sequence numbers, or comes after that. What the end that has closed last has sent before may come after its FIN, as another CPU sent that.
#[inline(always)]
pub const fn acknowledges_last(before: u32, end: End, flags: u8) -> bool {
    let is_acknowledged = before & state::ASSURED == 0;
    // Who sends his FIN again has not heard that it arrived.
    is_finished(before)
        && flags & tcp::FIN == 0
        && (is_acknowledged || before & state::FIN_B_LAST == end.other().fin_last())
}

/// Whether a TCP connection was reset, or ended by both ends.
#[inline(always)]
pub const fn is_ending(flow_state: u32) -> bool {
    flow_state & state::RST != 0 || is_finished(flow_state)
}

/// What is forgotten of a flow on whose tuple a new one begins.
pub const ENDED: u32 = state::ANSWERED
    | state::FINISHED
    | state::RST
    | state::OFFERED
    | state::BYPASS
    | state::STICKY
    | state::ASSURED
    | state::SYN
    | state::SYN_ACK
    | state::FIN_B_LAST;

/// Whether two flows are in one entry, a direction of each: the inner one of the first has the tuple
/// that is the outer one of the second.
#[inline(always)]
pub const fn is_shared<A>(flow: &Flow<A>) -> bool {
    flow.halves[0].rewrite != 0 && flow.halves[1].rewrite != 0
}

/// Whether the direction from `end` is in an entry that is another flow's: of the two in it the one that came later, and was given
/// another port for that. What the entry says besides is of the other flow; all that is known of this one its second entry says.
#[inline(always)]
pub const fn is_guest<A>(flow: &Flow<A>, end: End) -> bool {
    let (own, other) = match end {
        End::A => (&flow.halves[0], &flow.halves[1]),
        End::B => (&flow.halves[1], &flow.halves[0]),
    };
    is_shared(flow) && (own.rewrite & rewrite::ASIDE != 0 || other.rewrite & rewrite::SRC == 0)
}

/// Whether either entry of a translated flow heard both ends.
#[inline(always)]
pub const fn is_answered<A>(one: &Flow<A>, other: &Flow<A>) -> bool {
    one.state & state::ANSWERED == state::ANSWERED
        || other.state & state::ANSWERED == state::ANSWERED
}

/// Neither direction has passed.
#[inline(always)]
pub fn unlearn<A>(flow: &mut Flow<A>) {
    flow.state &= !(state::BYPASS | state::STICKY);
    flow.halves[0].passed = 0;
    flow.halves[1].passed = 0;
}

/// Whether a packet may begin a flow. An answer, or a refusal, belongs to one that is not known: it
/// can't be given an address. (With an echo reply a pod would have the requests that whoever gets it sends to this host from then on.)
#[inline(always)]
pub fn may_open<I: Ip>(head: &Head<I>) -> bool {
    let is_answer = match head.tuple.protocol {
        protocol::TCP => {
            head.tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN | tcp::ACK
                || head.tcp_flags & tcp::RST != 0
        }
        protocol::ICMP | protocol::ICMPV6 => head.icmp_type == I::ECHO_REPLY,
        _ => false,
    };
    !is_answer
}

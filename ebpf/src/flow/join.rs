//! Opening and closing the bypass of a flow: both directions or neither.

use underpass_abi::{
    counter::Counter,
    endpoint::device as flags,
    flow::{End, Flow, Half, action, protocol, rewrite, state},
    node::policy,
};

use crate::{
    flow::entry::{find, prolong, remove_one},
    kernel::{
        global::global,
        maps::{count, device, policy, tick},
        net::Net,
        work_area::WorkArea,
    },
    model::{
        direction::{half_of, is_answer_to, outgoing},
        state::{is_finished, is_guest, unlearn},
        work::Work,
    },
};

global!(
    /// Opens the bypass for the flow whose entry is at [`Work::place`], if both its directions have
    /// passed and connection tracking has seen what it must. This is the only place that does.
    pub fn join<I: Net>(work: &mut WorkArea<I>) {
        let Work {
            place,
            partner_place,
            ..
        } = &mut **work;
        let protocol = place.key.0.protocol;
        let Some(flow) = find::<I>(&place.key) else {
            return;
        };
        let (a, b) = (flow.halves[0].rewrite, flow.halves[1].rewrite);
        if a | b == 0 {
            if has_passed(&flow.halves[0]) && has_passed(&flow.halves[1]) {
                flow.state |= opened(flow.state, is_answered(flow.state), protocol);
            }
            return;
        }
        let own = if half_of(flow, place.end).rewrite != 0 {
            place.end
        } else {
            place.end.other()
        };
        let inner = &*half_of(flow, own);
        partner_place.set(&outgoing::<I>(inner, protocol));
        let Some(outer) = find::<I>(&partner_place.key) else {
            return;
        };
        if has_passed(inner) && has_passed(half_of(outer, partner_place.end.other())) {
            // The two keys may be turned differently, so who was heard can't be added up.
            let answered = is_answered(flow.state) || is_answered(outer.state);
            let bits = opened(flow.state | outer.state, answered, protocol);
            flow.state |= bits;
            outer.state |= bits;
        }
    }
);

/// Whether a packet of this direction came out of the stack as it had entered, and who sent it is
/// still there.
#[inline(always)]
fn has_passed<A>(half: &Half<A>) -> bool {
    half.passed != 0 && (half.in_ifindex == 0 || device(half.in_ifindex).is_some())
}

#[inline(always)]
const fn is_answered(flow_state: u32) -> bool {
    flow_state & state::ANSWERED == state::ANSWERED
}

/// The bits of a flow whose directions have both passed: of TCP only while it is open, if its opening
/// came out of the stack as well, and where connection tracking is liberal only after all three
/// packets of that.
#[inline(always)]
fn opened(flow_state: u32, is_answered: bool, protocol: u8) -> u32 {
    const SHOWN: u32 = state::SYN | state::SYN_ACK;
    if protocol != protocol::TCP {
        return state::BYPASS;
    }
    if flow_state & (state::RST | state::FINISHED) != 0 || flow_state & SHOWN != SHOWN {
        return 0;
    }
    if policy() & policy::LIBERAL == 0 {
        // What the stack translates can't end on the bypass: connection tracking has the translation.
        return if flow_state & state::BY_STACK == 0 {
            state::BYPASS | state::STICKY
        } else {
            0
        };
    }
    if is_answered { state::BYPASS } else { 0 }
}

global!(
    /// One direction of the flow at [`Work::place`] has no bypass any more: both go back to the stack,
    /// until both have passed again. What connection tracking would not know again stays.
    pub fn suspend<I: Net>(work: &mut WorkArea<I>) {
        let Some(flow) = entry(work) else {
            return;
        };
        if must_stay(flow) {
            return;
        }
        if flow.state & state::BYPASS != 0 {
            count(Counter::Suspended);
            count_coming_back(flow);
        }
        for_each_entry(work, unlearn);
    }
);

/// Counts a flow that loses the bypass, if it was to end there.
#[inline(always)]
fn count_coming_back<A>(flow: &Flow<A>) {
    if flow.state & state::STICKY != 0 {
        count(Counter::CameBack);
    }
}

/// Whether connection tracking would not know the flow again, so that it ends on the bypass.
#[inline(always)]
fn must_stay<A>(flow: &Flow<A>) -> bool {
    flow.state & state::STICKY != 0 && policy() & policy::XFRM == 0
}

/// Whether no packet that the stack carries says anything of how the flow goes: those that seem to be of it, a SYN above all, may be anybody's
/// who forges, be they refused by both ends, and connection tracking lets one that seems to begin the connection again pass.
#[inline(always)]
pub fn is_closed_to_news<A>(flow: &Flow<A>) -> bool {
    must_stay(flow) && !is_finished(flow.state)
}

/// [`is_closed_to_news`] of the flow at [`Work::place`].
#[inline(always)]
pub fn ends_on_bypass<I: Net>(work: &WorkArea<I>) -> bool {
    entry(work).is_some_and(|flow| is_closed_to_news(flow))
}

global!(
    /// A pod sends a SYN in the direction at [`Work::place`]: if the flow was a conversation, it is none of the pod's any more, and goes by the
    /// stack until that lets something through. (Until it is one, the SYN may be sent again. Where the place is another flow's, for its
    /// other direction, the SYN is none of that.)
    pub fn begin_again<I: Net>(work: &mut WorkArea<I>) {
        const CONVERSATION: u32 = state::STICKY | state::ANSWERED;
        let Some(flow) = entry(work) else {
            return;
        };
        let end = work.place.end;
        let is_conversation = flow.state & CONVERSATION == CONVERSATION && !is_guest(flow, end);
        if is_conversation && !matches!(half_of(flow, end).action, action::NONE | action::TAKEN) {
            // What has passed stays: connection tracking must not see the middle of the next one.
            for_each_entry(work, |entry| {
                entry.state &= !(state::BYPASS | state::STICKY);
            });
        }
    }
);

global!(
    /// Connection tracking may not know the flow at [`Work::place`] any more: it ends on the bypass.
    pub fn stick<I: Net>(work: &mut WorkArea<I>) {
        for_each_entry(work, |entry| entry.state |= state::STICKY);
    }
);

global!(
    /// The stack used the tuple in [`Work::head`] for something else than what was learned: it decides
    /// again.
    ///
    /// A translated flow keeps its translation, which does not depend on who forwards; it goes by the
    /// stack from now on. So does one that a masqueraded pod has with the world, which opened it: without its entry the answers would be
    /// masqueraded. The packet may be anybody's who forges.
    pub fn forget<I: Net>(work: &mut WorkArea<I>) {
        let Some(flow) = entry(work) else {
            return;
        };
        if flow.state & state::BYPASS != 0 {
            count(Counter::Forgotten);
            count_coming_back(flow);
        }
        for_each_entry(work, unlearn);
        let is_plain = flow.state & state::OUTER == 0
            && flow.halves[0].rewrite | flow.halves[1].rewrite == 0
            && flow.halves[0].action != action::OTHERS;
        if is_plain && !keeps_source(flow) {
            remove_one::<I>(&work.place.key);
        }
    }
);

/// Whether a masqueraded pod's packets of a flow without translation would get another source without it.
#[inline(always)]
fn keeps_source<A>(flow: &Flow<A>) -> bool {
    let [one, other] = &flow.halves;
    let is_world = one.in_ifindex == 0 || other.in_ifindex == 0;
    is_world
        && device(one.in_ifindex | other.in_ifindex)
            .is_some_and(|pod| pod.flags & flags::MASQUERADE != 0)
}

global!(
    /// What was learned of the flow at [`Work::place`], if the stack translates it, is not so any more: somebody else has the tuple.
    pub fn forget_translated<I: Net>(work: &mut WorkArea<I>) {
        if entry(work).is_some_and(|flow| flow.state & state::BY_STACK != 0) {
            for_each_entry(work, unlearn);
            remove_one::<I>(&work.place.key);
        }
    }
);

global!(
    /// The same where the tuple is one that the stack has given to somebody: the entry stays, and says no more than that.
    pub fn vacate<I: Net>(work: &mut WorkArea<I>) {
        for_each_entry(work, unlearn);
        if let Some(flow) = entry(work)
            && flow.state & state::BY_STACK != 0
        {
            flow.state = state::BY_STACK;
            for half in &mut flow.halves {
                half.rewrite = 0;
                half.action = action::NONE;
            }
            prolong(flow, work.place.key.0.protocol, tick());
        }
    }
);

/// The entry at [`Work::place`].
#[inline(always)]
fn entry<I: Net>(work: &WorkArea<I>) -> Option<&'static mut Flow<I::Addr>> {
    find::<I>(&work.place.key)
}

/// Changes the entry at [`Work::place`], and the other one of each direction that it translates.
#[inline(always)]
fn for_each_entry<I: Net>(work: &mut WorkArea<I>, change: impl Fn(&mut Flow<I::Addr>)) {
    let Some(flow) = entry(work) else {
        return;
    };
    let Work {
        place,
        partner_place,
        ..
    } = &mut **work;
    change(flow);
    for (end, half) in [(End::A, &flow.halves[0]), (End::B, &flow.halves[1])] {
        if half.rewrite & (rewrite::SRC | rewrite::DST) != 0 {
            partner_place.set(&outgoing::<I>(half, place.key.0.protocol));
            // Another flow may have its tuple by now.
            if let Some(partner) = find::<I>(&partner_place.key)
                && is_answer_to::<I>(half_of(partner, partner_place.end.other()), &place.key, end)
            {
                change(partner);
            }
        }
    }
}

//! Learning what the stack translates: a packet comes out with another tuple than it entered with, and its fingerprint names the
//! one that it had. Whoever decided that (kube-proxy, Docker, anybody's rules, IPVS) goes on deciding.
//!
//! ```text
//!   entered as     came out as          entry under      half of the source
//!   client → VIP   client → backend     client ↔ VIP     leaves as client → backend
//!   backend → client   VIP → client     client ↔ backend leaves as VIP → client
//! ```
//!
//! Both entries are [`BY_STACK`](state::BY_STACK), and the bypass takes over when the second direction is the exact reverse of the
//! first.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    endpoint::{Device, device as flags},
    flow::{SIGNED, Tuple, action, protocol, rewrite, state},
    node::policy,
    quota::WORLD,
};

use crate::{
    filter::{
        anti_spoofing::is_dhcp,
        quota::{charge, refund},
    },
    flow::{
        entry::{find, prolong, remove_all, remove_one, remove_partners},
        join::join,
        learn::{enter, is_reachable, leave_to_pod, pass, queue, show_opening},
        table::{At, Share, Stored, store},
        tracking::note,
    },
    kernel::{
        container,
        global::{global, number},
        maps::{count, device, endpoint, policy, tick},
        memory,
        net::Net,
        skb::Skb,
        work_area::WorkArea,
    },
    model::{
        direction::{half_of, is_answer_to, leaves_as, set_outgoing},
        state::{ENDED, begins, unlearn},
        work::{Place, Work},
    },
    trace,
};

number!(
    /// What there is under the tuple that a packet entered with.
    enum Known {
        /// A flow that the stack does not translate: somebody else's business.
        Others,
        /// No entry, and none is wanted.
        Nothing,
        /// An entry for packets that the stack translates.
        Entry,
    }
);

global!(
    /// Learns the direction of the packet in [`Work::head`], which the stack has given another tuple on its way from the pod behind
    /// `from_ifindex` to the one behind `to_ifindex`. False if it is not known which tuple it had.
    pub fn learn_translated<I: Net>(
        work: &mut WorkArea<I>,
        ctx: *mut __sk_buff,
        from_ifindex: u32,
        to_ifindex: u32,
    ) -> bool {
        if !work.head.plain
            && find::<I>(&work.place.key).is_some_and(|flow| flow.state & state::BY_STACK != 0)
        {
            // A fragment, or one with options, says nothing of the others.
            return true;
        }
        let Some(owner) = entered(work, &Skb::new(ctx)) else {
            return false;
        };
        // At `partner` is what it had, at `partner_place` and in `head` what it has.
        let (Some(from), Some(to)) = (device(owner), device(to_ifindex)) else {
            return false;
        };
        let is_forged = !container::stands_in(from_ifindex, owner)
            || endpoint(work.head.tuple.dst.wide())
                .is_none_or(|endpoint| endpoint.ifindex != to_ifindex);
        if is_forged || !may_bypass(work, from, to) {
            return false;
        }
        let old = work.partner;
        work.place.set(&old);
        match prepare_translated(work, owner) {
            Known::Others => {
                let Work { head, place, .. } = &mut **work;
                place.set(&head.tuple);
                return false;
            }
            Known::Nothing => return true,
            Known::Entry => {}
        }
        let Work { head, place, .. } = &mut **work;
        let Some(flow) = find::<I>(&place.key) else {
            return true;
        };
        let half = half_of(flow, place.end);
        set_outgoing::<I>(half, &head.tuple);
        half.rewrite = differences(&old, &head.tuple);
        enter::<I>(half, owner, from);
        leave_to_pod(half, to_ifindex, to);
        half.action = action::PEER;
        pass(half, 0);
        note(work);
        show_opening(work);
        join(work);
        trace::learned(&work.place.key.0, Skb::new(ctx).ifindex());
        true
    }
);

/// Finds the tuple that the packet in [`Work::head`] entered the stack with, and puts it at [`Work::partner`]. Returns the host veth of
/// the pod that has its source.
#[inline(always)]
fn entered<I: Net>(work: &mut WorkArea<I>, skb: &Skb) -> Option<u32> {
    let hash = skb.hash();
    let signed = I::signed(hash % SIGNED)?;
    // SAFETY: an element of this CPU, which no other program looks at meanwhile.
    let signed = unsafe { &*signed };
    if signed.hash != hash || signed.tuple.protocol != work.head.tuple.protocol {
        return None;
    }
    memory::copy(&mut work.partner, &signed.tuple);
    endpoint(work.partner.src.wide()).map(|endpoint| endpoint.ifindex)
}

/// Whether the bypass may carry such packets.
#[inline(always)]
fn may_bypass<I: Net>(work: &WorkArea<I>, from: &Device, to: &Device) -> bool {
    let tuple = &work.head.tuple;
    from.flags & to.flags & flags::POD != 0
        && from.flags & to.flags & flags::BYPASS != 0
        && is_reachable(queue(from.flags, to), to)
        && work.head.plain
        && !is_dhcp(tuple.protocol, tuple.dport)
        && policy() & policy::XFRM == 0
        && (tuple.protocol != protocol::TCP || policy() & policy::LIBERAL != 0)
}

/// What is replaced.
#[inline(always)]
fn differences<A: underpass_abi::addr::Family>(old: &Tuple<A>, new: &Tuple<A>) -> u8 {
    let mut differences = 0;
    if old.src != new.src || old.sport != new.sport {
        differences |= rewrite::SRC;
    }
    if old.dst != new.dst || old.dport != new.dport {
        differences |= rewrite::DST;
    }
    differences
}

global!(
    /// Finds or makes the entry at [`Work::place`] for packets that leave as [`Work::head`] says.
    fn prepare_translated<I: Net>(work: &mut WorkArea<I>, owner: u32) -> Known {
        let Work {
            head,
            place: Place { key, end },
            partner,
            partner_place,
            ..
        } = &mut **work;
        partner_place.set(&head.tuple);
        let mut is_answer = false;
        if let Some(other) = find::<I>(&partner_place.key) {
            let back = half_of(other, partner_place.end.other());
            let is_taken = back.rewrite != 0;
            let is_reverse = is_taken && is_answer_to::<I>(back, key, *end);
            if other.state & state::BY_STACK != 0 {
                is_answer = is_reverse;
                if is_taken && !is_reverse {
                    // Of another flow, which had the tuple before.
                    remove_all::<I>(&partner_place.key, other);
                }
            } else if other.halves[0].rewrite | other.halves[1].rewrite != 0 {
                return Known::Others;
            } else {
                // The stack uses the tuple for something else than what was learned.
                remove_one::<I>(&partner_place.key);
            }
        }
        if let Some(flow) = find::<I>(key) {
            let is_others = half_of(flow, end.other()).rewrite != 0;
            let half = half_of(flow, *end);
            let is_unused = half.rewrite == 0;
            let has_moved = !is_unused && !leaves_as::<I>(half, &head.tuple);
            if flow.state & state::BY_STACK != 0 {
                if is_unused && is_others {
                    // Two flows in one entry would share a state: this one stays in the stack.
                    return Known::Nothing;
                }
                if has_moved {
                    half_of(flow, *end).action = action::NONE;
                    // The stack has another answer now: what is known is another flow's.
                    remove_partners::<I>(key, flow);
                    unlearn(flow);
                    flow.state &= !ENDED;
                }
                return Known::Entry;
            }
            if flow.halves[0].rewrite | flow.halves[1].rewrite != 0 {
                return Known::Others;
            }
            remove_one::<I>(key);
        }
        // Connections that began before we looked stay in the stack, and answers to what was not learned.
        let is_opening = (partner.dst != head.tuple.dst || partner.dport != head.tuple.dport)
            && (head.tuple.protocol != protocol::TCP || begins(head.tcp_flags));
        if !is_answer && !is_opening {
            return Known::Nothing;
        }
        make(work, owner, is_answer)
    }
);

/// Makes the entry at [`Work::place`]. Who opens the flow pays for it, until it is answered: from the account of flows that need not be
/// remembered, so that nobody is refused a translation of ours for it.
#[inline(always)]
fn make<I: Net>(work: &mut WorkArea<I>, owner: u32, is_answer: bool) -> Known {
    let account = owner | WORLD;
    if !is_answer && !charge(account) {
        count(Counter::OverQuota);
        return Known::Nothing;
    }
    let Work {
        draft: flow, head, ..
    } = &mut **work;
    let client = head.tuple.dst;
    memory::clear(flow);
    flow.state = state::BY_STACK;
    prolong(flow, head.tuple.protocol, tick());
    let stored = store(work, At::Place, Share::Pods);
    if is_answer {
        if let Some(client) = endpoint(client.wide()) {
            refund(client.ifindex | WORLD);
        }
    } else if stored != Stored::Done {
        refund(account);
    }
    if stored == Stored::Done {
        Known::Entry
    } else {
        Known::Nothing
    }
}

/// What was learned of the flow at [`Work::place`] is not so any more: both its entries go.
#[inline(always)]
pub fn forget<I: Net>(work: &WorkArea<I>) {
    let key = &work.place.key;
    if let Some(flow) = find::<I>(key) {
        remove_all::<I>(key, flow);
    }
}

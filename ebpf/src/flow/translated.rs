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
    flow::{Tuple, action, protocol, rewrite, state},
    node::policy,
    quota::{TRANSLATED, WORLD},
};

use crate::{
    filter::{
        anti_spoofing::is_dhcp,
        quota::{charge, refund},
    },
    flow::{
        entry::{begin, find, remove_one},
        join::{ends_on_bypass, forget, is_closed_to_news, join, suspend, vacate},
        learn::{self, pass, show_opening},
        signed,
        table::{At, Share, Stored, store},
        tracking::note,
        way::{enter, is_reachable, leave_to_pod, queue, settle_on_wire},
    },
    kernel::{
        ETHERNET, container,
        global::{global, number},
        maps::{count, device, endpoint, policy, tick},
        memory,
        net::Net,
        route::Asked,
        skb::Skb,
        work_area::WorkArea,
    },
    model::{
        direction::{half_of, is_answer_to, leaves_as, set_outgoing},
        state::{ENDED, begins},
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
        /// No entry: the packet opens a flow.
        Opening,
        /// No entry: the packet is an answer.
        Answer,
        /// Another flow had the tuple that the packet has now.
        Taken,
        /// An entry of a flow that had another translation until now.
        Moved,
        /// An entry for packets that the stack translates.
        Entry,
    }
);

global!(
    /// Learns the direction of the packet in [`Work::head`], which the stack has given another tuple on its way from the device
    /// `from_ifindex` to the pod behind `to_ifindex`, or out of that uplink. False if it is not known which tuple it had.
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
        let skb = Skb::new(ctx);
        let Some(arrival) = signed::entered(work, &skb, from_ifindex) else {
            return false;
        };
        // At `partner` is what it had, at `partner_place` and in `head` what it has.
        let owner = endpoint(work.partner.src.wide()).map(|owner| owner.ifindex);
        if owner.is_some_and(|owner| !container::stands_in(arrival, owner)) {
            return false;
        }
        let (Some(from), Some(to)) = (device(owner.unwrap_or(arrival)), device(to_ifindex)) else {
            return false;
        };
        if !may_come(from, owner.is_some())
            || !may_bypass(work)
            || !may_go(work, &skb, owner, from.flags, to)
        {
            return false;
        }
        let old = work.partner;
        // From the world, by anybody who forges: be it that this connection's packets entered like this, or that they come out like this. If it
        // begins the connection again, the pod's answer says so. A source that the stack has chosen nobody else can: connection tracking has forgotten
        // the connection that had it, and given it away.
        let is_clients_own = old.src == work.head.tuple.src && old.sport == work.head.tuple.sport;
        if owner.is_none() && is_clients_own && ends_on_bypass(work) {
            return true;
        }
        work.place.set(&old);
        if owner.is_none() && ends_on_bypass(work) {
            return true;
        }
        let payer = owner.unwrap_or(to_ifindex | WORLD) | TRANSLATED;
        let mut known = prepare_translated(work);
        if known == Known::Taken {
            locate(work);
            vacate(work);
            work.place.set(&old);
            known = prepare_translated(work);
        }
        if known == Known::Others {
            locate(work);
            return false;
        }
        if known == Known::Moved {
            forget(work);
        }
        let is_there = match known {
            Known::Entry | Known::Moved => true,
            // Who opens a flow pays for it, until it is answered.
            Known::Opening => make(work, payer),
            Known::Answer => make(work, 0),
            _ => false,
        };
        if !is_there {
            return true;
        }
        let Work {
            head, place, route, ..
        } = &mut **work;
        let Some(flow) = find::<I>(&place.key) else {
            return true;
        };
        let half = half_of(flow, place.end);
        set_outgoing::<I>(half, &head.tuple);
        half.rewrite = differences(&old, &head.tuple);
        enter(half, owner.unwrap_or(0), from);
        if to.flags & flags::POD != 0 {
            leave_to_pod(half, to_ifindex, to);
            half.action = action::PEER;
        } else {
            half.out_ifindex = to_ifindex;
            settle_on_wire(half, route, to.flags);
            half.action = action::WIRE;
        }
        pass(half, if owner.is_some() { 0 } else { arrival });
        // A SYN that begins the flow again ends what was shown of the one before.
        note(work);
        show_opening(flow, work.head.tcp_flags);
        join(work);
        trace::learned(&work.place.key.0, skb.ifindex());
        true
    }
);

/// Sets [`Work::place`] to that of the packet in [`Work::head`].
#[inline(always)]
fn locate<I: Net>(work: &mut WorkArea<I>) {
    let Work { head, place, .. } = &mut **work;
    place.set(&head.tuple);
}

/// Whether the bypass may carry what comes from this device, which is a pod's if so: not what has no Ethernet header.
#[inline(always)]
fn may_come(from: &Device, is_pod: bool) -> bool {
    if is_pod {
        const WANTED: u32 = flags::POD | flags::BYPASS;
        from.flags & WANTED == WANTED
    } else {
        from.flags & (flags::POD | flags::LAYER3) == 0
    }
}

/// Whether the bypass may carry packets like that in [`Work::head`].
#[inline(always)]
fn may_bypass<I: Net>(work: &WorkArea<I>) -> bool {
    let tuple = &work.head.tuple;
    work.head.plain
        && !is_dhcp(tuple.protocol, tuple.dport)
        && policy() & policy::XFRM == 0
        && (tuple.protocol != protocol::TCP || policy() & policy::LIBERAL != 0)
}

/// Whether the bypass reaches the device that the packet in [`Work::head`] leaves by, which had the tuple in [`Work::partner`]: a pod
/// from anywhere, an uplink from the pod behind `owner`.
#[inline(always)]
fn may_go<I: Net>(
    work: &mut WorkArea<I>,
    skb: &Skb,
    owner: Option<u32>,
    from: u32,
    to: &Device,
) -> bool {
    if to.flags & flags::POD != 0 {
        return to.flags & flags::BYPASS != 0
            && is_reachable(queue(from, to), to)
            && endpoint(work.head.tuple.dst.wide())
                .is_some_and(|endpoint| endpoint.ifindex == skb.ifindex());
    }
    let Some((owner, pod)) = owner.and_then(|owner| Some((owner, device(owner)?))) else {
        return false;
    };
    if work.head.l3 != ETHERNET {
        return false;
    }
    // The stack has looked for a way after it had translated the destination, and before the source.
    let Work { head, partner, .. } = &mut **work;
    let (src, sport) = (head.tuple.src, head.tuple.sport);
    (head.tuple.src, head.tuple.sport) = (partner.src, partner.sport);
    let agrees = learn::agrees(work, skb, owner, pod, Asked::Way);
    let tuple = &mut work.head.tuple;
    (tuple.src, tuple.sport) = (src, sport);
    agrees
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
    /// Finds the entry at [`Work::place`] for packets that leave as [`Work::head`] says, and removes what is in its way.
    fn prepare_translated<I: Net>(work: &mut WorkArea<I>) -> Known {
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
                    return Known::Taken;
                }
            } else if other.halves[0].rewrite | other.halves[1].rewrite != 0 {
                return Known::Others;
            } else if other.halves[0].action != action::OTHERS {
                // The stack uses the tuple for something else than what was learned.
                remove_one::<I>(&partner_place.key);
            }
        }
        // Connections that began before we looked stay in the stack, and answers to what was not learned.
        let is_opening = if head.tuple.protocol == protocol::TCP {
            begins(head.tcp_flags)
        } else {
            partner.dst != head.tuple.dst || partner.dport != head.tuple.dport
        };
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
                    flow.state &= !ENDED;
                    return Known::Moved;
                }
                return Known::Entry;
            }
            if flow.halves[0].rewrite | flow.halves[1].rewrite != 0 {
                return Known::Others;
            }
            if flow.halves[0].action == action::OTHERS {
                // The stack has given somebody an address of the node, to speak with or to be spoken to.
                return if begins(head.tcp_flags) {
                    Known::Opening
                } else {
                    Known::Answer
                };
            }
            remove_one::<I>(key);
        }
        if is_answer {
            Known::Answer
        } else if is_opening {
            Known::Opening
        } else {
            Known::Nothing
        }
    }
);

global!(
    /// Makes the entry at [`Work::place`]: whether it is there. If there is an account to pay from, it does until the flow is answered; no
    /// such account has anything to do with the flows that must be remembered.
    fn make<I: Net>(work: &mut WorkArea<I>, account: u32) -> bool {
        if account != 0 && !charge(account) {
            count(Counter::OverQuota);
            return false;
        }
        let Work {
            draft: flow,
            head,
            place,
            ..
        } = &mut **work;
        let charged = if account == 0 { 0 } else { place.end.charged() };
        if let Some(others) = find::<I>(&place.key) {
            // The port that was noted is free at no moment.
            let is_noted = others.halves[0].action == action::OTHERS;
            if is_noted {
                others.state = state::BY_STACK | charged;
                begin(others, head.tuple.protocol, tick());
                others.halves[0].action = action::NONE;
                others.halves[1].action = action::NONE;
            }
            return is_noted;
        }
        memory::clear(flow);
        flow.state = state::BY_STACK | charged;
        begin(flow, head.tuple.protocol, tick());
        let is_there = store(work, At::Place, Share::Pods) == Stored::Done;
        if account != 0 && !is_there {
            refund(account);
        }
        is_there
    }
);

global!(
    /// The packet in [`Work::head`], from the device `from` or from this host (0), has the tuple of something that was learned, and it is not
    /// known how it came by it. That has to be seen again, or is over if the packet begins a connection. The entry stays: anybody can have the
    /// node send a stray packet with such a tuple, and connections are learned from their beginning.
    pub fn doubt<I: Net>(work: &mut WorkArea<I>, from: u32) {
        let Some(flow) = find::<I>(&work.place.key) else {
            return;
        };
        if flow.state & state::BY_STACK == 0
            || is_closed_to_news(flow) && is_impostor::<I>(work.head.tuple.src, from)
        {
            return;
        }
        if begins(work.head.tcp_flags) {
            vacate(work);
        } else {
            suspend(work);
        }
    }
);

/// Whether a packet that came by the device `from` has the source address of a container that is not there.
#[inline(always)]
fn is_impostor<I: Net>(src: I::Addr, from: u32) -> bool {
    from != 0 && endpoint(src.wide()).is_some_and(|owner| !container::is_same(from, owner.ifindex))
}

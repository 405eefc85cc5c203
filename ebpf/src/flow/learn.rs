//! Learning: a packet left the stack with the tuple it entered with, so whatever decides in the
//! stack let it through unchanged. [`join`](crate::flow::join) then sees whether the other direction has passed, too.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    endpoint::{Device, device as flags},
    flow::{End, Flow, Half, action, protocol, rewrite, state},
    node::policy,
    quota::WORLD,
};
use underpass_ebpf::{
    l4::{Kind, tcp},
    packet::Load as _,
};

use crate::{
    filter::{
        anti_spoofing::{is_dhcp, same_mac},
        quota::{charge, refund},
    },
    flow::{
        entry::{begin, find},
        join::{forget_translated, is_closed_to_news, join, suspend},
        signed::Sign,
        table::{At, Share, Stored, store},
        tracking::note,
        way::{enter, is_reachable, leave_to_pod, queue, settle_on_wire},
    },
    kernel::{
        container,
        global::{global, number},
        maps::{count, device, endpoint, policy, tick},
        memory,
        net::Net,
        route::{Asked, find_route},
        skb::{SENT, Skb},
        work_area::WorkArea,
    },
    model::{
        direction::{TWICE, half_of, leaves_as, outgoing, set_outgoing},
        state::begins,
        work::{Place, Work},
    },
    trace,
};

number!(
    /// What is known of a flow after a packet of it was learned.
    pub enum Learned {
        /// The packet may be one to translate.
        Perhaps,
        /// It is as it has to be.
        Plain,
    }
);

impl Learned {
    /// What bits of [`rewrite`] say, of its direction.
    #[inline(always)]
    const fn with(rewrites: u8) -> Self {
        match rewrites {
            0 => Self::Plain,
            _ => Self::Perhaps,
        }
    }
}

global!(
    /// Learns the direction of the packet in [`Work::head`], which the stack carried from the device
    /// `from_ifindex` to the pod behind `to_ifindex`.
    pub fn learn_to_pod<I: Net>(
        work: &mut WorkArea<I>,
        ctx: *mut __sk_buff,
        sign: Sign,
        from_ifindex: u32,
        to_ifindex: u32,
    ) -> Learned {
        let end = work.place.end;
        // A forged source, or an address that moved since, is nothing to remember.
        let owner = endpoint(work.head.tuple.src.wide()).map(|owner| owner.ifindex);
        if owner.is_some_and(|owner| !container::is_same(from_ifindex, owner)) {
            return Learned::Perhaps;
        }
        let is_alike = owner.is_none_or(|owner| container::stands_in(from_ifindex, owner));
        let from_ifindex = owner.unwrap_or(from_ifindex);
        let (Some(from), Some(to)) = (device(from_ifindex), device(to_ifindex)) else {
            return Learned::Perhaps;
        };
        let from_pod = from.flags & flags::POD != 0;
        let target = endpoint(work.head.tuple.dst.wide());
        let is_its = target.is_some_and(|endpoint| endpoint.ifindex == to_ifindex);
        if from_pod != owner.is_some() || !is_its {
            return Learned::Perhaps;
        }
        let is_wanted =
            to.flags & flags::BYPASS != 0 && (!from_pod || from.flags & flags::BYPASS != 0);
        let bypass = is_wanted
            && is_alike
            && is_reachable(queue(from.flags, to), to)
            && !is_dhcp(work.head.tuple.protocol, work.head.tuple.dport)
            && (from_pod || from.flags & flags::LAYER3 == 0)
            && policy() & policy::XFRM == 0;
        if is_wanted && !bypass {
            suspend(work);
        }
        // Who begins with options or extension headers goes on with them: such packets have no bypass.
        let bypass = bypass && work.head.plain;
        // What comes from the world to a masqueraded pod is noted even without bypass: its replies must
        // keep their source.
        let is_needed = !from_pod && to.flags & flags::MASQUERADE != 0;
        if !bypass && !is_needed {
            return Learned::Perhaps;
        }
        let payer = match sign {
            Sign::Translated => Payer::Translator,
            Sign::AsItCame if from_pod => Payer::Opener(from_ifindex),
            Sign::AsItCame => Payer::Reached {
                pod: to_ifindex,
                must_be: is_needed,
            },
        };
        let Some(flow) = open(work, end, payer) else {
            return Learned::Perhaps;
        };
        let uplink = if from_pod { 0 } else { from_ifindex };
        let (own, opposite) = (
            half_of(flow, end).rewrite,
            half_of(flow, end.other()).rewrite,
        );
        if own & TWICE == TWICE || opposite & TWICE == TWICE {
            return Learned::Perhaps;
        }
        if is_closed_to_news(flow) {
            return Learned::with(own);
        }
        if own | opposite != 0 && !bypass {
            return Learned::Perhaps;
        }
        if own != 0 {
            // An answer from a host port, to a pod of this node: `to_pod` is about to translate it.
            let back = half_of(flow, end);
            if back.rewrite & rewrite::EARLY == 0 {
                return Learned::Perhaps;
            }
            back.queue = from.flags & SENT;
            leave_to_pod(back, to_ifindex, to);
            back.action = action::PEER;
            pass(back, uplink);
        } else if opposite != 0 {
            // It was translated before the stack had it: what the bypass goes by is in the other entry.
            let sent = outgoing::<I>(half_of(flow, end.other()), work.head.tuple.protocol);
            work.partner_place.set(&sent);
            let Some(outer) = find::<I>(&work.partner_place.key) else {
                return Learned::Perhaps;
            };
            let into = half_of(outer, work.partner_place.end.other());
            if into.rewrite & rewrite::DST == 0 || !leaves_as::<I>(into, &work.head.tuple) {
                return Learned::Perhaps;
            }
            into.queue = from.flags & SENT;
            leave_to_pod(into, to_ifindex, to);
            into.action = action::PEER;
            pass(into, uplink);
        } else {
            let forward = half_of(flow, end);
            set_outgoing::<I>(forward, &work.head.tuple);
            enter(forward, if from_pod { from_ifindex } else { 0 }, from);
            leave_to_pod(forward, to_ifindex, to);
            forward.action = if bypass { action::PEER } else { action::STACK };
            if bypass {
                pass(forward, uplink);
            }
            let back = half_of(flow, end.other());
            if back.action == action::NONE && !from_pod {
                set_outgoing::<I>(back, &work.head.tuple.reversed());
                enter(back, to_ifindex, to);
                back.action = action::STACK;
            }
        }
        conclude(work, flow);
        trace::learned(&work.place.key.0, Skb::new(ctx).ifindex());
        Learned::with(own)
    }
);

global!(
    /// Learns the way of the packet in [`Work::head`], of a flow that is not known yet, from the pod
    /// behind `pod_ifindex` out of an uplink, by which it goes as in [`leave_by_wire`].
    pub fn learn_to_wire<I: Net>(
        work: &mut WorkArea<I>,
        ctx: *mut __sk_buff,
        pod_ifindex: u32,
        uplink: u32,
    ) {
        let end = work.place.end;
        if open(work, end, Payer::Opener(pod_ifindex)).is_none() {
            return;
        }
        trace::learned(&work.place.key.0, Skb::new(ctx).ifindex());
        leave_by_wire(work, pod_ifindex, uplink);
    }
);

global!(
    /// The flow of the packet in [`Work::head`], which came out of this uplink unchanged, has a way to
    /// the world: that in [`Work::route`], as [`agrees`] has just found.
    pub fn leave_by_wire<I: Net>(work: &mut WorkArea<I>, pod_ifindex: u32, uplink: u32) {
        let Work {
            head,
            place: Place { key, end },
            route,
            ..
        } = &mut **work;
        let Some(flow) = find::<I>(key) else {
            return;
        };
        let out = half_of(flow, *end);
        if out.rewrite & TWICE == TWICE {
            return;
        }
        if out.rewrite == 0 {
            set_outgoing::<I>(out, &head.tuple);
            let Some(pod) = device(pod_ifindex) else {
                return;
            };
            enter(out, pod_ifindex, pod);
        }
        out.out_ifindex = uplink;
        let kind = device(uplink).map_or(0, |uplink| uplink.flags);
        settle_on_wire(out, route, kind);
        out.action = action::WIRE;
        pass(out, 0);
        conclude(work, flow);
    }
);

/// Notes what of TCP's opening the packet is that was learned, and opens the bypass if its direction was the last one: without a translation
/// the flow says so itself.
#[inline(always)]
fn conclude<I: Net>(work: &mut WorkArea<I>, flow: &mut Flow<I::Addr>) {
    show_opening(flow, work.head.tcp_flags);
    let is_translated = flow.halves[0].rewrite | flow.halves[1].rewrite != 0;
    if is_translated || half_of(flow, work.place.end.other()).passed != 0 {
        join(work);
    }
}

/// Notes that a packet with these flags came out of the stack, if it is one that opens TCP.
#[inline(always)]
pub(super) fn show_opening<A>(flow: &mut Flow<A>, tcp_flags: u8) {
    flow.state |= match tcp_flags & (tcp::SYN | tcp::ACK) {
        tcp::SYN => state::SYN,
        SYN_ACK => state::SYN_ACK,
        _ => return,
    };
}

const SYN_ACK: u8 = tcp::SYN | tcp::ACK;

/// The stack let a packet of this direction through.
#[inline(always)]
pub(super) fn pass<A>(half: &mut Half<A>, uplink: u32) {
    if half.passed == 0 {
        count(Counter::Learned);
    }
    half.passed = tick();
    half.uplink = uplink;
}

/// Whether the bypass may take over what the stack sends out of this uplink.
///
/// Not where the routing table, asked the simple way, gives another answer than the stack gave:
/// then there is more to the decision (marks, policy, several next hops) than we could repeat.
#[inline(always)]
pub fn agrees<I: Net>(
    work: &mut WorkArea<I>,
    skb: &Skb,
    pod_ifindex: u32,
    pod: &Device,
    asked: Asked,
) -> bool {
    if pod.flags & flags::BYPASS == 0
        || work.head.kind != Kind::Flow
        || !is_ethernet_uplink(skb.ifindex())
        || policy() & policy::XFRM != 0
    {
        return false;
    }
    let Ok(destination) = skb.load::<[u16; 3]>(0) else {
        return false;
    };
    find_route(work, skb.raw(), pod_ifindex, asked).is_some_and(|way| way.get() == skb.ifindex())
        && same_mac(destination, work.route.eth[0])
}

#[inline(always)]
fn is_ethernet_uplink(ifindex: u32) -> bool {
    device(ifindex).is_some_and(|device| device.flags & (flags::POD | flags::LAYER3) == 0)
}

/// Who pays for a flow that begins: the pod behind a host veth.
#[derive(Clone, Copy)]
enum Payer {
    /// That began it.
    Opener(u32),
    /// That the world reached; the flow must be remembered, or need not be.
    Reached { pod: u32, must_be: bool },
    /// Who translated the packet before the stack had it: its flow was known then. If it is not any more, it was no conversation and has made room
    /// meanwhile: its tuple is not one that anybody has sent, and the pod must not answer with the reverse of it.
    Translator,
}

/// The flow at [`Work::place`] as it is known, or an empty one, heard from `end`. Of a pod that is
/// over its quota no new flow is remembered; one from the world that must be is the first to go.
#[inline(always)]
fn open<I: Net>(
    work: &mut WorkArea<I>,
    end: End,
    payer: Payer,
) -> Option<&'static mut Flow<I::Addr>> {
    if let Some(flow) = find::<I>(&work.place.key) {
        if flow.state & state::BY_STACK != 0 {
            // Somebody uses the tuple without a translation. What connection tracking calls invalid is not translated either.
            if !matches!(payer, Payer::Opener(_)) && is_closed_to_news(flow) {
                return None;
            }
            if work.head.tuple.protocol != protocol::TCP || begins(work.head.tcp_flags) {
                forget_translated(work);
            } else {
                suspend(work);
            }
            return None;
        }
        if flow.halves[0].rewrite | flow.halves[1].rewrite != 0 {
            // Whoever translates takes note.
            return Some(flow);
        }
        note(work);
        return find::<I>(&work.place.key);
    }
    let (account, may_be_surplus) = match payer {
        Payer::Opener(pod) => (pod, false),
        Payer::Reached { pod, must_be } => (pod | WORLD, must_be),
        Payer::Translator => return None,
    };
    let is_full = !charge(account);
    if is_full && !may_be_surplus {
        count(Counter::OverQuota);
        return None;
    }
    let Work {
        draft: flow, head, ..
    } = &mut **work;
    memory::clear(flow);
    flow.state = end.heard();
    match payer {
        Payer::Opener(pod) => {
            flow.state |= end.charged();
            half_of(flow, end).in_ifindex = pod;
        }
        Payer::Reached { .. } if is_full => flow.state |= state::SURPLUS,
        Payer::Reached { .. } | Payer::Translator => flow.state |= end.charged(),
    }
    begin(flow, head.tuple.protocol, tick());
    if store(work, At::Place, Share::Pods) != Stored::Done {
        if !is_full {
            refund(account);
        }
        return None;
    }
    find::<I>(&work.place.key)
}

global!(
    /// Notes a flow of the host's own stack, in [`Work::head`], that leaves with the address that pods'
    /// flows are given: its port is another container's. Netfilter asks nobody when it translates, so
    /// who masquerades beside it has to look.
    pub fn note_others<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) {
        let Work {
            draft: flow,
            head,
            place,
            ..
        } = &mut **work;
        memory::clear(flow);
        flow.state = place.end.heard();
        flow.halves[0].action = action::OTHERS;
        flow.halves[1].action = action::OTHERS;
        begin(flow, head.tuple.protocol, tick());
        if store(work, At::Place, Share::Pods) != Stored::Done {
            return;
        }
        count(Counter::OthersPort);
        trace::learned(&work.head.tuple, Skb::new(ctx).ifindex());
    }
);

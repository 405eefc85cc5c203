//! What leaves by an uplink: pods' packets are learned and masqueraded here, and nowhere else.
//! Nothing of a masqueraded pod gets out with the pod's address.

use core::num::NonZeroU32;

use aya_ebpf::bindings::{__sk_buff, TC_ACT_STOLEN};
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    endpoint::{Device, device as flags},
    flow::{action, protocol, rewrite, state},
};
use underpass_ebpf::{
    ip::{Head, Piece},
    l4::Kind,
    packet::Load as _,
};

use crate::{
    bypass::straight,
    flow::{
        join::{ends_on_bypass, forget, forget_translated, suspend},
        learn::{self, learn_to_wire, leave_by_wire, note_others},
        signed,
        tracking::{look_up, note, withdraw},
        translated::{doubt, learn_translated},
    },
    fragment::{
        self,
        reorder::{self, keep},
    },
    icmp_error::error_to_wire,
    kernel::{
        ETHERNET, container,
        global::{global, number},
        maps::{device, endpoint},
        net::Net,
        route::Asked,
        skb::Skb,
        verdict::{Step, Verdict},
        work_area::WorkArea,
    },
    model::state::{begins, begins_anew, may_open},
    nat::{
        mapping,
        masquerade::{self, Way},
        translate,
    },
    parse::{parse_packet, parse_quote},
};

number!(
    /// What [`open`] made of a packet.
    enum Opened {
        /// Nothing: the stack may have translated it.
        Not,
        /// It is as it leaves.
        Done,
    }
);

number!(
    /// What is left to do of a packet.
    enum Left {
        /// It is of no flow that is known.
        Unknown,
        /// It is an ICMP error.
        Error,
    }
);

/// IPv4 and IPv6; the network header is at `l3`.
#[inline(always)]
pub fn ip<I: Net>(ctx: *mut __sk_buff, l3: u32) -> Step<Verdict> {
    let mut skb = Skb::new(ctx);
    if skb.is_bypassed() {
        skb.unmark();
        return Ok(Verdict::STACK);
    }
    if skb.is_straight() {
        straight::leave::<I>(ctx, l3)?;
    }
    // SAFETY: this is the only view, but for those that it is lent for.
    let Some(mut work) = (unsafe { WorkArea::<I>::open() }) else {
        return Ok(Verdict::STACK);
    };
    let work = &mut work;
    match send_known(work, ctx, l3)? {
        Left::Error => {
            let is_quoted = parse_quote(work, ctx);
            error_to_wire(work, ctx, is_quoted)
        }
        Left::Unknown => {
            if open(work, ctx)? == Opened::Not {
                learn_or_doubt(work, ctx);
            }
            Ok(Verdict::STACK)
        }
    }
}

/// The same on an uplink without Ethernet headers. Some devices have others before the network header (IP over InfiniBand, GRE to many ends), of
/// which nothing is known: nobody can translate what is behind them.
#[inline(always)]
pub fn without_ethernet<I: Net>(ctx: *mut __sk_buff) -> Step<Verdict> {
    match beginning::<I>(ctx) {
        Beginning::NetworkHeader => ip::<I>(ctx, 0),
        Beginning::Other => Ok(Verdict::STACK),
        Beginning::OtherOfPod => Ok(Verdict::dropped(Counter::DropUntranslated)),
    }
}

number!(
    /// What a packet begins with.
    enum Beginning {
        /// The network header.
        NetworkHeader,
        /// A header that we don't know, before that.
        Other,
        /// The same, and it must not leave as it is.
        OtherOfPod,
    }
);

global!(
    /// Looks at what is before the network header. In a frame of its own: what it compares would be too much beside what follows.
    fn beginning<I: Net>(ctx: *mut __sk_buff) -> Beginning {
        match Skb::new(ctx).hidden_network_header::<I::Header>() {
            None => Beginning::NetworkHeader,
            Some(header) if must_be_translated::<I>(&header) => Beginning::OtherOfPod,
            Some(_) => Beginning::Other,
        }
    }
);

global!(
    /// Learns the direction of the packet in [`Work::head`] if the stack has translated it. If that is not so, what is known of the
    /// tuple that the packet has is in doubt.
    fn learn_or_doubt<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) {
        let skb = Skb::new(ctx);
        let from = skb.ingress_ifindex();
        if from == 0 || !learn_translated(work, ctx, from, skb.ifindex()) {
            doubt(work, from);
        }
    }
);

global!(
    /// Translates a packet of a flow that is known as the flow says, and learns it if it came through
    /// the stack unchanged.
    fn send_known<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff, l3: u32) -> Step<Left> {
        let skb = Skb::new(ctx);
        if !parse_packet(work, ctx, l3) {
            return Err(unparsed::<I>(ctx, l3));
        }
        if work.head.kind == Kind::Error {
            return Ok(Left::Error);
        }
        reorder::lead(work, ctx, reorder::Way::OUT)?;
        if work.head.kind != Kind::Flow || !look_up(work) || work.state & state::BY_STACK != 0 {
            return Ok(Left::Unknown);
        }
        // If it says whose it is, that has been looked at.
        let owner = NonZeroU32::new(work.half.in_ifindex)
            .or_else(|| NonZeroU32::new(endpoint(work.head.tuple.src.wide())?.ifindex))
            .map(NonZeroU32::get);
        match owner.and_then(|owner| Some((owner, device(owner)?))) {
            Some((owner, pod)) => known_of_pod(work, &skb, owner, pod),
            None => known_of_host(work, &skb),
        }
    }
);

global!(
    /// What becomes of a packet without a tuple: nobody can translate it. It may have had one in `from_pod`, in what followed its end.
    fn unparsed<I: Net>(ctx: *mut __sk_buff, l3: u32) -> Verdict {
        let Ok(header) = Skb::new(ctx).load::<I::Header>(l3) else {
            return Verdict::STACK;
        };
        if must_be_translated::<I>(&header) {
            Verdict::dropped(Counter::DropMalformed)
        } else {
            Verdict::STACK
        }
    }
);

/// Tells whether a packet with this header must not leave as it is, as it has the address of a pod that is masqueraded.
#[inline(always)]
fn must_be_translated<I: Net>(header: &I::Header) -> bool {
    let (src, dst) = I::addresses(header);
    let pod = endpoint(src.wide()).and_then(|owner| device(owner.ifindex));
    pod.is_some_and(|pod| masquerade::is_wanted::<I>(pod, dst))
}

#[inline(always)]
fn known_of_pod<I: Net>(work: &mut WorkArea<I>, skb: &Skb, owner: u32, pod: &Device) -> Step<Left> {
    if work.half.action == action::NONE {
        return Ok(Left::Unknown);
    }
    let mut from = skb.ingress_ifindex();
    if from != owner {
        from = container::sender(work.head.tuple.src.wide(), from);
    }
    if from != owner && pod.flags & flags::FOREIGN == 0 {
        // In its name, by another (without `antiSpoof`), who has no say in its flow.
        if work.half.rewrite & rewrite::SRC != 0 {
            translate::as_known(work, skb)?;
        }
        return Err(Verdict::STACK);
    }
    if !mapping::note(work)? || is_given_up(work, skb) {
        return Ok(Left::Unknown);
    }
    // Without a bypass nobody has signed it.
    if pod.flags & flags::BYPASS != 0 {
        if !signed::is_unchanged(skb, &work.head) {
            forget(work);
        } else if work.head.plain {
            // Nothing takes the bypass to a device without Ethernet headers.
            let may_leave = work.head.l3 == ETHERNET
                && (from != owner || container::stands_in(skb.ingress_ifindex(), owner));
            if may_leave && learn::agrees(work, skb, from, pod, Asked::Way) {
                leave_by_wire(work, from, skb.ifindex());
            } else {
                suspend(work);
            }
        }
    }
    if work.half.rewrite & rewrite::SRC != 0 {
        translate::as_known(work, skb)?;
    } else {
        // The stack may have put an IPv6 datagram together and cut it again: with another
        // identification than that under which it came from the pod.
        fragment::remember(&work.head);
    }
    Err(Verdict::STACK)
}

/// Whether a pod's masqueraded flow gets another mapping with the packet in [`Work::head`], because
/// its address may be one that the node has no more: where a new connection begins on the ports of
/// one that has ended, and where the route has changed before anybody answered. The old one is
/// removed then. (Connection tracking forgets both as well.)
#[inline(always)]
fn is_given_up<I: Net>(work: &mut WorkArea<I>, skb: &Skb) -> bool {
    if work.half.rewrite != rewrite::SRC || work.state & state::PORT != 0 {
        return false;
    }
    // An opener that has an answer already must not lose it. A SYN that is sent again may meet its SYN-ACK on the way: what the pod
    // takes up then is what the server offered to the old address.
    let begins = work.head.tuple.protocol != protocol::TCP || begins(work.head.tcp_flags);
    let is_answered =
        work.state & state::ANSWERED == state::ANSWERED || work.state & state::OFFERED != 0;
    let has_moved = work.half.out_ifindex != 0 && work.half.out_ifindex != skb.ifindex();
    let is_over =
        begins_anew(work.state, work.head.tcp_flags) || begins && !is_answered && has_moved;
    if is_over {
        withdraw(work);
    }
    is_over
}

/// A packet of the host, or one that it forwards for others. If a pod's flow has its tuple on this
/// uplink, it must take another.
#[inline(always)]
fn known_of_host<I: Net>(work: &mut WorkArea<I>, skb: &Skb) -> Step<Left> {
    if work.half.rewrite & rewrite::SRC != 0 {
        if !mapping::note(work)? {
            return Ok(Left::Unknown);
        }
        translate::as_known(work, skb)?;
    } else if work.half.action == action::TAKEN {
        return Ok(Left::Unknown);
    } else if work.half.action == action::OTHERS {
        note(work);
        return Ok(Left::Unknown);
    }
    Err(Verdict::STACK)
}

global!(
    /// Opens a flow that is not known yet, of a pod or of the host on a tuple that is taken, with the
    /// packet in [`Work::head`].
    fn open<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> Step<Opened> {
        let skb = Skb::new(ctx);
        match endpoint(work.head.tuple.src.wide()) {
            Some(owner) => open_of_pod(work, &skb, owner.ifindex),
            None => open_of_host(work, &skb),
        }
    }
);

#[inline(always)]
fn open_of_pod<I: Net>(work: &mut WorkArea<I>, skb: &Skb, owner: u32) -> Step<Opened> {
    let Some(pod) = device(owner) else {
        return Ok(Opened::Done);
    };
    let is_masqueraded = masquerade::is_wanted::<I>(pod, work.head.tuple.dst);
    let asked = masquerade::asks::<I>(pod, is_masqueraded);
    // Whether it has a bypass before what takes longer to find out.
    let may_learn = pod.flags & flags::BYPASS != 0
        && work.head.kind == Kind::Flow
        && work.head.plain
        && container::stands_in(skb.ingress_ifindex(), owner)
        && work.head.l3 == ETHERNET
        && signed::is_unchanged(skb, &work.head)
        && learn::agrees(work, skb, owner, pod, asked);
    if !is_masqueraded {
        if may_learn {
            learn_to_wire(work, skb.raw(), owner, skb.ifindex());
            return Ok(Opened::Done);
        }
        return Ok(may_be_translated(&work.head));
    }
    let from = skb.ingress_ifindex();
    if from != 0
        && pod.flags & flags::FOREIGN == 0
        && !container::is_same(from, owner)
        && ends_on_bypass(work)
    {
        // In the pod's name, by another: what the stack translates goes on.
        return Err(Verdict::dropped(Counter::DropNoFlow));
    }
    // The stack may translate such packets as well, but both would have to be known.
    forget_translated(work);
    let kind = work.head.kind;
    match kind {
        Kind::Flow => {}
        Kind::Later if keep(work, skb.raw()) => {
            return Err(Verdict::sent(TC_ACT_STOLEN.cast_unsigned()));
        }
        Kind::Later => return Err(Verdict::dropped(Counter::DropFragment)),
        _ => return Err(Verdict::dropped(Counter::DropUntranslated)),
    }
    if !may_open(&work.head) {
        // The later pieces do not say what they are of.
        if work.head.piece == Piece::First {
            fragment::refuse(&work.head);
        }
        return Err(Verdict::dropped(Counter::DropNoFlow));
    }
    masquerade::assign(
        work,
        skb,
        owner,
        skb.ifindex(),
        if may_learn { Way::Routed } else { Way::Other },
    )?;
    // What the bypass learns overwrites the tuple to leave with.
    translate::translate(work, skb)?;
    if may_learn {
        leave_by_wire(work, owner, skb.ifindex());
    }
    Ok(Opened::Done)
}

#[inline(always)]
fn open_of_host<I: Net>(work: &mut WorkArea<I>, skb: &Skb) -> Step<Opened> {
    if work.head.kind == Kind::Flow {
        if skb.is_masqueraded() && is_left_behind(work, skb.raw()) {
            return Err(Verdict::dropped(Counter::DropUntranslated));
        }
        if !look_up(work) {
            if is_of_others(skb, &work.head) {
                note_others(work, skb.raw());
            }
        } else if work.half.action == action::TAKEN {
            if !may_open(&work.head) {
                // It says to somebody that here is no such flow: with another port it would say so to nobody.
                return Ok(Opened::Done);
            }
            masquerade::assign(work, skb, 0, skb.ifindex(), Way::Other)?;
            translate::translate(work, skb)?;
            return Ok(Opened::Done);
        }
    }
    Ok(may_be_translated(&work.head))
}

global!(
    /// Whether the packet in [`Work::head`], of a masqueraded container, whose source is no container's now, is of one that is gone: it has waited for this
    /// uplink's next hop to be resolved, for seconds perhaps, and nobody knows any more which address it should leave with.
    fn is_left_behind<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> bool {
        let skb = Skb::new(ctx);
        signed::has_sum(&skb, &work.head) || signed::is_unchanged(&skb, &work.head)
    }
);

#[inline(always)]
fn may_be_translated<I: Net>(head: &Head<I>) -> Opened {
    if head.kind == Kind::Flow {
        Opened::Not
    } else {
        Opened::Done
    }
}

/// Whether the host's own stack gave the packet, which it forwards for somebody else, the address
/// that pods' flows are given.
#[inline(always)]
fn is_of_others<I: Net>(skb: &Skb, head: &Head<I>) -> bool {
    skb.ingress_ifindex() != 0
        && device(skb.ifindex())
            .and_then(I::masquerade_address)
            .is_some_and(|ours| ours == head.tuple.src)
}

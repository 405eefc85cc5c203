//! What leaves by an uplink: pods' packets are learned and masqueraded here, and nowhere else.
//! Nothing of a masqueraded pod gets out with the pod's address.

use aya_ebpf::bindings::{__sk_buff, TC_ACT_STOLEN};
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    endpoint::{Device, device as flags},
    flow::{Half, action, protocol, rewrite, state},
};
use underpass_ebpf::{ip::Head, l4::Kind};

use crate::{
    ETHERNET,
    call::Call,
    flow::{entry, learn},
    fragment::reorder,
    kernel::{
        maps::{Work, device, endpoint},
        route,
        skb::Skb,
        verdict::{ERROR, NEXT, PASS, Step, Verdict, code},
    },
    nat::{
        hairpin,
        masquerade::{self, Way},
        translate,
    },
    parse::PARSED,
};

/// What [`known`] returns for a packet of no flow that is known; no return code of tc.
const UNKNOWN: i32 = -5;

/// IPv4 and IPv6; the network header is at `l3`.
#[inline(always)]
pub fn ip<I: Call>(ctx: *mut __sk_buff, l3: u32) -> i32 {
    match I::known(ctx, l3) {
        ERROR => I::error_out(ctx, I::parse_quoted(ctx)),
        UNKNOWN => I::open(ctx),
        code => code,
    }
}

/// A packet of a flow that is known is translated as the flow says, and learned if it came through
/// the stack unchanged.
#[inline(always)]
pub fn known<I: Call>(ctx: *mut __sk_buff, l3: u32) -> i32 {
    let mut skb = Skb::new(ctx);
    if skb.is_bypassed() {
        skb.unmark();
        return PASS;
    }
    let Some(Work { head, half, .. }) = I::work() else {
        return PASS;
    };
    if I::parse_whole(ctx, l3) != PARSED {
        return PASS;
    }
    if head.kind == Kind::Error {
        return ERROR;
    }
    match reorder::lead::<I>(ctx, reorder::Way::Out) {
        NEXT => {}
        verdict => return verdict,
    }
    if head.kind != Kind::Flow || I::copy_live() == entry::ABSENT {
        return UNKNOWN;
    }
    let owner = endpoint(head.tuple.src.wide()).map(|owner| owner.ifindex);
    match owner.and_then(|owner| Some((owner, device(owner)?))) {
        Some((owner, pod)) => code(known_of_pod(&skb, head, half, owner, pod)),
        None => code(known_of_host::<I>(&skb, half)),
    }
}

#[inline(always)]
fn known_of_pod<I: Call>(
    skb: &Skb,
    head: &Head<I>,
    half: &Half<I::Addr>,
    owner: u32,
    pod: &Device,
) -> Step<Verdict> {
    if half.action == action::NONE {
        return Err(Verdict::Sent(UNKNOWN));
    }
    let from = skb.ingress_ifindex();
    if from != owner && pod.flags & flags::FOREIGN == 0 {
        // In its name, by another (without `antiSpoof`), who has no say in its flow.
        if half.rewrite & rewrite::SRC != 0 {
            translate::as_known::<I>(skb)?;
        }
        return Ok(Verdict::Stack);
    }
    if !hairpin::note::<I>() || is_given_up::<I>(skb, head, half) {
        return Err(Verdict::Sent(UNKNOWN));
    }
    if !is_unchanged(skb, head) {
        I::forget();
    } else if pod.flags & flags::BYPASS != 0 && head.plain {
        if learn::agrees(skb, head, from, pod, route::WAY) {
            I::leave_by_wire(from, skb.ifindex());
        } else {
            I::suspend();
        }
    }
    if half.rewrite & rewrite::SRC != 0 {
        translate::as_known::<I>(skb)?;
    }
    Ok(Verdict::Stack)
}

/// Whether a pod's masqueraded flow gets another mapping with the packet in [`Work::head`], because
/// its address may be one that the node has no more: where a new connection begins on the ports of
/// one that has ended, and where the route has changed before anybody answered. The old one is
/// removed then. (Connection tracking forgets both as well.)
#[inline(always)]
fn is_given_up<I: Call>(skb: &Skb, head: &Head<I>, half: &Half<I::Addr>) -> bool {
    let Some(Work { state, .. }) = I::work() else {
        return false;
    };
    if half.rewrite != rewrite::SRC || *state & state::PORT != 0 {
        return false;
    }
    // An opener that has an answer already must not lose it.
    let begins = head.tuple.protocol != protocol::TCP || entry::begins(head.tcp_flags);
    let is_answered = *state & state::ANSWERED == state::ANSWERED;
    let has_moved = half.out_ifindex != 0 && half.out_ifindex != skb.ifindex();
    let is_over = entry::begins_anew(*state, head.tcp_flags) || begins && !is_answered && has_moved;
    if is_over {
        I::withdraw();
    }
    is_over
}

/// A packet of the host, or one that it forwards for others. If a pod's flow has its tuple on this
/// uplink, it must take another.
#[inline(always)]
fn known_of_host<I: Call>(skb: &Skb, half: &Half<I::Addr>) -> Step<Verdict> {
    if half.rewrite & rewrite::SRC != 0 {
        translate::as_known::<I>(skb)?;
    } else if half.action == action::TAKEN {
        return Err(Verdict::Sent(UNKNOWN));
    } else if half.action == action::OTHERS {
        I::note();
    }
    Ok(Verdict::Stack)
}

/// A packet of a flow that is not known yet, of a pod or of the host on a tuple that is taken, in
/// [`Work::head`].
#[inline(always)]
pub fn open<I: Call>(ctx: *mut __sk_buff) -> i32 {
    let Some(Work { head, .. }) = I::work() else {
        return PASS;
    };
    let skb = Skb::new(ctx);
    code(match endpoint(head.tuple.src.wide()) {
        Some(owner) => open_of_pod(&skb, head, owner.ifindex),
        None => open_of_host(&skb, head),
    })
}

#[inline(always)]
fn open_of_pod<I: Call>(skb: &Skb, head: &Head<I>, owner: u32) -> Step<Verdict> {
    let Some(pod) = device(owner) else {
        return Ok(Verdict::Stack);
    };
    let is_masqueraded = masquerade::is_wanted::<I>(pod, head.tuple.dst);
    let asked = masquerade::asks::<I>(pod, is_masqueraded);
    let may_learn = head.kind == Kind::Flow
        && head.plain
        && skb.ingress_ifindex() == owner
        && is_unchanged(skb, head)
        && learn::agrees(skb, head, owner, pod, asked);
    if !is_masqueraded {
        if may_learn {
            I::learn_wire(skb.raw(), owner, skb.ifindex());
        }
        return Ok(Verdict::Stack);
    }
    match head.kind {
        Kind::Flow => {}
        Kind::Later if I::keep(skb.raw()) == reorder::KEPT => {
            return Err(Verdict::Sent(TC_ACT_STOLEN));
        }
        Kind::Later => return Err(Verdict::Drop(Counter::DropFragment)),
        _ => return Err(Verdict::Drop(Counter::DropUntranslated)),
    }
    if !masquerade::may_open(head) {
        return Err(Verdict::Drop(Counter::DropNoFlow));
    }
    masquerade::assign(
        skb,
        head,
        owner,
        skb.ifindex(),
        if may_learn { Way::Routed } else { Way::Other },
    )?;
    // What the bypass learns overwrites the tuple to leave with.
    translate::translate::<I>(skb)?;
    if may_learn {
        I::leave_by_wire(owner, skb.ifindex());
    }
    Ok(Verdict::Stack)
}

#[inline(always)]
fn open_of_host<I: Call>(skb: &Skb, head: &Head<I>) -> Step<Verdict> {
    if head.kind != Kind::Flow {
        return Ok(Verdict::Stack);
    }
    if I::copy_live() == entry::ABSENT {
        if is_of_others(skb, head) {
            I::note_others(skb.raw());
        }
    } else if I::work().is_some_and(|work| work.half.action == action::TAKEN) {
        masquerade::assign(skb, head, 0, skb.ifindex(), Way::Other)?;
        translate::translate::<I>(skb)?;
    }
    Ok(Verdict::Stack)
}

/// Whether the host's own stack gave the packet, which it forwards for somebody else, the address
/// that pods' flows are given.
#[inline(always)]
fn is_of_others<I: Call>(skb: &Skb, head: &Head<I>) -> bool {
    skb.ingress_ifindex() != 0
        && device(skb.ifindex())
            .and_then(I::masquerade_address)
            .is_some_and(|ours| ours == head.tuple.src)
}

/// Whether the stack carried the packet from its pod to here without a change.
#[inline(always)]
fn is_unchanged<I: Call>(skb: &Skb, head: &Head<I>) -> bool {
    head.l3 == ETHERNET && learn::is_unchanged(skb, head)
}

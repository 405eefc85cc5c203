//! What leaves by an uplink: pods' packets are learned and masqueraded here, and nowhere else. Nothing of a masqueraded pod gets out with
//! the pod's address.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    endpoint::Endpoint,
    flow::{Half, Tuple, action, rewrite},
};
use underpass_ebpf::{ip::Head, l4::Kind};

use crate::{
    ETHERNET,
    call::Call,
    maps::{Work, device, endpoint},
    skb::Skb,
    stage::{
        flow, fragment, learn,
        masquerade::{self, Way},
        parse::PARSED,
        translate::translate,
    },
    verdict::{PASS, Step, Verdict, code},
};

/// IPv4 and IPv6; the network header is at `l3`.
#[inline(always)]
pub fn leave<I: Call>(ctx: *mut __sk_buff, l3: u32) -> i32 {
    let mut skb = Skb::new(ctx);
    if skb.is_bypassed() {
        skb.clear_bypassed();
        return PASS;
    }
    let Some(Work { head, half, partner, .. }) = I::work() else { return PASS };
    if I::parse_whole(ctx, l3) != PARSED {
        return PASS;
    }
    if head.kind == Kind::Error {
        return I::error_out(ctx, I::parse_quoted(ctx));
    }
    fragment::complete(head);
    code(match endpoint(head.tuple.src.wide()) {
        Some(owner) => of_pod(&skb, head, half, partner, owner),
        None => of_host(&skb, head, half, partner),
    })
}

#[inline(always)]
fn of_pod<I: Call>(skb: &Skb, head: &Head<I>, half: &Half<I::Addr>, partner: &mut Tuple<I::Addr>, owner: Endpoint) -> Step<Verdict> {
    let Some(pod) = device(owner.ifindex) else { return Ok(Verdict::Stack) };
    let unchanged = head.l3 == ETHERNET && head.kind == Kind::Flow && skb.ingress_ifindex() == owner.ifindex && learn::is_unchanged(skb, head);
    let (key, end) = head.tuple.key();
    if head.kind == Kind::Flow && I::copy_live() == flow::PRESENT && half.action != action::NONE {
        if !unchanged {
            I::forget();
        } else if half.action != action::WIRE && learn::agrees(skb, head, owner.ifindex, pod) {
            flow::leave_by_wire::<I>(&key, end, skb.ifindex());
        }
        I::note();
        if half.rewrite & rewrite::SRC == 0 {
            return Ok(Verdict::Stack);
        }
        *partner = flow::outgoing::<I>(half, head.tuple.protocol);
        translate::<I>(skb)?;
        return Ok(Verdict::Stack);
    }
    if !masquerade::is_wanted::<I>(pod, head.tuple.dst) {
        if unchanged && learn::agrees(skb, head, owner.ifindex, pod) {
            I::learn_wire(skb.raw(), owner.ifindex, skb.ifindex());
        }
        return Ok(Verdict::Stack);
    }
    match head.kind {
        Kind::Flow => {}
        Kind::Later => return Err(Verdict::Drop(Counter::DropFragment)),
        _ => return Err(Verdict::Drop(Counter::DropUntranslated)),
    }
    if !masquerade::may_open(head) {
        return Err(Verdict::Drop(Counter::DropNoFlow));
    }
    let way = if unchanged && learn::agrees(skb, head, owner.ifindex, pod) { Way::Bypass } else { Way::Stack };
    masquerade::assign(skb, head, owner.ifindex, skb.ifindex(), way)?;
    translate::<I>(skb)?;
    Ok(Verdict::Stack)
}

/// A packet of the host, or one that it forwards for others. If a pod's flow has its tuple on this uplink, it must take another.
#[inline(always)]
fn of_host<I: Call>(skb: &Skb, head: &Head<I>, half: &Half<I::Addr>, partner: &mut Tuple<I::Addr>) -> Step<Verdict> {
    if head.kind != Kind::Flow {
        return Ok(Verdict::Stack);
    }
    if I::copy_live() == flow::ABSENT {
        return Ok(Verdict::Stack);
    }
    if half.rewrite & rewrite::SRC != 0 {
        *partner = flow::outgoing::<I>(half, head.tuple.protocol);
        translate::<I>(skb)?;
        return Ok(Verdict::Stack);
    }
    if half.action != action::TAKEN {
        return Ok(Verdict::Stack);
    }
    masquerade::assign(skb, head, 0, skb.ifindex(), Way::Stack)?;
    translate::<I>(skb)?;
    Ok(Verdict::Stack)
}

//! What the world sends: the bypass for flows that are known, translation back for those that the
//! stack carries.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    addr::Family as _,
    endpoint::device as flags,
    flow::{action, rewrite},
};
use underpass_ebpf::l4::Kind;

use crate::{
    ETHERNET,
    call::Call,
    maps::{Work, device, endpoint},
    skb::Skb,
    stage::{
        bypass::{self, Side},
        flow, fragment,
        hold::{self, Way},
        learn,
        parse::PARSED,
        port, translate, twice,
    },
    verdict::{CROWDED, NEXT, PASS, code},
};

/// IPv4 and IPv6; the network header is at `L3`.
#[inline(always)]
pub fn ip<I: Call, const L3: u32>(ctx: *mut __sk_buff) -> i32 {
    if L3 == ETHERNET {
        let sent = bypass::take::<I>(ctx, Side::Wire);
        if sent != NEXT {
            return sent;
        }
    }
    let mut translated = I::translate_back(ctx, L3);
    if translated == CROWDED {
        translated = twice::make_room::<I>(ctx, 0);
        if translated == NEXT {
            translated = I::translate_back(ctx, L3);
        }
    }
    match translated {
        CROWDED => PASS,
        verdict => verdict,
    }
}

/// A packet whose network header is at `l3`, and that no bypass took: [`CROWDED`] if [`twice`] must
/// help, else its verdict.
#[inline(always)]
pub fn translate_back<I: Call>(ctx: *mut __sk_buff, l3: u32) -> i32 {
    let mut skb = Skb::new(ctx);
    let Some(Work { head, half, .. }) = I::work() else {
        return PASS;
    };
    if I::parse_whole(ctx, l3) != PARSED || !skb.is_for_host() {
        return PASS;
    }
    if head.kind == Kind::Error {
        return I::error_in(ctx, I::parse_quoted(ctx));
    }
    if head.kind != Kind::Flow {
        hold::copy::<I>(ctx);
        return PASS;
    }
    let mut known = I::copy_live();
    if known == flow::ABSENT {
        known = I::host_port(ctx, 0);
    }
    if let Some(refusal) = port::refusal(known) {
        return code(Err(refusal));
    }
    if known == port::CROWDED
        || known == flow::PRESENT && I::work().is_some_and(|work| twice::is_in_the_way(work))
    {
        return CROWDED;
    }
    // Nobody in the world has a tuple of the host with itself.
    if known == flow::PRESENT && half.rewrite & rewrite::DST != 0 && half.action != action::HOST {
        match hold::lead::<I>(ctx, Way::In) {
            NEXT => {}
            verdict => return verdict,
        }
        twice::note::<I>();
        if let Err(verdict) = translate::as_known::<I>(&skb) {
            return code(Err(verdict));
        }
    } else {
        if known == flow::PRESENT && half.action == action::OTHERS {
            I::note();
        }
        // So that the later ones are not kept.
        fragment::remember(head);
    }
    if endpoint(head.tuple.dst.wide()).is_some() {
        if device(skb.ifindex()).is_some_and(|here| here.flags & flags::VRF != 0) {
            skb.mark_arrival();
        }
        learn::sign(&mut skb, head);
    }
    PASS
}

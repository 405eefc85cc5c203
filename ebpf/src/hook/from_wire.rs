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
    bypass::{self, Side},
    call::Call,
    flow::{entry, learn},
    fragment::{
        self,
        reorder::{self, Way},
    },
    kernel::{
        maps::{Work, device, endpoint},
        skb::Skb,
        verdict::{CROWDED, NEXT, PASS, code},
    },
    nat::{hairpin, host_port, translate},
    parse::PARSED,
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
        translated = hairpin::make_room::<I>(ctx, 0);
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
        reorder::copy::<I>(ctx);
        return PASS;
    }
    let mut known = I::copy_live();
    if known == entry::ABSENT {
        known = I::host_port(ctx, 0);
    }
    if let Some(refusal) = host_port::refusal(known) {
        return code(Err(refusal));
    }
    if known == host_port::CROWDED
        || known == entry::PRESENT && I::work().is_some_and(|work| hairpin::is_in_the_way(work))
    {
        return CROWDED;
    }
    // Nobody in the world has a tuple of the host with itself.
    if known == entry::PRESENT && half.rewrite & rewrite::DST != 0 && half.action != action::HOST {
        match reorder::lead::<I>(ctx, Way::In) {
            NEXT => {}
            verdict => return verdict,
        }
        hairpin::note::<I>();
        if let Err(verdict) = translate::as_known::<I>(&skb) {
            return code(Err(verdict));
        }
    } else {
        if known == entry::PRESENT && half.action == action::OTHERS {
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

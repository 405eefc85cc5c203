//! What the host sends to itself: to a host port, it goes to the container that serves it. What comes
//! back is made an answer of the host.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    endpoint::{LOOPBACK, device as flags},
    flow::action,
};
use underpass_ebpf::{l4::Kind, packet::Packet as _};

use crate::{
    ETHERNET,
    call::Call,
    flow::entry::{ABSENT, PRESENT},
    kernel::{
        maps::{Work, device, endpoint},
        skb::Skb,
        verdict::{CROWDED, NEXT, PASS, Step, Verdict, code},
    },
    nat::{hairpin, host_port, translate},
    parse::PARSED,
};

/// IPv4 and IPv6.
#[inline(always)]
pub fn ip<I: Call>(ctx: *mut __sk_buff) -> i32 {
    if Skb::new(ctx).is_returning() {
        return I::finish(ctx);
    }
    let served = I::serve_host(ctx);
    if served != CROWDED {
        return served;
    }
    match hairpin::make_room::<I>(ctx, LOOPBACK) {
        NEXT => match I::serve_host(ctx) {
            CROWDED => PASS,
            served => served,
        },
        CROWDED => PASS,
        verdict => verdict,
    }
}

/// A packet of the host to itself. [`CROWDED`] if its flow is to a host port, and not known yet.
#[inline(always)]
pub fn serve<I: Call>(ctx: *mut __sk_buff) -> i32 {
    let Some(Work { head, half, .. }) = I::work() else {
        return PASS;
    };
    // Nearly all of it ends here. A link-local address means something together with its device
    // only, which an answer would not come from.
    if I::parse_whole(ctx, ETHERNET) != PARSED
        || head.kind != Kind::Flow
        || host_port::serving::<I>(&head.tuple).is_none()
        || I::is_local_scope(head.tuple.dst)
    {
        return PASS;
    }
    if I::copy_live() == ABSENT {
        return CROWDED;
    }
    if half.action != action::HOST || half.in_ifindex != 0 {
        return PASS;
    }
    hairpin::note::<I>();
    code(into_pod::<I>(&mut Skb::new(ctx)))
}

/// Into the container, as a packet of its gateway.
#[inline(always)]
fn into_pod<I: Call>(skb: &mut Skb) -> Step<Verdict> {
    let Some(Work {
        head,
        half,
        next_hop,
        ..
    }) = I::work()
    else {
        return Ok(Verdict::Stack);
    };
    // Nobody on the way cuts it to pieces.
    if skb.wire_length(head.l3, head.headers_length()) > half.mtu {
        return Err(Verdict::Drop(Counter::DropTooLarge));
    }
    translate::as_known::<I>(skb)?;
    let pod = device(half.out_ifindex).map_or(0, |pod| pod.flags);
    // Without a permanent neighbour the kernel has to ask for the container's MAC. A packet that waits for the answer is sent to the
    // neighbour of its route, which is still that of the loopback device, and lost.
    if pod & flags::FOREIGN != 0 {
        // Another plugin's container. Its host's own route may lead elsewhere, to a bridge.
        skb.store(0, &half.eth)
            .map_err(|_| Verdict::Drop(Counter::DropMalformed))?;
        return Ok(skb.redirect(half.out_ifindex));
    }
    if pod & flags::CHECK_MAC == 0 {
        return Ok(skb.redirect_by_route(half.out_ifindex));
    }
    I::neighbour(next_hop, half.dst);
    Ok(skb.redirect_neighbour(half.out_ifindex, next_hop))
}

/// An answer of a container, from [`hairpin::return_to_host`]: the client's own address and that which
/// it asked for take the place of 127.0.0.1 or `::1` and the container's. The packet keeps its route.
#[inline(always)]
pub fn finish<I: Call>(ctx: *mut __sk_buff) -> i32 {
    let mut skb = Skb::new(ctx);
    skb.unmark();
    if I::parse_whole(ctx, ETHERNET) != PARSED {
        return code(Err(Verdict::Drop(Counter::DropMalformed)));
    }
    if I::work().is_some_and(|work| work.head.kind == Kind::Error) {
        return I::error_back(ctx, I::parse_quoted(ctx));
    }
    code(out_of_pod::<I>(&skb))
}

#[inline(always)]
fn out_of_pod<I: Call>(skb: &Skb) -> Step<Verdict> {
    let lost = Verdict::Drop(Counter::DropNoFlow);
    let Work {
        head, half, place, ..
    } = I::work().ok_or(lost)?;
    let pod = endpoint(head.tuple.src.wide()).ok_or(lost)?;
    let mut sent = head.tuple;
    sent.dst = I::narrow(pod.gateway);
    place.set(&sent);
    if I::copy_live() != PRESENT || half.action != action::HOST {
        return Err(lost);
    }
    hairpin::note::<I>();
    translate::as_known::<I>(skb)?;
    Ok(Verdict::Stack)
}

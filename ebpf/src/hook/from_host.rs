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
    flow::tracking::{Seen, look_up},
    icmp_error::error_from_pod,
    kernel::{
        ETHERNET,
        global::global,
        host_ports::serving,
        maps::{device, endpoint},
        net::Net,
        skb::Skb,
        verdict::{Step, Verdict},
        work_area::WorkArea,
    },
    model::work::Work,
    nat::{
        hairpin,
        host_port::{self, Served},
        mapping, translate,
    },
    parse::{parse_packet, parse_quote},
};

/// IPv4 and IPv6.
#[inline(always)]
pub fn ip<I: Net>(ctx: *mut __sk_buff) -> Step<Verdict> {
    // SAFETY: this is the only view, but for those that it is lent for.
    let Some(mut work) = (unsafe { WorkArea::<I>::open() }) else {
        return Ok(Verdict::STACK);
    };
    let work = &mut work;
    if Skb::new(ctx).is_returning() {
        return finish(work, ctx);
    }
    hairpin::serve(work, ctx, LOOPBACK, Seen::Perhaps, serve_host)?;
    Ok(Verdict::STACK)
}

global!(
    /// Sends a packet of the host to itself to the container, if its flow is to a host port.
    fn serve_host<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff, seen: Seen) -> Step<Served> {
        if seen != Seen::Flow {
            // Nearly all of it ends here. A link-local address means something together with its device
            // only, which an answer would not come from.
            if !parse_packet(work, ctx, ETHERNET)
                || work.head.kind != Kind::Flow
                || serving::<I>(&work.head.tuple).is_none()
                || I::is_local_scope(work.head.tuple.dst)
            {
                return Ok(Served::Unknown);
            }
            // What somebody else has opened in its name is not its own.
            if !look_up(work) || host_port::withdraw_forged(work, LOOPBACK) {
                return Ok(Served::Crowded);
            }
        }
        if work.half.action != action::HOST || work.half.in_ifindex != 0 {
            return Ok(Served::Unknown);
        }
        mapping::note(work)?;
        Err(into_pod(work, &mut Skb::new(ctx))?)
    }
);

/// Into the container, as a packet of its gateway.
#[inline(always)]
fn into_pod<I: Net>(work: &mut WorkArea<I>, skb: &mut Skb) -> Step<Verdict> {
    // Nobody on the way cuts it to pieces.
    if skb.wire_length(work.head.l3, work.head.headers_length()) > work.half.mtu {
        return Err(Verdict::dropped(Counter::DropTooLarge));
    }
    translate::as_known(work, skb)?;
    let pod = device(work.half.out_ifindex).map_or(0, |pod| pod.flags);
    // Without a permanent neighbour the kernel has to ask for the container's MAC. A packet that waits for the answer is sent to the
    // neighbour of its route, which is still that of the loopback device, and lost.
    if pod & flags::FOREIGN != 0 {
        // Another plugin's container. Its host's own route may lead elsewhere, to a bridge.
        skb.store(0, &work.half.eth)
            .map_err(|_| Verdict::dropped(Counter::DropMalformed))?;
        return Ok(skb.redirect(work.half.out_ifindex));
    }
    if pod & flags::CHECK_MAC == 0 {
        return Ok(skb.redirect_by_route(work.half.out_ifindex));
    }
    let Work { half, next_hop, .. } = &mut **work;
    I::neighbour(next_hop, half.dst);
    Ok(skb.redirect_neighbour(half.out_ifindex, next_hop))
}

global!(
    /// Finishes an answer of a container, from [`hairpin::return_to_host`]: the client's own address and
    /// that which it asked for take the place of 127.0.0.1 or `::1` and the container's. The packet
    /// keeps its route.
    fn finish<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> Step<Verdict> {
        let mut skb = Skb::new(ctx);
        skb.unmark();
        if !parse_packet(work, ctx, ETHERNET) {
            return Err(Verdict::dropped(Counter::DropMalformed));
        }
        if work.head.kind == Kind::Error {
            let is_quoted = parse_quote(work, ctx);
            error_from_pod(work, ctx, is_quoted)?;
            return Ok(Verdict::STACK);
        }
        out_of_pod(work, &skb)
    }
);

#[inline(always)]
fn out_of_pod<I: Net>(work: &mut WorkArea<I>, skb: &Skb) -> Step<Verdict> {
    let lost = Verdict::dropped(Counter::DropNoFlow);
    let pod = endpoint(work.head.tuple.src.wide()).ok_or(lost)?;
    let mut sent = work.head.tuple;
    sent.dst = I::narrow(pod.gateway);
    work.place.set(&sent);
    if !look_up(work) || work.half.action != action::HOST {
        return Err(lost);
    }
    // The other entry follows from what the container sent, should it have to be restored; the packet is what it has become.
    let dst = work.head.tuple.dst;
    work.head.tuple = sent;
    mapping::note(work)?;
    work.head.tuple.dst = dst;
    translate::as_known(work, skb)?;
    Ok(Verdict::STACK)
}

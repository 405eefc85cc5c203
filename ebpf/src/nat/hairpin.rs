//! Flows to a host port of which both ends are translated.
//!
//! To a process of this host, and to a container that asks for its own host port, the answers would
//! not come back: 127.0.0.1 and the container's own address never leave it. It sees its gateway as the
//! client, the address of the host's end of its veth.
//!
//! A client that talks to the container itself as well, from the same port, keeps its address and is
//! given another port for the younger of the two flows, which would look the same to the container.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    addr::{Addr, Family as _},
    counter::Counter,
    endpoint::LOOPBACK,
    flow::{Tuple, action, rewrite, state},
};
use underpass_ebpf::{ip::Head, l4::Kind};

use crate::{
    bypass,
    call::{Call, charge, refund},
    filter::quota,
    flow::entry::{ABSENT, GONE, PRESENT},
    kernel::{
        maps::{Work, count, endpoint},
        net::Net,
        skb::Skb,
        verdict::{CROWDED, NEXT, Step, Verdict, code},
    },
    nat::{
        host_port,
        mapping::{Opener, Payer, Request},
        masquerade::may_open,
        port_allocation::CLAIMED,
        translate,
    },
};

/// [`Half::rewrite`](underpass_abi::flow::Half::rewrite) of both directions.
pub const TWICE: u8 = rewrite::SRC | rewrite::DST;

/// Whether a direction of a host port's flow is that of the container's answers.
#[inline(always)]
pub const fn is_answer(rewrites: u8, flow_state: u32) -> bool {
    rewrites & rewrite::SRC != 0 && (rewrites & rewrite::DST == 0 || flow_state & state::OUTER != 0)
}

/// Whether a direction that is translated is in the entry of the inner tuple.
#[inline(always)]
pub const fn is_inner(rewrites: u8, flow_state: u32) -> bool {
    rewrites & rewrite::SRC != 0 && (rewrites & rewrite::DST == 0 || flow_state & state::OUTER == 0)
}

/// Whether the packet in [`Work::head`], of the flow that was found, goes straight to a container
/// with the tuple that a flow of the same client to a host port has behind the translation.
#[inline(always)]
pub fn is_in_the_way<I: Net>(work: &Work<I>) -> bool {
    work.half.action == action::NONE
        && work.half.rewrite == 0
        && work.state & (state::PORT | state::OUTER) == state::PORT
        && may_open(&work.head)
}

/// As [`open`]: [`NEXT`] if the flow is there now, [`CROWDED`] if it can't be, else the packet's
/// verdict.
#[inline(always)]
pub fn make_room<I: Call>(ctx: *mut __sk_buff, client: u32) -> i32 {
    match I::open_twice(ctx, client) {
        PRESENT => NEXT,
        FULL => code(Err(Verdict::Drop(Counter::DropNoPort))),
        OVER_QUOTA => code(Err(Verdict::Drop(Counter::DropFlowQuota))),
        _ => CROWDED,
    }
}

/// Translates both ends of the flow of the packet in [`Work::head`]: [`PRESENT`], and its direction
/// is in [`Work::half`]. `client` is the device that the packet came from: a host veth, [`LOOPBACK`],
/// or 0 for an uplink.
#[inline(always)]
pub fn open<I: Call>(ctx: *mut __sk_buff, client: u32) -> u32 {
    let Some(work) = I::work() else {
        return ABSENT;
    };
    if work.head.kind != Kind::Flow || !may_open(&work.head) {
        return ABSENT;
    }
    let is_prepared = if I::copy_live() == PRESENT {
        is_in_the_way(work) && prepare_direct(&work.head, &mut work.request, client)
    } else {
        is_for_port::<I>(ctx, client) && prepare(&work.head, &mut work.request, client)
    };
    if !is_prepared {
        return ABSENT;
    }
    let Some(Work { request, .. }) = I::work() else {
        return ABSENT;
    };
    let owner = request.owner;
    request.payer = if owner == 0 || owner == LOOPBACK {
        Payer::Nobody
    } else if charge(owner) == quota::FULL {
        return OVER_QUOTA;
    } else {
        Payer::Owner
    };
    if I::claim(ctx) != CLAIMED {
        if owner != 0 {
            refund(owner);
        }
        return FULL;
    }
    let Some(Work { request, .. }) = I::work() else {
        return ABSENT;
    };
    if request.opener == Opener::Client {
        count(Counter::HostPort);
    }
    I::copy_live()
}

/// What [`open`] found: no free port.
pub const FULL: u32 = 3;
/// What [`open`] found: the client has too many half-open flows.
pub const OVER_QUOTA: u32 = 4;

/// Whether the packet is for a port of this host, and not one that the host itself uses.
#[inline(always)]
fn is_for_port<I: Call>(ctx: *mut __sk_buff, client: u32) -> bool {
    let Some(Work { head, request, .. }) = I::work() else {
        return false;
    };
    // What leaves by the loopback device has been routed: it is for this host.
    let is_ours = if client == LOOPBACK {
        !host_port::is_service::<I>(head)
    } else {
        host_port::is_local::<I>(ctx)
    };
    request.outer = head.tuple.reversed();
    is_ours && !host_port::belongs_to_host::<I>(ctx, head)
}

/// Fills the request for a packet that is in the way.
#[inline(always)]
fn prepare_direct<I: Net>(head: &Head<I>, request: &mut Request<I>, client: u32) -> bool {
    let Some(pod) = endpoint(head.tuple.dst.wide()) else {
        return false;
    };
    request.inner = head.tuple;
    request.outer = head.tuple;
    request.owner = client;
    request.client = pod.ifindex;
    request.uplink = 0;
    request.opener = Opener::Aside;
    (request.out, request.back) = (action::STACK, action::STACK);
    true
}

/// Fills the request for a packet to a host port.
#[inline(always)]
fn prepare<I: Net>(head: &Head<I>, request: &mut Request<I>, client: u32) -> bool {
    let Some(target) = host_port::serving::<I>(&head.tuple) else {
        return false;
    };
    let Some(pod) = endpoint(target.addr) else {
        return false;
    };
    if pod.ifindex != target.ifindex || pod.gateway == Addr::default() {
        return false;
    }
    let mut source = I::narrow(pod.gateway);
    (request.owner, request.out) = if client == LOOPBACK {
        (0, action::HOST)
    } else if client == target.ifindex {
        (client, action::PEER)
    } else {
        source = head.tuple.src;
        (client, action::STACK)
    };
    request.back = request.out;
    request.inner = head.tuple;
    request.outer = Tuple::new(
        head.tuple.protocol,
        source,
        head.tuple.sport,
        I::narrow(target.addr),
        target.port,
    );
    request.client = target.ifindex;
    request.uplink = 0;
    request.opener = Opener::Client;
    true
}

/// A packet of a pod, in [`Work::head`], whose flow's direction in [`Work::half`] was found: if both
/// its ends are translated, it goes back to where it came from, to a process of this host or to the
/// same container. Else [`NEXT`].
#[inline(always)]
pub fn turn<I: Call>(ctx: *mut __sk_buff) -> i32 {
    let mut skb = Skb::new(ctx);
    let Some(Work { half, .. }) = I::work() else {
        return NEXT;
    };
    if half.rewrite & TWICE != TWICE || half.in_ifindex != skb.ifindex() {
        return NEXT;
    }
    if half.action == action::HOST {
        return code(return_to_host::<I>(&mut skb));
    }
    if half.out_ifindex != skb.ifindex() {
        return NEXT;
    }
    note::<I>();
    code(turn_around::<I>(&mut skb))
}

/// Takes note of the packet, and brings the other entry of its flow back, if that was removed.
/// Whether there still is a flow.
#[inline(always)]
pub fn note<I: Call>() -> bool {
    match I::note() {
        ABSENT => {
            I::restore();
            true
        }
        found => found != GONE,
    }
}

/// Into the container that sent the packet.
#[inline(always)]
fn turn_around<I: Call>(skb: &mut Skb) -> Step<Verdict> {
    translate::as_known::<I>(skb)?;
    let Some(Work { half, .. }) = I::work() else {
        return Ok(Verdict::Stack);
    };
    bypass::deliver(skb, half)
}

/// Towards a process of this host, in two steps: here the destination becomes 127.0.0.1 or `::1`, so
/// that the kernel finds the route that its own packets to itself have. With it the packet leaves by
/// the loopback device, where `from_host` translates it in full. Without that route the host would
/// drop it, as one with a source that is its own.
#[inline(always)]
pub fn return_to_host<I: Call>(skb: &mut Skb) -> Step<Verdict> {
    let Some(Work { head, partner, .. }) = I::work() else {
        return Ok(Verdict::Stack);
    };
    *partner = head.tuple;
    partner.dst = I::loopback();
    translate::translate::<I>(skb)?;
    Ok(skb.redirect_loopback())
}

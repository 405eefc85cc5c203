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
    flow::{Tuple, action, state},
};
use underpass_ebpf::{ip::Head, l4::Kind};

use crate::{
    filter::quota::{charge, refund},
    flow::tracking::look_up,
    kernel::{
        global::global,
        host_ports::serving,
        maps::{count, endpoint},
        net::Net,
        skb::Skb,
        verdict::{Step, Verdict},
    },
    model::{
        direction::TWICE,
        request::{Opener, Payer, Request},
        state::may_open,
        work::Work,
    },
    nat::{
        host_port::{self, Served},
        mapping::{Allocation, note},
        port_allocation::allocate,
        translate,
    },
};

/// Whether the packet in [`Work::head`], of the flow that was found, goes straight to a container
/// with the tuple that a flow of the same client to a host port has behind the translation.
#[inline(always)]
pub fn is_in_the_way<I: Net>(work: &Work<I>) -> bool {
    work.half.action == action::NONE
        && work.half.rewrite == 0
        && work.state & (state::PORT | state::OUTER) == state::PORT
        && may_open(&work.head)
}

/// Has a packet served, and served again if both ends of its flow had to be translated first.
/// `client` is as in [`open_hairpin`].
#[inline(always)]
pub fn serve<I: Net>(
    ctx: *mut __sk_buff,
    client: u32,
    serve: impl Fn(*mut __sk_buff) -> Step<Served>,
) -> Step<Served> {
    match serve(ctx)? {
        Served::Crowded if open_hairpin::<I>(ctx, client)? => serve(ctx),
        served => Ok(served),
    }
}

global!(
    /// Translates both ends of the flow of the packet in [`Work::head`]. Whether there is such a flow
    /// now; its direction is in [`Work::half`]. `client` is the device that the packet came from: a host
    /// veth, [`LOOPBACK`], or 0 for an uplink.
    fn open_hairpin<I: Net>(ctx: *mut __sk_buff, client: u32) -> Step<bool> {
        let Some(work) = I::work() else {
            return Ok(false);
        };
        if work.head.kind != Kind::Flow || !may_open(&work.head) {
            return Ok(false);
        }
        let is_prepared = if look_up::<I>() {
            is_in_the_way(work) && prepare_direct(&work.head, &mut work.request, client)
        } else {
            is_for_port::<I>(ctx, client) && prepare(&work.head, &mut work.request, client)
        };
        if !is_prepared {
            return Ok(false);
        }
        let Some(Work { request, .. }) = I::work() else {
            return Ok(false);
        };
        let owner = request.owner;
        request.payer = if owner == 0 || owner == LOOPBACK {
            Payer::Nobody
        } else if charge(owner) {
            Payer::Owner
        } else {
            return Err(Verdict::dropped(Counter::DropFlowQuota));
        };
        if allocate::<I>(ctx) != Allocation::Granted {
            if owner != 0 {
                refund(owner);
            }
            return Err(Verdict::dropped(Counter::DropNoPort));
        }
        let Some(Work { request, .. }) = I::work() else {
            return Ok(false);
        };
        if request.opener == Opener::Client {
            count(Counter::HostPort);
        }
        Ok(look_up::<I>())
    }
);

/// Whether the packet is for a port of this host, and not one that the host itself uses.
#[inline(always)]
fn is_for_port<I: Net>(ctx: *mut __sk_buff, client: u32) -> bool {
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
    let Some(target) = serving::<I>(&head.tuple) else {
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

global!(
    /// A packet of a pod, in [`Work::head`], whose flow's direction in [`Work::half`] was found: if both
    /// its ends are translated, it goes back to where it came from, to a process of this host or to the
    /// same container.
    pub fn turn_back<I: Net>(ctx: *mut __sk_buff) -> Step<()> {
        let mut skb = Skb::new(ctx);
        let Some(Work { half, .. }) = I::work() else {
            return Ok(());
        };
        if half.rewrite & TWICE != TWICE || half.in_ifindex != skb.ifindex() {
            return Ok(());
        }
        if half.action == action::HOST {
            return Err(return_to_host::<I>(&mut skb)?);
        }
        if half.out_ifindex != skb.ifindex() {
            return Ok(());
        }
        note::<I>();
        Err(turn_around::<I>(&mut skb)?)
    }
);

/// Into the container that sent the packet.
#[inline(always)]
fn turn_around<I: Net>(skb: &mut Skb) -> Step<Verdict> {
    translate::as_known::<I>(skb)?;
    let Some(Work { half, .. }) = I::work() else {
        return Ok(Verdict::STACK);
    };
    skb.deliver(half)
}

/// Towards a process of this host, in two steps: here the destination becomes 127.0.0.1 or `::1`, so
/// that the kernel finds the route that its own packets to itself have. With it the packet leaves by
/// the loopback device, where `from_host` translates it in full. Without that route the host would
/// drop it, as one with a source that is its own.
#[inline(always)]
pub fn return_to_host<I: Net>(skb: &mut Skb) -> Step<Verdict> {
    let Some(Work { head, partner, .. }) = I::work() else {
        return Ok(Verdict::STACK);
    };
    *partner = head.tuple;
    partner.dst = I::loopback();
    translate::translate::<I>(skb)?;
    Ok(skb.redirect_loopback())
}

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
    quota::WORLD,
};
use underpass_ebpf::l4::Kind;

use crate::{
    filter::quota::charge,
    flow::tracking::{Seen, look_up},
    kernel::{
        container,
        global::global,
        host_ports::serving,
        maps::{count, endpoint},
        net::Net,
        skb::Skb,
        verdict::{Step, Verdict},
        work_area::WorkArea,
    },
    model::{
        direction::TWICE,
        request::{Opener, Payer, Request},
        state::{begins, may_open},
        work::Work,
    },
    nat::{
        host_port::{self, Served},
        mapping::note,
        port_allocation::allocate_paid,
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
/// `client` is as in [`open_hairpin`]; `seen` is what is known of the packet's flow before that. The
/// second time it is in [`Work::half`].
#[inline(always)]
pub fn serve<I: Net>(
    work: &mut WorkArea<I>,
    ctx: *mut __sk_buff,
    client: u32,
    seen: Seen,
    serve: impl Fn(&mut WorkArea<I>, *mut __sk_buff, Seen) -> Step<Served>,
) -> Step<Served> {
    let served = serve(work, ctx, seen)?;
    let is_in_the_way = served == Served::InTheWay;
    if (served == Served::Crowded || is_in_the_way)
        && open_hairpin(work, ctx, client, is_in_the_way)?
    {
        return serve(work, ctx, Seen::Flow);
    }
    Ok(served)
}

global!(
    /// Translates both ends of the flow of the packet in [`Work::head`]. Whether there is such a flow
    /// now; its direction is in [`Work::half`]. `client` is the device that the packet came from: a host
    /// veth, [`LOOPBACK`], or 0 for an uplink. `is_in_the_way` is as [`Served::InTheWay`].
    fn open_hairpin<I: Net>(
        work: &mut WorkArea<I>,
        ctx: *mut __sk_buff,
        client: u32,
        is_in_the_way: bool,
    ) -> Step<bool> {
        if work.head.kind != Kind::Flow || !may_open(&work.head) {
            return Ok(false);
        }
        let is_prepared = if is_in_the_way {
            prepare_direct(work, client)
        } else {
            is_for_port(work, ctx, client) && prepare(work, client)
        };
        if !is_prepared {
            return Ok(false);
        }
        work.request.payer = payer(&work.request, client, is_in_the_way);
        let owner = work.request.owner;
        allocate_paid(work, ctx, owner)?.granted()?;
        if work.request.opener == Opener::Client {
            count(Counter::HostPort);
        }
        if look_up(work) {
            Ok(true)
        } else {
            // As in `open_host_port`.
            Err(Verdict::dropped(Counter::DropRemoved))
        }
    }
);

/// Who pays where it is not the owner. The world does as for a port whose flows are translated once, which was asked for already where the
/// tuple was not free, but gets nothing back.
#[inline(always)]
fn payer<I: Net>(request: &Request<I>, client: u32, is_in_the_way: bool) -> Payer {
    let is_surplus = if is_in_the_way {
        client == 0 && !charge(request.client | WORLD)
    } else {
        client == 0 && request.payer == Payer::Surplus
    };
    if is_surplus {
        Payer::Surplus
    } else {
        Payer::Nobody
    }
}

/// Whether the packet is for a port of this host, and not one that the host itself uses.
#[inline(always)]
fn is_for_port<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff, client: u32) -> bool {
    // What leaves by the loopback device has been routed: it is for this host.
    let is_ours = if client == LOOPBACK {
        !host_port::is_service::<I>(&work.head)
    } else {
        host_port::is_local(work, ctx)
    };
    work.request.outer = work.head.tuple.reversed();
    is_ours && !host_port::belongs_to_host(work, ctx)
}

/// Fills the request for a packet that is in the way.
#[inline(always)]
fn prepare_direct<I: Net>(work: &mut Work<I>, client: u32) -> bool {
    let Work { head, request, .. } = work;
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
fn prepare<I: Net>(work: &mut Work<I>, client: u32) -> bool {
    let Work { head, request, .. } = work;
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
    } else if container::is_same(client, target.ifindex) {
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
    pub fn turn_back<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> Step<()> {
        let mut skb = Skb::new(ctx);
        if work.half.rewrite & TWICE != TWICE
            || !container::is_same(work.half.in_ifindex, skb.ifindex())
        {
            return Ok(());
        }
        if work.half.action == action::HOST {
            // The connection is the process's to open. Another may have its port by now.
            if begins(work.head.tcp_flags) {
                return Err(Verdict::dropped(Counter::DropNoFlow));
            }
            return Err(return_to_host(work, &mut skb)?);
        }
        if !container::is_same(work.half.out_ifindex, skb.ifindex()) {
            return Ok(());
        }
        note(work)?;
        Err(turn_around(work, &mut skb)?)
    }
);

/// Into the container that sent the packet.
#[inline(always)]
fn turn_around<I: Net>(work: &mut WorkArea<I>, skb: &mut Skb) -> Step<Verdict> {
    translate::as_known(work, skb)?;
    skb.deliver(&work.half)
}

/// Towards a process of this host, in two steps: here the destination becomes 127.0.0.1 or `::1`, so
/// that the kernel finds the route that its own packets to itself have. With it the packet leaves by
/// the loopback device, where `from_host` translates it in full. Without that route the host would
/// drop it, as one with a source that is its own.
#[inline(always)]
pub fn return_to_host<I: Net>(work: &mut WorkArea<I>, skb: &mut Skb) -> Step<Verdict> {
    let Work { head, partner, .. } = &mut **work;
    *partner = head.tuple;
    partner.dst = I::loopback();
    translate::translate(work, skb)?;
    Ok(skb.redirect_loopback())
}

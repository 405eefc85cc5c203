//! Host ports: a flow to a port of the host goes to the container that serves it.
//!
//! The container sees the client's own address. What comes back must leave with the address and
//! port that the client asked for, so both entries are stored with the first packet, as for a
//! masqueraded flow whose replies come first.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    flow::{Half, Tuple, action, protocol, rewrite, state},
    port::{HostPort, PortTarget},
    quota::WORLD,
};
use underpass_ebpf::{
    ip::Head,
    l4::{Kind, tcp},
};

use crate::{
    call::{Call, charge, refund},
    filter::quota,
    flow::entry::ABSENT,
    kernel::{
        maps::{Work, count, endpoint, is_service_address, port},
        memory,
        net::Net,
        route,
        skb::Skb,
        verdict::Verdict,
    },
    nat::{
        hairpin,
        mapping::{Opener, Payer},
        masquerade::may_open,
        port_allocation::{self, CLAIMED, NO_PORT, USED},
    },
};

/// Sends the flow of the packet in [`Work::head`], which is not known, to the container that serves
/// its destination: [`PRESENT`](crate::flow::entry::PRESENT), and its direction is in [`Work::half`].
/// `client` is the host veth that the packet came from, 0 if it came from the world. [`CROWDED`] if it
/// takes more than another destination.
#[inline(always)]
pub fn open<I: Call>(ctx: *mut __sk_buff, client: u32) -> u32 {
    let Some(Work { head, request, .. }) = I::work() else {
        return ABSENT;
    };
    if head.kind != Kind::Flow || !may_open(head) {
        return ABSENT;
    }
    let Some(target) = serving::<I>(&head.tuple) else {
        return ABSENT;
    };
    if endpoint(target.addr).is_none_or(|pod| pod.ifindex != target.ifindex) {
        return ABSENT;
    }
    if target.ifindex == client {
        return CROWDED;
    }
    // A container of another plugin, again: this time its bridge has the packet.
    if target.addr == head.tuple.src.wide() {
        return ABSENT;
    }
    let asked = head.tuple.reversed();
    request.outer = asked;
    request.inner = Tuple::new(
        asked.protocol,
        I::narrow(target.addr),
        target.port,
        asked.dst,
        asked.dport,
    );
    request.owner = target.ifindex;
    request.client = client;
    request.uplink = 0;
    request.opener = Opener::Other;
    (request.out, request.back) = (action::STACK, action::STACK);
    if !is_local::<I>(ctx) || belongs_to_host::<I>(ctx, head) {
        return ABSENT;
    }
    // Of a flow that nobody answers, who began it pays; the world by what it may open to the container.
    request.payer = if client == 0 {
        if charge(target.ifindex | WORLD) == quota::FULL {
            Payer::Surplus
        } else {
            Payer::Nobody
        }
    } else if charge(client) == quota::FULL {
        return OVER_QUOTA;
    } else {
        Payer::Client
    };
    let result = store::<I>();
    if request.payer == Payer::Client && result != CLAIMED && result != CROWDED {
        refund(client);
    }
    match result {
        CLAIMED => {
            count(Counter::HostPort);
            I::copy_live()
        }
        // Another CPU may have been faster with the same flow.
        NO_PORT => I::copy_live(),
        other => other,
    }
}

/// Stores both entries of [`Work::request`]: [`CLAIMED`], [`CROWDED`], [`NO_ROOM`], or [`NO_PORT`] if
/// the outer tuple is taken.
#[inline(always)]
fn store<I: Call>() -> u32 {
    match I::insert() {
        CLAIMED => {}
        port_allocation::NO_ROOM => return NO_ROOM,
        _ => return NO_PORT,
    }
    // The container's entry is under its own tuple, not under that of the packet.
    I::aim(INNER);
    let stored = I::commit();
    I::aim(PACKET);
    match stored {
        CLAIMED => CLAIMED,
        NO_PORT => CROWDED,
        _ => NO_ROOM,
    }
}

/// What [`open`] found: the client has too many half-open flows.
pub const OVER_QUOTA: u32 = 4;
/// What [`open`] found: the table is full.
pub const NO_ROOM: u32 = 5;

/// The verdict on a packet to a host port whose flow can't be remembered, if [`open`] found that.
#[inline(always)]
pub fn refusal(found: u32) -> Option<Verdict> {
    match found {
        OVER_QUOTA => Some(Verdict::Drop(Counter::DropFlowQuota)),
        NO_ROOM => Some(Verdict::Drop(Counter::DropMapFull)),
        _ => None,
    }
}

/// What [`open`] found: the container that the packet came from serves the port itself, or talks to
/// the one that does from the same port. Then both ends must be translated.
pub const CROWDED: u32 = 2;

/// [`aim`] at the tuple of the packet in [`Work::head`].
const PACKET: u32 = 0;
/// [`aim`] at the inner tuple of [`Work::request`].
const INNER: u32 = 1;

/// Sets [`Work::place`].
#[inline(always)]
pub fn aim<I: Net>(at: u32) -> u32 {
    if let Some(Work {
        head,
        place,
        request,
        ..
    }) = I::work()
    {
        place.set(if at == INNER {
            &request.inner
        } else {
            &head.tuple
        });
    }
    at
}

/// What [`Half::rewrite`] says of packets to a pod, from a host port that another pod serves.
pub const FROM_PORT: u8 = rewrite::EARLY | rewrite::SRC;

/// Who serves the destination of a packet: the entry of the address itself counts before that of
/// every address.
#[inline(always)]
pub fn serving<I: Net>(tuple: &Tuple<I::Addr>) -> Option<&'static PortTarget> {
    let mut key = HostPort {
        addr: tuple.dst.wide(),
        port: tuple.dport,
        protocol: tuple.protocol,
        family: I::FAMILY,
        reserved: 0,
    };
    port(&key).or_else(|| {
        memory::clear(&mut key.addr);
        port(&key)
    })
}

/// Whether any host port has this port number: masquerade must not use it.
#[inline(always)]
pub fn is_mapped<I: Net>(outer: &Tuple<I::Addr>) -> bool {
    serving::<I>(&outer.reversed()).is_some()
}

/// Whether a flow to a host port still goes where the port leads, as told by its half for packets
/// with `tuple`.
#[inline(always)]
pub fn is_current<I: Net>(tuple: &Tuple<I::Addr>, half: &Half<I::Addr>, flow_state: u32) -> bool {
    if flow_state & state::PORT == 0 || half.rewrite & rewrite::ASIDE != 0 {
        return true;
    }
    if half.rewrite & rewrite::DST != 0 && !hairpin::is_answer(half.rewrite, flow_state) {
        return serving::<I>(tuple)
            .is_some_and(|target| target.addr == half.dst.wide() && target.port == half.dport);
    }
    if half.rewrite & rewrite::SRC != 0 {
        let asked = Tuple::new(tuple.protocol, half.dst, half.dport, half.src, half.sport);
        return serving::<I>(&asked)
            .is_some_and(|target| target.addr == tuple.src.wide() && target.port == tuple.sport);
    }
    true
}

/// Whether the destination is an address of this host now, and not one of a Service, nor one that
/// only the host itself may use.
///
/// The routing table tells: a local address is not forwarded. Neither is one without a route; the
/// kernel's answer is the same.
#[inline(always)]
pub fn is_local<I: Call>(ctx: *mut __sk_buff) -> bool {
    let Some(Work { head, .. }) = I::work() else {
        return false;
    };
    let dst = head.tuple.dst;
    if is_service(head) || I::is_loopback(dst) || endpoint(dst.wide()).is_some() {
        return false;
    }
    let skb = Skb::new(ctx);
    skb.is_for_host() && I::is_local(ctx, skb.ifindex()) == route::LOCAL
}

/// Whether the destination is an address of a Service.
#[inline(always)]
pub fn is_service<I: Net>(head: &Head<I>) -> bool {
    is_service_address(head.tuple.dst.wide())
}

/// Whether the packet is in the middle of a connection of the host's own, made before the port was
/// mapped, or an answer to a socket of the host that is connected to its sender.
#[inline(always)]
pub fn belongs_to_host<I: Call>(ctx: *mut __sk_buff, head: &Head<I>) -> bool {
    let may_be = match head.tuple.protocol {
        protocol::TCP => head.tcp_flags & tcp::SYN == 0,
        protocol => protocol == protocol::UDP,
    };
    may_be && I::host_uses(ctx) == USED
}

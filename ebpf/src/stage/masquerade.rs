//! Masquerade: a pod's flow gets the address of the uplink, and a port under which no other flow,
//! and no socket of the host, talks to the same remote address and port.
//!
//! The outer entry is inserted with `BPF_NOEXIST`: that insertion is the lock. The source port is
//! kept where it is free, because applications notice when it is not.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_NOEXIST},
    helpers::generated::{
        bpf_get_prandom_u32, bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp,
    },
};
use aya_log_ebpf::{debug, warn};
use underpass_abi::{
    addr::{Addr, Family as _},
    counter::Counter,
    endpoint::{Device, device as flags},
    flow::{End, Flow, Half, Tuple, action, protocol, rewrite, state},
    node::feature,
};
use underpass_ebpf::{
    ip::{Head, Ip},
    l4::tcp,
};

use super::{
    flow::{find, half, is_alive, outgoing, prolong, remove_one, set_outgoing},
    learn::{DEBUG, enter, leave_to_pod, leave_to_wire},
    port,
    quota::FULL,
    twice,
};
use crate::{
    call::{Call, charge},
    maps::{Net, Place, Work, constant, count, device, endpoint, keeps_source, tick, trace_level},
    memory,
    skb::Skb,
    verdict::{Step, Verdict},
};

/// How many ports of one round are looked up. With 60,000 ports taken all rounds together fail once
/// in ten thousand million times, with 63,000 once in three thousand.
const ATTEMPTS: u32 = 128;
/// How many of them are in the node's preferred range.
const PREFERRED: u32 = 16;
/// How many rounds: a port that is free in the tables may belong to a socket of the host.
const ROUNDS: u32 = 3;
/// First port of the range that all others are tried from.
const UNPRIVILEGED: u32 = 1024;
const BPF_F_CURRENT_NETNS: u64 = u64::MAX;
/// Level of a warning, see `State::trace`.
const WARN: u32 = 2;

/// A flow to be masqueraded, and who it belongs to.
pub struct Request<I: Ip> {
    /// The tuple as the owner sends it.
    pub inner: Tuple<I::Addr>,
    /// The tuple as the world shall see it; its port is filled in.
    pub outer: Tuple<I::Addr>,
    /// Host veth of the pod; 0 if the flow is the host's own.
    pub owner: u32,
    /// Host veth of the other end; 0 if that is the world, or the host.
    pub client: u32,
    /// The uplink; 0 while it is not known.
    pub uplink: u32,
    /// Who sent the first packet.
    pub opener: Opener,
    /// Action for the owner's packets: `WIRE` or `STACK`.
    pub out: u8,
    /// Action for replies: `PEER` or `STACK`.
    pub back: u8,
}

/// Who sends the first packet of a translated flow.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Opener {
    /// The owner of the inner tuple.
    Owner,
    /// The other end, to a host port.
    Other,
    /// The owner, which is itself the client of a host port: both its ends are translated.
    Client,
    /// The owner, straight to a container, with a tuple that is taken by a flow to a host port.
    Aside,
}

/// Who carries a masqueraded flow's packets.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The stack; we translate.
    Stack,
    /// The bypass.
    Bypass,
}

/// Gives a new flow, of the packet in [`Work::head`], a source address and port. Its entries are in
/// the table when this returns, and the tuple to leave with is in [`Work::partner`].
#[inline(always)]
pub fn assign<I: Call>(skb: &Skb, head: &Head<I>, owner: u32, uplink: u32, way: Way) -> Step<()> {
    let Work { request, route, .. } = I::work().ok_or(Verdict::Stack)?;
    // The bypass has just asked for the route. Where the stack chose another uplink than the
    // routing table says, that one's address counts.
    let is_routed = way == Way::Bypass
        || constant!(features) & feature::FIB_SRC != 0 && I::route(skb.raw(), owner) == uplink;
    let addr = device(owner)
        .and_then(I::masquerade_address)
        .or_else(|| route.source.filter(|_| is_routed))
        .or_else(|| device(uplink).and_then(I::masquerade_address))
        .ok_or(Verdict::Drop(Counter::DropNoAddress))?;
    if owner != 0 && charge(owner) == FULL {
        return Err(Verdict::Drop(Counter::DropFlowQuota));
    }
    let inner = head.tuple;
    request.inner = inner;
    request.outer = Tuple::new(inner.protocol, addr, inner.sport, inner.dst, inner.dport);
    request.owner = owner;
    request.client = 0;
    request.uplink = uplink;
    request.opener = Opener::Owner;
    (request.out, request.back) = match way {
        Way::Bypass => (action::WIRE, action::PEER),
        Way::Stack => (action::STACK, action::STACK),
    };
    let result = I::claim(skb.raw());
    if trace_level() != 0 {
        I::trace_claim(result);
    }
    match result {
        CLAIMED => {
            count(Counter::Masqueraded);
            if I::work().is_some_and(|work| work.request.outer.sport != inner.sport) {
                count(if owner == 0 {
                    Counter::HostPortMoved
                } else {
                    Counter::PortChanged
                });
            }
            Ok(())
        }
        NO_PORT => Err(Verdict::Drop(Counter::DropNoPort)),
        _ => Err(Verdict::Drop(Counter::DropMapFull)),
    }
}

/// Logs what became of [`Work::request`]. No context: the compiler sees that logging ignores it and
/// would pass none.
#[inline(always)]
pub fn trace<I: Net>(result: u32) -> u32 {
    let Some(Work { request, .. }) = I::work() else {
        return result;
    };
    let (protocol, wanted) = (request.inner.protocol, u16::from_be(request.inner.sport));
    if result == CLAIMED {
        if trace_level() >= DEBUG {
            debug!(
                (),
                "masquerade protocol {} source port {} as port {}",
                protocol,
                wanted,
                u16::from_be(request.outer.sport)
            );
        }
    } else if trace_level() >= WARN {
        warn!(
            (),
            "no port for protocol {} source port {}", protocol, wanted
        );
    }
    result
}

/// The request was granted.
pub const CLAIMED: u32 = 0;
const NO_PORT: u32 = 1;
const NO_ROOM: u32 = 2;

/// Finds a free outer tuple for [`Work::request`], whose inner tuple is that of the packet, takes
/// it, and stores both entries: [`CLAIMED`], and the outer tuple is in [`Work::partner`].
#[inline(always)]
pub fn claim<I: Call>(ctx: *mut __sk_buff) -> u32 {
    let Some(Work { request, .. }) = I::work() else {
        return NO_ROOM;
    };
    let mut result = if may_keep(request) {
        try_claim::<I>(ctx)
    } else {
        NO_PORT
    };
    for _ in 0..ROUNDS {
        if result == CLAIMED {
            break;
        }
        if search::<I>() {
            result = try_claim::<I>(ctx);
        }
    }
    if result != CLAIMED {
        return result;
    }
    // Looked up again: the port was chosen, and the tuple may have been replaced, behind the back
    // of the reference above.
    let result = I::commit();
    let Some(Work {
        request, partner, ..
    }) = I::work()
    else {
        return NO_ROOM;
    };
    *partner = request.outer;
    result
}

/// Whether the source port is tried as it is.
///
/// Not for a client that comes to have an address of the host: its ephemeral port is as likely as
/// any other to be that of a later connection of the host itself, straight to the container.
#[inline(always)]
fn may_keep<I: Ip>(request: &Request<I>) -> bool {
    request.opener != Opener::Client
        || u32::from(u16::from_be(request.inner.sport))
            < constant!(port_first) + constant!(port_count)
}

#[inline(always)]
fn try_claim<I: Call>(ctx: *mut __sk_buff) -> u32 {
    if I::host_uses(ctx) == FREE {
        I::insert()
    } else {
        NO_PORT
    }
}

/// Tries ports at random until one is free.
#[inline(always)]
fn search<I: Call>() -> bool {
    for attempt in 0..ATTEMPTS {
        if I::probe(attempt) == FREE {
            return true;
        }
    }
    false
}

/// What [`probe`] found: no flow that lives has the port.
pub const FREE: u32 = 0;
/// What [`probe`] found: somebody has it.
pub const USED: u32 = 1;

/// Gives the outer tuple of [`Work::request`] another port, and tells whether a flow has it.
#[inline(always)]
pub fn probe<I: Net>(attempt: u32) -> u32 {
    let Some(Work {
        request,
        partner_place,
        ..
    }) = I::work()
    else {
        return USED;
    };
    request.outer.sport = candidate(request.inner.protocol, attempt);
    partner_place.set(&request.outer);
    match find::<I>(&partner_place.key) {
        Some((flow, _)) if is_alive(flow, tick()) => USED,
        _ => FREE,
    }
}

#[inline(always)]
fn candidate(protocol: u8, attempt: u32) -> u16 {
    // SAFETY: the helper has no arguments.
    let random = u64::from(unsafe { bpf_get_prandom_u32() });
    let (first, ports) = match protocol {
        protocol::ICMP | protocol::ICMPV6 => (0, 1 << 16),
        _ if attempt < PREFERRED => (constant!(port_first), constant!(port_count)),
        _ => (UNPRIVILEGED, (1 << 16) - UNPRIVILEGED),
    };
    // Multiply and shift: every port of the range is as likely as any other.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "first + ports is at most 65536"
    )]
    let port = (first + ((random * u64::from(ports)) >> 32) as u32) as u16;
    port.to_be()
}

/// Takes the outer tuple of [`Work::request`] if no flow has it.
#[inline(always)]
pub fn insert<I: Net>() -> u32 {
    let (
        Some(flow),
        Some(Work {
            request,
            partner_place: place,
            ..
        }),
    ) = (I::scratch(), I::work())
    else {
        return NO_ROOM;
    };
    place.set(&request.outer);
    if let Some((expired, _)) = find::<I>(&place.key) {
        if is_alive(expired, tick()) {
            return NO_PORT;
        }
        count(Counter::Expired);
        remove_one::<I>(&place.key);
        let translating = if expired.halves[0].rewrite != 0 {
            &expired.halves[0]
        } else {
            &expired.halves[1]
        };
        place.set(&outgoing::<I>(translating, request.outer.protocol));
        remove_one::<I>(&place.key);
        place.set(&request.outer);
    }
    write_outer::<I>(flow, request, place.end);
    if I::opening()
        .insert(&place.key, &*flow, u64::from(BPF_NOEXIST))
        .is_err()
    {
        return NO_PORT;
    }
    // Another CPU may have moved the same tuple to the other table between our look and our
    // insertion.
    if I::flows().get_ptr(&place.key).is_some() {
        let _ = I::opening().remove(&place.key);
        return NO_PORT;
    }
    CLAIMED
}

/// Whether a socket of the host would get the replies to the outer tuple of [`Work::request`]: a
/// connection, or a listener that one may yet be made to; or a host port.
#[inline(always)]
pub fn host_uses<I: Net>(ctx: *mut __sk_buff) -> u32 {
    let Some(Work {
        request: Request { outer, opener, .. },
        ..
    }) = I::work()
    else {
        return USED;
    };
    if *opener != Opener::Other && port::is_mapped::<I>(outer) {
        return USED;
    }
    if outer.protocol != protocol::TCP && outer.protocol != protocol::UDP {
        return FREE;
    }
    let mut tuple = I::socket_tuple(&outer.reversed());
    let lookup = if outer.protocol == protocol::TCP {
        // SAFETY: the context is valid, the tuple has the size that is passed; the reference is
        // released below.
        unsafe {
            bpf_skc_lookup_tcp(
                ctx.cast(),
                &raw mut tuple,
                I::SOCKET_TUPLE,
                BPF_F_CURRENT_NETNS,
                0,
            )
        }
    } else {
        // SAFETY: as above.
        unsafe {
            bpf_sk_lookup_udp(
                ctx.cast(),
                &raw mut tuple,
                I::SOCKET_TUPLE,
                BPF_F_CURRENT_NETNS,
                0,
            )
        }
    };
    if lookup.is_null() {
        return FREE;
    }
    // SAFETY: a reference that the lookup took, released once.
    unsafe { bpf_sk_release(lookup.cast()) };
    USED
}

/// The entry under the outer tuple: replies go back to the owner; the owner's direction is taken,
/// should the host itself use it.
#[inline(always)]
fn write_outer<I: Net>(flow: &mut Flow<I::Addr>, request: &Request<I>, end: End) {
    memory::clear(flow);
    flow.state = opened(request, end) | state::OUTER;
    prolong(flow, request.outer.protocol, tick());
    let own = half(flow, end);
    set_outgoing::<I>(own, &request.outer);
    own.action = action::TAKEN;
    let back = half(flow, end.other());
    set_outgoing::<I>(back, &request.inner.reversed());
    back.rewrite = rewrite::DST | both(request) | early(request);
    back.action = request.back;
    back.out_ifindex = request.owner;
    if let Some(client) = device(request.client)
        && client.flags & flags::FOREIGN == 0
    {
        enter::<I>(back, request.client, client);
    }
    if let Some(pod) = device(request.owner) {
        leave_to_pod(back, request.owner, pod);
    }
}

/// The state of a new flow's entry, of which the owner has `end`.
#[inline(always)]
fn opened<I: Ip>(request: &Request<I>, end: End) -> u32 {
    match request.opener {
        Opener::Owner | Opener::Aside => end.heard(),
        Opener::Other => state::PORT,
        Opener::Client => end.heard() | state::PORT,
    }
}

/// What is replaced in both directions.
#[inline(always)]
fn both<I: Ip>(request: &Request<I>) -> u8 {
    match request.opener {
        Opener::Client | Opener::Aside => twice::TWICE,
        Opener::Owner | Opener::Other => 0,
    }
}

/// Packets between two pods of this node are translated at the pods: no uplink does it for them.
#[inline(always)]
fn early<I: Ip>(request: &Request<I>) -> u8 {
    let is_of_pods = request.client != 0 && (request.owner != 0 || request.opener == Opener::Other);
    if is_of_pods { rewrite::EARLY } else { 0 }
}

#[inline(always)]
fn fill_inner<I: Net>(out: &mut Half<I::Addr>, request: &Request<I>) {
    set_outgoing::<I>(out, &request.outer);
    if let Some(pod) = device(request.owner) {
        enter::<I>(out, request.owner, pod);
    }
    match device(request.client) {
        Some(pod) if both(request) != 0 => leave_to_pod(out, request.client, pod),
        _ => leave_to_wire(out, request.uplink),
    }
    out.rewrite = rewrite::SRC | both(request) | early(request);
    if request.opener == Opener::Aside {
        out.rewrite |= rewrite::ASIDE;
    }
    out.action = request.out;
}

/// Whether packets of this half leave with that tuple, whose protocol is theirs.
#[inline(always)]
fn leaves_as<I: Net>(half: &Half<I::Addr>, tuple: &Tuple<I::Addr>) -> bool {
    half.rewrite & rewrite::SRC != 0
        && half.src == tuple.src
        && half.dst == tuple.dst
        && half.sport == tuple.sport
        && half.dport == tuple.dport
}

/// Stores the entry under the inner tuple of [`Work::request`], whose place is [`Work::place`]. If
/// another CPU was faster with the same flow, its choice stands and ours is given back.
#[inline(always)]
pub fn commit<I: Net>() -> u32 {
    let Some(Work {
        place: Place { key, end },
        request,
        partner_place,
        ..
    }) = I::work()
    else {
        return NO_ROOM;
    };
    let end = *end;
    let is_shared =
        request.opener == Opener::Aside || request.opener == Opener::Owner && request.owner == 0;
    if is_shared && let Some((flow, _)) = find::<I>(key) {
        // The host's flow has the tuple that is the outer one of a pod's flow, or the flow straight
        // to a container has that of one to a host port: both are in one entry.
        fill_inner::<I>(half(flow, end), request);
        return CLAIMED;
    }
    let Some(flow) = I::scratch() else {
        return NO_ROOM;
    };
    memory::clear(flow);
    flow.state = opened(request, end);
    prolong(flow, request.inner.protocol, tick());
    fill_inner::<I>(half(flow, end), request);
    if request.opener == Opener::Owner && request.owner != 0 {
        flow.state |= end.charged();
    }
    // The key of a host port's flow is not the packet's: nobody has looked yet whether it is free.
    if find::<I>(key).is_some_and(|(known, _)| !is_alive(known, tick())) {
        remove_one::<I>(key);
    }
    if I::flows().get_ptr(&*key).is_none()
        && I::opening()
            .insert(&*key, &*flow, u64::from(BPF_NOEXIST))
            .is_ok()
    {
        return CLAIMED;
    }
    let winner = find::<I>(key).map(|(flow, _)| half(flow, end));
    if let Some(winner) = &winner
        && request.opener == Opener::Other
        && leaves_as::<I>(winner, &request.outer)
    {
        // The same flow, of which the outer entry was evicted: it is there again.
        return CLAIMED;
    }
    remove_one::<I>(&partner_place.key);
    let Some(winner) = winner else {
        return NO_ROOM;
    };
    if winner.rewrite & rewrite::SRC == 0 || request.opener == Opener::Other {
        return NO_ROOM;
    }
    request.outer = outgoing::<I>(winner, request.inner.protocol);
    CLAIMED
}

/// Restores the other entry of a translated flow, of which that of the packet in [`Work::head`] was
/// not evicted: its half is in [`Work::half`], the other entry's tuple in [`Work::partner`].
#[inline(always)]
pub fn restore<I: Net>() -> u32 {
    let (
        Some(flow),
        Some(Work {
            head,
            half: survivor,
            partner,
            partner_place: Place { key, end },
            request,
            state: known,
            ..
        }),
    ) = (I::scratch(), I::work())
    else {
        return NO_ROOM;
    };
    request.opener = opener(survivor.rewrite, *known);
    if twice::is_inner(survivor.rewrite, *known) {
        request.inner = head.tuple;
        request.outer = *partner;
        request.owner = survivor.in_ifindex;
        request.back = match survivor.action {
            action::STACK | action::HOST => survivor.action,
            _ if request.owner == 0 => action::STACK,
            _ => action::PEER,
        };
        request.client = if survivor.rewrite & rewrite::EARLY == 0 && both(request) == 0 {
            0
        } else {
            owner_of(partner.dst.wide())
        };
        write_outer::<I>(flow, request, *end);
    } else {
        request.outer = head.tuple.reversed();
        request.owner = survivor.out_ifindex;
        request.client = survivor.in_ifindex;
        request.uplink = 0;
        request.out = match survivor.action {
            action::PEER | action::HOST if both(request) != 0 => survivor.action,
            _ => action::STACK,
        };
        memory::clear(flow);
        fill_inner::<I>(half(flow, end.other()), request);
    }
    // The direction of this packet was used before, so its flow was answered; if not, it expires
    // all the same.
    flow.state |= state::ANSWERED;
    prolong(flow, head.tuple.protocol, tick());
    let _ = I::flows().insert(&*key, &*flow, u64::from(BPF_NOEXIST));
    CLAIMED
}

/// The host veth of a pod's address; 0 if it is none.
#[inline(always)]
fn owner_of(addr: Addr) -> u32 {
    endpoint(addr).map_or(0, |endpoint| endpoint.ifindex)
}

#[inline(always)]
const fn opener(rewrites: u8, flow_state: u32) -> Opener {
    let is_twice = rewrites & twice::TWICE == twice::TWICE;
    match (flow_state & state::PORT != 0, is_twice) {
        (_, true) if rewrites & rewrite::ASIDE != 0 => Opener::Aside,
        (false, true) => Opener::Aside,
        (false, false) => Opener::Owner,
        (true, true) => Opener::Client,
        (true, false) => Opener::Other,
    }
}

/// Whether a packet may begin a flow. An answer, or a refusal, belongs to one that is not known: it
/// can't be given an address.
#[inline(always)]
pub fn may_open<I: Net>(head: &Head<I>) -> bool {
    head.tcp_flags & (tcp::SYN | tcp::ACK) != tcp::SYN | tcp::ACK && head.tcp_flags & tcp::RST == 0
}

/// Whether the pod's packets to this destination must leave with an address of the uplink.
#[inline(always)]
pub fn is_wanted<I: Net>(pod: &Device, dst: I::Addr) -> bool {
    pod.flags & flags::MASQUERADE != 0 && !keeps_source(pod.network, dst.wide())
}

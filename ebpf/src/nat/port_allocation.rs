//! Who gets a port: one under which no other flow, and no socket of the host, talks to the same
//! remote address and port.
//!
//! The outer entry is inserted with `BPF_NOEXIST`: that insertion is the lock. The source port is
//! kept where it is free, because applications notice when it is not.

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::generated::{
        bpf_get_prandom_u32, bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp,
    },
};
use underpass_abi::{
    counter::Counter,
    flow::{Flow, protocol},
};

use crate::{
    call::Call,
    flow::{
        entry::{find, has_target, is_alive, is_shared},
        table::{At, Stored, remove_all, store},
    },
    kernel::{
        maps::{Work, constant, count, tick},
        net::Net,
    },
    nat::{
        host_port,
        mapping::{Opener, Request, share, write_outer},
    },
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
/// State of a connected socket, of UDP as well.
const BPF_TCP_ESTABLISHED: u32 = 1;

/// The request was granted.
pub const CLAIMED: u32 = 0;
/// No port was free.
pub const NO_PORT: u32 = 1;
/// An entry could not be stored.
pub const NO_ROOM: u32 = 2;

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
        if result != NO_PORT {
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

/// Whether the source port is tried as it is: not if it is a host port.
///
/// Nor for a client that comes to have an address of the host: its ephemeral port is as likely as
/// any other to be that of a later connection of the host itself, straight to the container.
#[inline(always)]
fn may_keep<I: Net>(request: &Request<I>) -> bool {
    let is_low = u32::from(u16::from_be(request.inner.sport))
        < constant!(port_first) + constant!(port_count);
    (is_low || request.opener != Opener::Client) && !host_port::is_mapped::<I>(&request.outer)
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
    if host_port::is_mapped::<I>(&request.outer) {
        return USED;
    }
    partner_place.set(&request.outer);
    match find::<I>(&partner_place.key) {
        Some(flow) if is_in_use::<I>(flow) => USED,
        _ => FREE,
    }
}

/// Whether an outer entry keeps others off its tuple: not when it was idle for too long, nor when the
/// pod that it leads to is gone; but as long as another flow is in it.
#[inline(always)]
fn is_in_use<I: Net>(flow: &Flow<I::Addr>) -> bool {
    is_shared(flow) || is_alive(flow, tick()) && flow.halves.iter().all(has_target::<I>)
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
pub fn insert<I: Call>() -> u32 {
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
    if let Some(expired) = find::<I>(&place.key) {
        if is_in_use::<I>(expired) {
            return NO_PORT;
        }
        count(Counter::Expired);
        remove_all::<I>(&place.key, expired);
    }
    write_outer::<I>(flow, request, place.end);
    match store::<I>(At::PartnerPlace, share(request)) {
        Stored::Done => CLAIMED,
        Stored::Taken => NO_PORT,
        Stored::NoRoom => NO_ROOM,
    }
}

/// What [`host_uses`] found: a UDP socket that is connected to nobody. It keeps its port for itself,
/// but where the port is mapped it steps back, as it does where netfilter translates.
pub const SERVED: u32 = 2;

/// Whether a socket of the host would get the replies to the outer tuple of [`Work::request`], a
/// connection or a listener that one may yet be made to: [`FREE`], [`USED`] or [`SERVED`].
#[inline(always)]
pub fn host_uses<I: Net>(ctx: *mut __sk_buff) -> u32 {
    let Some(Work {
        request: Request { outer, .. },
        ..
    }) = I::work()
    else {
        return USED;
    };
    if outer.protocol != protocol::TCP && outer.protocol != protocol::UDP {
        return FREE;
    }
    let mut tuple = I::socket_tuple(&outer.reversed());
    if outer.protocol == protocol::TCP {
        // SAFETY: the context is valid, the tuple has the size that is passed.
        let socket = unsafe {
            bpf_skc_lookup_tcp(
                ctx.cast(),
                &raw mut tuple,
                I::SOCKET_TUPLE,
                BPF_F_CURRENT_NETNS,
                0,
            )
        };
        if socket.is_null() {
            return FREE;
        }
        // SAFETY: a reference that the lookup took, released once.
        unsafe { bpf_sk_release(socket.cast()) };
        return USED;
    }
    // SAFETY: as above.
    let socket = unsafe {
        bpf_sk_lookup_udp(
            ctx.cast(),
            &raw mut tuple,
            I::SOCKET_TUPLE,
            BPF_F_CURRENT_NETNS,
            0,
        )
    };
    if socket.is_null() {
        return FREE;
    }
    // SAFETY: a socket, until it is released.
    let is_connected = unsafe { (*socket).state } == BPF_TCP_ESTABLISHED;
    // SAFETY: as above.
    unsafe { bpf_sk_release(socket.cast()) };
    if is_connected { USED } else { SERVED }
}

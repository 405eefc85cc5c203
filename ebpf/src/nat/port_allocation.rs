//! Who gets a port: one under which no other flow, and no socket of the host, talks to the same
//! remote address and port.
//!
//! The outer entry is inserted with `BPF_NOEXIST`: that insertion is the lock. The source port is
//! kept where it is free, because applications notice when it is not.

use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_get_prandom_u32};
use underpass_abi::{
    counter::Counter,
    flow::{Flow, protocol},
};

use crate::{
    filter::quota::{charge, refund},
    flow::{
        entry::{find, has_target, is_alive, is_spare, remove_all},
        table::{At, Stored, store},
    },
    kernel::{
        global::{global, number},
        host_ports::is_mapped,
        maps::{constant, count, tick},
        net::Net,
        socket::{Socket, host_uses},
        verdict::{Step, Verdict},
        work_area::WorkArea,
    },
    model::{
        request::{Opener, Payer, Request},
        state::is_shared,
        work::Work,
    },
    nat::mapping::{Allocation, commit, share, write_outer},
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

number!(
    /// Which tuples a flow may have.
    pub enum Claim {
        /// Those that no flow has which lives.
        Free,
        /// Those of flows as well that nobody would miss: the last round's, where whoever talks to one server has used up its ports.
        Spare,
    }
);

/// Does what [`allocate`] does, at the expense of an account: a flow that gets no tuple costs nothing. Drops the packet where that has too many
/// flows which nobody answers. Where it is not the one of the request's owner, an answer gives nothing back, and the payer stays what it is.
#[inline(always)]
pub fn allocate_paid<I: Net>(
    work: &mut WorkArea<I>,
    ctx: *mut __sk_buff,
    account: u32,
) -> Step<Allocation> {
    if account != 0 && !charge(account) {
        return Err(Verdict::dropped(Counter::DropFlowQuota));
    }
    let request = &mut work.request;
    if account != 0 && account == request.owner {
        request.payer = Payer::Owner;
    }
    let allocation = allocate(work, ctx);
    if allocation != Allocation::Granted && account != 0 {
        refund(account);
    }
    Ok(allocation)
}

global!(
    /// Finds a free outer tuple for [`Work::request`], whose inner tuple is that of the packet, takes
    /// it, and stores both entries: [`Allocation::Granted`], and the outer tuple is in [`Work::partner`].
    fn allocate<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> Allocation {
        let mut result = if may_keep(&work.request) {
            try_port(work, ctx, Claim::Free)
        } else {
            Allocation::NoPort
        };
        for round in 0..ROUNDS {
            if result != Allocation::NoPort {
                break;
            }
            let claim = if round == ROUNDS - 1 {
                Claim::Spare
            } else {
                Claim::Free
            };
            if search(work, claim) {
                result = try_port(work, ctx, claim);
            }
        }
        if result != Allocation::Granted {
            return result;
        }
        let result = commit(work);
        work.partner = work.request.outer;
        result
    }
);

/// Whether the source port is tried as it is: not if it is a host port.
///
/// Nor for a client that comes to have an address of the host: its ephemeral port is as likely as
/// any other to be that of a later connection of the host itself, straight to the container.
#[inline(always)]
fn may_keep<I: Net>(request: &Request<I>) -> bool {
    let is_low = u32::from(u16::from_be(request.inner.sport))
        < constant!(port_first) + constant!(port_count);
    (is_low || request.opener != Opener::Client) && !is_mapped::<I>(&request.outer)
}

#[inline(always)]
fn try_port<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff, claim: Claim) -> Allocation {
    if host_uses(work, ctx) == Socket::None {
        insert(work, claim)
    } else {
        Allocation::NoPort
    }
}

global!(
    /// Tries ports at random until one is free.
    fn search<I: Net>(work: &mut WorkArea<I>, claim: Claim) -> bool {
        for attempt in 0..ATTEMPTS {
            if probe(work, attempt, claim) {
                return true;
            }
        }
        false
    }
);

global!(
    /// Gives the outer tuple of [`Work::request`] another port, and tells whether it may be claimed.
    pub fn probe<I: Net>(work: &mut WorkArea<I>, attempt: u32, claim: Claim) -> bool {
        let Work {
            request,
            partner_place,
            ..
        } = &mut **work;
        request.outer.sport = candidate(request.inner.protocol, attempt);
        if is_mapped::<I>(&request.outer) {
            return false;
        }
        partner_place.set(&request.outer);
        find::<I>(&partner_place.key)
            .is_none_or(|flow| !is_in_use::<I>(flow, request.inner.protocol, claim))
    }
);

/// Whether an outer entry keeps others off its tuple: not when it was idle for too long, nor when the
/// pod that it leads to is gone; but as long as another flow is in it.
#[inline(always)]
fn is_in_use<I: Net>(flow: &Flow<I::Addr>, protocol: u8, claim: Claim) -> bool {
    if is_shared(flow) {
        return true;
    }
    let is_kept = claim == Claim::Free || !is_spare(flow, protocol, tick());
    is_kept && is_alive(flow, tick()) && flow.halves.iter().all(has_target::<I>)
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

global!(
    /// Takes the outer tuple of [`Work::request`] if it may be claimed.
    pub fn insert<I: Net>(work: &mut WorkArea<I>, claim: Claim) -> Allocation {
        let Work {
            draft: flow,
            request,
            partner_place: place,
            ..
        } = &mut **work;
        place.set(&request.outer);
        if let Some(old) = find::<I>(&place.key) {
            if is_in_use::<I>(old, request.outer.protocol, claim) {
                return Allocation::NoPort;
            }
            count(if is_alive(old, tick()) {
                Counter::MadeRoom
            } else {
                Counter::Expired
            });
            remove_all::<I>(&place.key, old);
        }
        write_outer::<I>(flow, request, place.end);
        let share = share(request);
        match store(work, At::PartnerPlace, share) {
            Stored::Done => Allocation::Granted,
            Stored::Taken => Allocation::NoPort,
            Stored::NoRoom => Allocation::NoRoom,
        }
    }
);

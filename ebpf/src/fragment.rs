//! Datagrams in pieces: only the first has ports, so it leaves them for the others.

use aya_ebpf::bindings::BPF_ANY;
use underpass_abi::flow::{FragmentPorts, REFUSED};
use underpass_ebpf::{
    ip::{Head, Piece},
    l4::Kind,
};

use crate::kernel::{
    maps::{constant, tick},
    net::Net,
};

pub mod reorder;

/// Remembers the ports of a first fragment.
#[inline(always)]
pub fn remember<I: Net>(head: &Head<I>) {
    if head.piece == Piece::First && head.kind == Kind::Flow {
        store::<I>(head, 0);
    }
}

/// The first fragment is dropped: so are the later ones.
#[inline(always)]
pub fn refuse<I: Net>(head: &Head<I>) {
    store::<I>(head, REFUSED);
}

#[inline(always)]
fn store<I: Net>(head: &Head<I>, refused: u32) {
    let ports = FragmentPorts {
        sport: head.tuple.sport,
        dport: head.tuple.dport,
        protocol: u32::from(head.tuple.protocol),
        seen: tick() & !REFUSED | refused,
    };
    let _ = I::fragments().insert(head.fragment_key(), &ports, u64::from(BPF_ANY));
}

/// What a first fragment of the same datagram left a short while ago.
#[inline(always)]
fn first<I: Net>(head: &Head<I>) -> Option<&'static FragmentPorts> {
    // SAFETY: an entry is written once, whole.
    let ports = unsafe { I::fragments().get(head.fragment_key()) }?;
    let age = tick().wrapping_sub(ports.seen) & !REFUSED;
    (age <= constant!(timeout.fragment)).then_some(ports)
}

/// Gives a later fragment the ports of its first, if that was seen: then it has a tuple like any
/// other packet.
#[inline(always)]
pub fn complete<I: Net>(head: &mut Head<I>) {
    if head.piece != Piece::Later {
        return;
    }
    let Some(ports) = first::<I>(head) else {
        return;
    };
    if ports.seen & REFUSED != 0 {
        return;
    }
    head.tuple.sport = ports.sport;
    head.tuple.dport = ports.dport;
    head.tuple.protocol = ports.protocol.to_le_bytes()[0];
    head.kind = Kind::Flow;
}

/// Whether a later fragment's first was dropped.
#[inline(always)]
pub fn is_refused<I: Net>(head: &Head<I>) -> bool {
    first::<I>(head).is_some_and(|ports| ports.seen & REFUSED != 0)
}

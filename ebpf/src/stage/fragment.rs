//! Datagrams in pieces: only the first has ports, so it leaves them for the others.

use aya_ebpf::bindings::BPF_ANY;
use underpass_abi::flow::FragmentPorts;
use underpass_ebpf::{
    ip::{Head, Piece},
    l4::Kind,
};

use crate::maps::{Net, constant, tick};

/// Remembers the ports of a first fragment.
#[inline(always)]
pub fn remember<I: Net>(head: &Head<I>) {
    if head.piece == Piece::First && head.kind == Kind::Flow {
        let ports = FragmentPorts {
            sport: head.tuple.sport,
            dport: head.tuple.dport,
            seen: tick(),
        };
        let _ = I::fragments().insert(head.fragment_key(), &ports, u64::from(BPF_ANY));
    }
}

/// The first fragment is dropped: so are the later ones.
#[inline(always)]
pub fn forget<I: Net>(head: &Head<I>) {
    let _ = I::fragments().remove(head.fragment_key());
}

/// Gives a later fragment the ports of its first, if that was seen a short while ago: then it has a
/// tuple like any other packet.
#[inline(always)]
pub fn complete<I: Net>(head: &mut Head<I>) {
    if head.piece != Piece::Later {
        return;
    }
    // SAFETY: an entry is written once, whole.
    let Some(ports) = (unsafe { I::fragments().get(head.fragment_key()) }) else {
        return;
    };
    if tick().wrapping_sub(ports.seen) > constant!(timeout.fragment) {
        return;
    }
    head.tuple.sport = ports.sport;
    head.tuple.dport = ports.dport;
    head.kind = Kind::Flow;
}

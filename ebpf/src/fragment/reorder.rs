//! Later fragments that come before their first, whose ports they need to be translated: kept for a
//! while, and sent again behind it.
//!
//! A program can't keep a packet, but it can keep the bytes, and the first fragment is the vehicle
//! that brings them back: it is cloned out to where it came from, then becomes each of the others in
//! turn. All of them meet the same program again, in the right order this time.

use aya_ebpf::bindings::{__sk_buff, BPF_F_INGRESS, TC_ACT_STOLEN};
use underpass_abi::{
    addr::{Addr, Family as _},
    counter::Counter,
    endpoint::{Device, device as flags},
    flow::FragmentKey,
};
use underpass_ebpf::{ip::Piece, l4::Kind};

use crate::{
    call::Call,
    fragment,
    kernel::{
        maps::{HELD, HELD_ROOM, Work, constant, count, device, endpoint, tick},
        net::Net,
        route,
        skb::Skb,
        verdict::NEXT,
    },
};

/// The longest frame that is kept, in bytes: one of the usual MTU, with whatever is around it.
pub const LENGTH: usize = 2048;
/// How many are kept of a datagram. One of 64 KiB has so many at an MTU of 1500.
const PIECES: u32 = 48;

/// Key of `HELD`: one of the fragments of a datagram that wait at a hook.
#[repr(C)]
pub struct HeldKey {
    src: Addr,
    dst: Addr,
    identification: u32,
    protocol: u32,
    ifindex: u32,
    /// Counted from 0, in the order in which they came.
    turn: u32,
}

/// Value of `HELD`: a fragment as the hook saw it.
#[repr(C)]
pub struct Held {
    /// In bytes.
    len: u32,
    /// Tick at which it came.
    seen: u32,
    frame: [u8; LENGTH],
}

/// Which way a hook's packets go.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Way {
    /// Out of the device.
    Out,
    /// In by it.
    In,
}

/// It is kept.
pub const KEPT: u32 = 0;
/// It is too long, or too many of them wait, or its first was dropped.
pub const LOST: u32 = 1;

/// Keeps the bytes of the packet in [`Work::head`].
#[inline(always)]
pub fn keep<I: Net>(ctx: *mut __sk_buff) -> u32 {
    let (Some(mut key), Some(room)) = (key::<I>(ctx), HELD_ROOM.get_ptr_mut(0)) else {
        return LOST;
    };
    if I::work().is_none_or(|work| fragment::is_refused(&work.head)) {
        return LOST;
    }
    // SAFETY: the slot belongs to this CPU, and is used here only; all bytes are valid.
    let room = unsafe { &mut *room };
    if !Skb::new(ctx).copy_to(&mut room.frame, &mut room.len) {
        return LOST;
    }
    room.seen = tick();
    for turn in 0..PIECES {
        key.turn = turn;
        // SAFETY: an entry is written whole, and is read here only for its age.
        if unsafe { HELD.get(&key) }.is_some_and(|held| !is_old(held)) {
            continue;
        }
        if HELD.insert(&key, &*room, 0).is_err() {
            return LOST;
        }
        count(Counter::HeldFragment);
        return KEPT;
    }
    LOST
}

/// Keeps a copy of a later fragment without ports that arrives, if its destination is an address of
/// this host: it may be for a host port, or be the answer to a masqueraded flow. The stack gets it as
/// well; it may as well be for the host.
#[inline(always)]
pub fn copy<I: Call>(ctx: *mut __sk_buff) {
    let Some(Work { head, .. }) = I::work() else {
        return;
    };
    let ifindex = Skb::new(ctx).ifindex();
    let is_waiting = head.kind == Kind::Later
        && device(ifindex).is_some_and(is_way_back)
        && endpoint(head.tuple.dst.wide()).is_none();
    if is_waiting && I::is_local(ctx, ifindex) == route::LOCAL {
        I::keep(ctx);
    }
}

/// Whether a packet that is sent in by the device meets the same program again: not by a netkit,
/// whose program sits at the other end, nor behind a bridge.
#[inline(always)]
fn is_way_back(device: &Device) -> bool {
    device.flags & (flags::NETKIT | flags::FOREIGN) == 0
}

/// As [`release`], of a packet that may be no first fragment: nearly none is.
#[inline(always)]
pub fn lead<I: Call>(ctx: *mut __sk_buff, way: Way) -> i32 {
    match I::work() {
        Some(work) if work.head.piece == Piece::First => I::release(ctx, way as u32),
        _ => NEXT,
    }
}

/// Sends the first fragment in [`Work::head`] and all that wait for it through this hook again, in
/// that order; [`NEXT`] if none wait.
#[inline(always)]
pub fn release<I: Net>(ctx: *mut __sk_buff, way: u32) -> i32 {
    let mut skb = Skb::new(ctx);
    if skb.is_again() {
        skb.unmark();
        return NEXT;
    }
    let Some(mut key) = key::<I>(ctx) else {
        return NEXT;
    };
    if HELD.get_ptr(&key).is_none() {
        return NEXT;
    }
    let flags = if way == Way::In as u32 {
        u64::from(BPF_F_INGRESS)
    } else {
        0
    };
    skb.mark_again();
    // What leaves is handled before the call returns, by this same program: the work is another's
    // from here on.
    if !skb.clone_redirect(key.ifindex, flags) {
        skb.unmark();
        return NEXT;
    }
    skb.unmark();
    for turn in 0..PIECES {
        key.turn = turn;
        // SAFETY: an entry is written whole; should it be evicted and filled anew meanwhile, the
        // receiver finds the checksum of the datagram wrong.
        let Some(held) = (unsafe { HELD.get(&key) }) else {
            break;
        };
        if !is_old(held)
            && skb.become_frame(&held.frame, &raw const held.len)
            && skb.clone_redirect(key.ifindex, flags)
        {
            count(Counter::ReleasedFragment);
        }
        let _ = HELD.remove(&key);
    }
    TC_ACT_STOLEN
}

#[inline(always)]
fn key<I: Net>(ctx: *mut __sk_buff) -> Option<HeldKey> {
    let FragmentKey {
        src,
        dst,
        identification,
        protocol,
    } = I::work()?.head.fragment_key();
    Some(HeldKey {
        src: src.wide(),
        dst: dst.wide(),
        identification,
        protocol,
        ifindex: Skb::new(ctx).ifindex(),
        turn: 0,
    })
}

#[inline(always)]
fn is_old(held: &Held) -> bool {
    tick().wrapping_sub(held.seen) > constant!(timeout.fragment)
}

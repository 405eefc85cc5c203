//! Later fragments that come before their first, whose ports they need to be translated: kept for a
//! while, and sent again behind it.
//!
//! A program can't keep a packet, but it can keep the bytes, and the first fragment is the vehicle
//! that brings them back: it is cloned out to where it came from, then becomes each of the others in
//! turn. All of them meet the same program again, in the right order this time.

use aya_ebpf::bindings::{__sk_buff, BPF_F_INGRESS, TC_ACT_STOLEN};
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    endpoint::{Device, device as flags},
    flow::FragmentKey,
};
use underpass_ebpf::{ip::Piece, l4::Kind};

use crate::{
    fragment,
    kernel::{
        global::{Number, global},
        maps::{HELD, HELD_ROOM, constant, count, device, endpoint, tick},
        net::Net,
        route,
        skb::Skb,
        verdict::{Step, Verdict},
        work_area::WorkArea,
    },
    model::held::{Held, HeldKey},
};

/// How many are kept of a datagram. One of 64 KiB has so many at an MTU of 1500.
const PIECES: u32 = 48;

/// Which way a hook's packets go: the flags of the helper that sends a copy there.
#[derive(Clone, Copy)]
pub struct Way(u32);

impl Way {
    /// Out of the device.
    pub const OUT: Self = Self(0);
    /// In by it.
    pub const IN: Self = Self(BPF_F_INGRESS);
}

impl Number for Way {
    type Raw = u32;

    #[inline(always)]
    fn encode(self) -> u32 {
        self.0
    }

    #[inline(always)]
    fn decode(raw: u32) -> Self {
        Self(raw)
    }
}

global!(
    /// Keeps the bytes of the packet in [`Work::head`]. Not if it is too long, or too many of its
    /// datagram wait, or the first was dropped.
    pub fn keep<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> bool {
        let Some(room) = HELD_ROOM.get_ptr_mut(0) else {
            return false;
        };
        let mut key = key(work, ctx);
        if fragment::is_refused(&work.head) {
            return false;
        }
        // SAFETY: the slot belongs to this CPU, and is used here only; all bytes are valid.
        let room = unsafe { &mut *room };
        if !Skb::new(ctx).copy_to(&mut room.frame, &mut room.len) {
            return false;
        }
        room.seen = tick();
        for turn in 0..PIECES {
            key.turn = turn;
            // SAFETY: an entry is written whole, and is read here only for its age.
            if unsafe { HELD.get(&key) }.is_some_and(|held| !is_old(held)) {
                continue;
            }
            if HELD.insert(&key, &*room, 0).is_err() {
                return false;
            }
            count(Counter::HeldFragment);
            return true;
        }
        false
    }
);

/// Keeps a copy of a later fragment without ports that arrives, if its destination is an address of
/// this host: it may be for a host port, or be the answer to a masqueraded flow. The stack gets it as
/// well; it may as well be for the host.
#[inline(always)]
pub fn copy<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) {
    let head = &work.head;
    let ifindex = Skb::new(ctx).ifindex();
    let is_waiting = head.kind == Kind::Later
        && device(ifindex).is_some_and(is_way_back)
        && endpoint(head.tuple.dst.wide()).is_none();
    if is_waiting && route::is_local(work, ctx, ifindex) {
        keep(work, ctx);
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
pub fn lead<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff, way: Way) -> Step<()> {
    if work.head.piece == Piece::First {
        release(work, ctx, way)
    } else {
        Ok(())
    }
}

global!(
    /// Sends the first fragment in [`Work::head`] and all that wait for it through this hook again, in
    /// that order, if any wait.
    pub fn release<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff, way: Way) -> Step<()> {
        let mut skb = Skb::new(ctx);
        if skb.is_again() {
            skb.unmark();
            return Ok(());
        }
        let mut key = key(work, ctx);
        if HELD.get_ptr(&key).is_none() {
            return Ok(());
        }
        let flags = u64::from(way.0);
        skb.mark_again();
        // What leaves is handled before the call returns, by this same program: the work is another's
        // from here on. So the packet does not go on, whatever the call says. A full queue says no
        // after the program has run, too; then this piece is lost as any packet is there.
        let _ = skb.clone_redirect(key.ifindex, flags);
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
        Err(Verdict::sent(TC_ACT_STOLEN.cast_unsigned()))
    }
);

#[inline(always)]
fn key<I: Net>(work: &WorkArea<I>, ctx: *mut __sk_buff) -> HeldKey {
    let FragmentKey {
        src,
        dst,
        identification,
        protocol,
    } = work.head.fragment_key();
    HeldKey {
        src: src.wide(),
        dst: dst.wide(),
        identification,
        protocol,
        ifindex: Skb::new(ctx).ifindex(),
        turn: 0,
    }
}

#[inline(always)]
fn is_old(held: &Held) -> bool {
    tick().wrapping_sub(held.seen) > constant!(timeout.fragment)
}

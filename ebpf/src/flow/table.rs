//! The flow tables: who gets an entry, and who gives one up.
//!
//! Nobody sweeps, and nothing that lives is evicted. Each entry has a slot in an array of keys. Who
//! inserts looks at slots at random: one that is empty, or whose flow has expired or lost its pod,
//! is the new flow's. If none of a few is, a flow that is no conversation yet has to go; if there is
//! no such flow either, the *new* one is refused. (As connection tracking does with what is not
//! ASSURED.)

use aya_ebpf::{bindings::BPF_NOEXIST, helpers::generated::bpf_get_prandom_u32};
use underpass_abi::{
    counter::Counter,
    flow::{Flow, Key, action, state},
    node::slots,
};

use crate::{
    call::Call,
    flow::entry::{find, has_target, is_alive, is_shared, outgoing},
    kernel::{
        maps::{constant, count, device, tick},
        memory,
        net::Net,
    },
};

/// [`store`] under [`Work::place`](crate::kernel::maps::Work::place).
pub const PLACE: u32 = 0;
/// [`store`] under [`Work::partner_place`](crate::kernel::maps::Work::partner_place).
pub const PARTNER: u32 = 1;
/// With one of these: the flow is the host's own.
pub const FOR_HOST: u32 = 2;

/// The entry is in the table.
pub const STORED: u32 = 0;
/// There is an entry under its key.
pub const TAKEN: u32 = 1;
/// The table is full of flows that live.
pub const NO_ROOM: u32 = 2;

/// How many slots are looked at. Where four fifths of them are conversations', a new flow is refused
/// once in a thousand times; where one half is, practically never.
const LOOKS: u32 = 32;
/// After so many looks one that was only noted, because others use its port, has to go.
const TAKE_OTHERS: u32 = 8;
/// After so many looks a flow that nobody answered has to go.
const TAKE_UNANSWERED: u32 = 20;
/// After so many looks one that is no conversation yet has to go.
const TAKE_UNASSURED: u32 = 26;

/// How many slots are tried if other CPUs take them at the same time.
const TRIES: u32 = 3;
/// One slot in so many is kept for the host's own flows.
const HOST_SHARE: u32 = 16;

/// Stores the flow that was built in the scratch room under one of the two keys of
/// [`Work`](crate::kernel::maps::Work), if that is free. With [`FOR_HOST`] it takes a place that pods don't
/// get.
#[inline(always)]
pub fn store<I: Call>(at: u32) -> u32 {
    let (Some(flow), Some(work)) = (I::scratch(), I::work()) else {
        return NO_ROOM;
    };
    let key = if at & PARTNER == PLACE {
        &work.place.key
    } else {
        &work.partner_place.key
    };
    if I::flows().get_ptr(key).is_some() {
        return TAKEN;
    }
    flow.tag = key.tag();
    flow.since = tick();
    for attempt in 0..TRIES {
        let found = I::seek(at & FOR_HOST);
        let Some(slot) = I::slots().get_ptr_mut(found.wrapping_sub(1)) else {
            break;
        };
        // SAFETY: a slot is a key; whoever reads one that is half written finds no such flow.
        let slot = unsafe { &mut *slot };
        // Written at once after the look, so that of two CPUs that found the same slot the slower one
        // has it before the faster one looks again.
        memory::copy(slot, key);
        slot.0.reserved2 = now();
        if attempt == 0 {
            flow.slot = found - 1;
            let inserted = I::flows().insert(key, &*flow, u64::from(BPF_NOEXIST));
            if inserted.is_err() {
                // Another CPU was faster with the same flow, or there is no memory.
                slot.0.protocol = 0;
                return if I::flows().get_ptr(key).is_some() {
                    TAKEN
                } else {
                    NO_ROOM
                };
            }
        } else if let Some(stored) = find::<I>(key) {
            stored.slot = found - 1;
        }
        if has_key::<I>(slot, key) {
            return STORED;
        }
        if attempt == TRIES - 1 {
            // It lives without a slot, and is removed when somebody looks it up after its end.
            return STORED;
        }
    }
    count(Counter::TableFull);
    // Without a second slot the entry has to go again.
    remove_one::<I>(key);
    NO_ROOM
}

/// What [`look`] and [`seek`] found: the slot is another's.
const NONE: u32 = 0;

/// Finds a free slot: its number plus one, or [`NONE`].
#[inline(always)]
pub fn seek<I: Call>(for_host: u32) -> u32 {
    for attempt in 0..LOOKS {
        let slot = I::look(attempt, for_host);
        if slot != NONE {
            return slot;
        }
    }
    NONE
}

/// Looks at a slot at random, and empties it if its flow is gone or may be taken away: its number
/// plus one, or [`NONE`].
#[inline(always)]
pub fn look<I: Net>(attempt: u32, for_host: u32) -> u32 {
    // SAFETY: the helper has no arguments.
    let random = u64::from(unsafe { bpf_get_prandom_u32() });
    let all = slots(constant!(flows));
    let kept = all / HOST_SHARE;
    let (first, share) = if for_host == 0 {
        (kept, all - kept)
    } else {
        (0, kept)
    };
    let slot = first + ((random * u64::from(share)) >> 32) as u32;
    let (Some(key), Some(work)) = (I::slots().get_ptr(slot), I::work()) else {
        return NONE;
    };
    // SAFETY: any bytes are a key.
    let mut key = unsafe { *key };
    let written = key.0.reserved2;
    key.0.reserved2 = 0;
    let Some(flow) = find::<I>(&key) else {
        // Whoever wrote it in this tick may be about to store its flow.
        let is_fresh = key.0.protocol != 0 && written == now();
        return if is_fresh { NONE } else { slot + 1 };
    };
    if flow.slot != slot {
        return slot + 1;
    }
    // The two entries of one flow are stored one after the other.
    if key == work.partner_place.key || key == work.place.key {
        return NONE;
    }
    // Two flows are in it: it stays until it has expired.
    if is_shared(flow) && is_alive(flow, tick()) {
        return NONE;
    }
    if is_over::<I>(&key, flow) {
        count(Counter::Expired);
    } else if may_go::<I>(&key, flow, attempt) {
        count(Counter::MadeRoom);
    } else {
        return NONE;
    }
    remove_partners::<I>(&key, flow);
    let _ = I::flows().remove(&key);
    // That took a while, in which another CPU may have found the slot free.
    let is_left = I::slots().get_ptr(slot).is_some_and(|again| {
        // SAFETY: as above.
        has_key::<I>(unsafe { &*again }, &key)
    });
    if is_left { slot + 1 } else { NONE }
}

/// Whether a slot has this key.
#[inline(always)]
fn has_key<I: Net>(slot: &Key<I::Addr>, key: &Key<I::Addr>) -> bool {
    let (Key(slot), Key(key)) = (slot, key);
    slot.src == key.src
        && slot.dst == key.dst
        && slot.sport == key.sport
        && slot.dport == key.dport
        && slot.protocol == key.protocol
}

/// When a slot is taken, in the part of its key that is zero in all keys: ticks, of which 16 bits are
/// enough to tell now from a while ago.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the lower half")]
fn now() -> u16 {
    tick() as u16
}

/// Whether a flow that lives has to make room at this attempt.
#[inline(always)]
fn may_go<I: Net>(key: &Key<I::Addr>, flow: &Flow<I::Addr>, attempt: u32) -> bool {
    if flow.state & state::SURPLUS != 0 {
        return true;
    }
    if flow.halves[0].action == action::OTHERS {
        // It is noted again with its next packet.
        return attempt >= TAKE_OTHERS;
    }
    if flow.state & state::ASSURED != 0 || attempt < TAKE_UNANSWERED {
        return false;
    }
    if flow.state & state::ANSWERED == state::ANSWERED && attempt < TAKE_UNASSURED {
        return false;
    }
    // Two flows may share an entry: a conversation stays whole.
    let mut is_shared = false;
    for half in &flow.halves {
        if half.rewrite != 0 {
            let (partner, _) = outgoing::<I>(half, key.0.protocol).key();
            if find::<I>(&partner).is_some_and(|other| other.state & state::ASSURED != 0) {
                is_shared = true;
            }
        }
    }
    !is_shared
}

/// Whether a flow has expired, both its entries if it is translated, or lost one of its pods.
#[inline(always)]
fn is_over<I: Net>(key: &Key<I::Addr>, flow: &Flow<I::Addr>) -> bool {
    let mut is_over = !is_alive(flow, tick());
    for half in &flow.halves {
        if !has_target::<I>(half) || half.in_ifindex != 0 && device(half.in_ifindex).is_none() {
            return true;
        }
        if is_over && half.rewrite != 0 {
            let (partner, _) = outgoing::<I>(half, key.0.protocol).key();
            if find::<I>(&partner).is_some_and(|partner| is_alive(partner, tick())) {
                is_over = false;
            }
        }
    }
    is_over
}

/// Removes a flow: the entry under `key`, and the other one of each direction that it translates.
#[inline(always)]
pub fn remove_all<I: Net>(key: &Key<I::Addr>, flow: &Flow<I::Addr>) {
    // The others first: the memory of an entry that was removed may be another's at once.
    remove_partners::<I>(key, flow);
    remove_one::<I>(key);
}

#[inline(always)]
fn remove_partners<I: Net>(key: &Key<I::Addr>, flow: &Flow<I::Addr>) {
    for half in &flow.halves {
        if half.rewrite != 0 {
            let (partner, _) = outgoing::<I>(half, key.0.protocol).key();
            // Another flow's entry stays; the half that leads nowhere goes when a packet meets it.
            if find::<I>(&partner).is_some_and(|other| !is_shared(other)) {
                remove_one::<I>(&partner);
            }
        }
    }
}

/// Removes one entry, and frees its slot at once: one that was written in this tick would be left
/// alone until the next.
#[inline(always)]
pub fn remove_one<I: Net>(key: &Key<I::Addr>) {
    if let Some(flow) = find::<I>(key)
        && let Some(slot) = I::slots().get_ptr_mut(flow.slot)
    {
        // SAFETY: a slot is a key; whoever reads one that is half written finds no such flow.
        let slot = unsafe { &mut *slot };
        if has_key::<I>(slot, key) {
            slot.0.protocol = 0;
        }
    }
    let _ = I::flows().remove(key);
}

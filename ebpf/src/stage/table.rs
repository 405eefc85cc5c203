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
    flow::{Flow, Key, state},
};

use super::flow::{find, has_target, is_alive, outgoing};
use crate::{
    call::Call,
    maps::{Net, constant, count, device, tick},
    memory,
};

/// [`store`] under [`Work::place`](crate::maps::Work::place).
pub const PLACE: u32 = 0;
/// [`store`] under [`Work::partner_place`](crate::maps::Work::partner_place).
pub const PARTNER: u32 = 1;

/// The entry is in the table.
pub const STORED: u32 = 0;
/// There is an entry under its key.
pub const TAKEN: u32 = 1;
/// The table is full of flows that live.
pub const NO_ROOM: u32 = 2;

/// How many slots are looked at. Where four fifths of them are conversations', a new flow is refused
/// once in a thousand times; where one half is, practically never.
const LOOKS: u32 = 32;
/// After so many looks a flow that nobody answered has to go.
const TAKE_UNANSWERED: u32 = 20;
/// After so many looks one that is no conversation yet has to go.
const TAKE_UNASSURED: u32 = 26;

/// Stores the flow that was built in the scratch room under one of the two keys of [`Work`](crate::maps::Work), if that
/// is free.
#[inline(always)]
pub fn store<I: Call>(at: u32) -> u32 {
    let (Some(flow), Some(work)) = (I::scratch(), I::work()) else {
        return NO_ROOM;
    };
    let key = if at == PLACE {
        &work.place.key
    } else {
        &work.partner_place.key
    };
    if I::flows().get_ptr(key).is_some() {
        return TAKEN;
    }
    let mut slot = NONE;
    for attempt in 0..LOOKS {
        slot = I::look(attempt);
        if slot != NONE {
            break;
        }
    }
    let Some(slot) = I::slots().get_ptr_mut(slot.wrapping_sub(1)) else {
        count(Counter::TableFull);
        return NO_ROOM;
    };
    flow.tag = key.tag();
    flow.since = tick();
    if I::flows()
        .insert(key, &*flow, u64::from(BPF_NOEXIST))
        .is_err()
    {
        // Another CPU was faster, or there is no memory.
        return if I::flows().get_ptr(key).is_some() {
            TAKEN
        } else {
            NO_ROOM
        };
    }
    // Two CPUs that found the same slot: the flow of one of them has none, and is removed when
    // somebody looks it up after it has expired.
    // SAFETY: a slot is a key; whoever reads one that is half written finds no such flow.
    memory::copy(unsafe { &mut *slot }, key);
    STORED
}

/// What [`look`] found: the slot is another's.
const NONE: u32 = 0;

/// Looks at a slot at random, and empties it if its flow is gone or may be taken away: its number
/// plus one, or [`NONE`].
#[inline(always)]
pub fn look<I: Net>(attempt: u32) -> u32 {
    // SAFETY: the helper has no arguments.
    let random = unsafe { bpf_get_prandom_u32() };
    let slot = random & (constant!(flows).wrapping_sub(1));
    let (Some(key), Some(work)) = (I::slots().get_ptr(slot), I::work()) else {
        return NONE;
    };
    // SAFETY: any bytes are a key.
    let key = unsafe { *key };
    if let Some(flow) = find::<I>(&key) {
        // The two entries of one flow are stored one after the other.
        if key == work.partner_place.key || key == work.place.key {
            return NONE;
        }
        if is_over::<I>(&key, flow) {
            count(Counter::Expired);
        } else {
            let is_wanted = attempt >= TAKE_UNANSWERED
                && flow.state & state::ANSWERED != state::ANSWERED
                || attempt >= TAKE_UNASSURED && flow.state & state::ASSURED == 0;
            if !is_wanted {
                return NONE;
            }
            count(Counter::MadeRoom);
        }
        remove_all::<I>(&key, flow);
    }
    slot + 1
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
    for half in &flow.halves {
        if half.rewrite != 0 {
            let (partner, _) = outgoing::<I>(half, key.0.protocol).key();
            remove_one::<I>(&partner);
        }
    }
    remove_one::<I>(key);
}

/// Removes one entry. Its slot is found empty by whoever looks at it.
#[inline(always)]
pub fn remove_one<I: Net>(key: &Key<I::Addr>) {
    let _ = I::flows().remove(key);
}

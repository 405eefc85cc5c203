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

use underpass_ebpf::ip::Ip;

use crate::{
    flow::entry::{
        find, has_key, has_target, is_alive, is_over, is_spare, remove_one, remove_partners,
    },
    kernel::{
        global::{Number, Outcome, global, number},
        maps::{constant, count, device, tick},
        memory,
        net::Net,
        work_area::WorkArea,
    },
    model::{direction::outgoing, state::is_shared, work::Work},
};

number!(
    /// Under which key of [`Work`](crate::kernel::Work) a flow is stored.
    pub enum At {
        /// That of [`Work::place`](crate::kernel::Work::place).
        Place,
        /// That of [`Work::partner_place`](crate::kernel::Work::partner_place).
        PartnerPlace,
    }
);

impl At {
    #[inline(always)]
    fn key<I: Ip>(self, work: &Work<I>) -> &Key<I::Addr> {
        match self {
            Self::Place => &work.place.key,
            Self::PartnerPlace => &work.partner_place.key,
        }
    }
}

number!(
    /// Whose slots a new flow may take.
    pub enum Share {
        /// Those of pods' flows.
        Pods,
        /// Those that are kept for the node's own flows.
        Node,
    }
);

number!(
    /// What became of a flow that was to be stored.
    pub enum Stored {
        /// The table is full of flows that live.
        NoRoom,
        /// There is an entry under its key already.
        Taken,
        /// It is in the table.
        Done,
    }
);

/// The number of a slot.
#[derive(Clone, Copy)]
struct Slot(u32);

impl Outcome for Option<Slot> {
    const FALLBACK: Self = None;
}

impl Number for Option<Slot> {
    type Raw = u32;

    #[inline(always)]
    fn encode(self) -> u32 {
        self.map_or(0, |Slot(number)| number + 1)
    }

    #[inline(always)]
    fn decode(raw: u32) -> Self {
        (raw != 0).then(|| Slot(raw.wrapping_sub(1)))
    }
}

/// The slot of a draft that is not in the table.
const NOWHERE: u32 = u32::MAX;
/// How many slots are looked at. Where four fifths of them are conversations', a new flow is refused
/// once in a thousand times; where one half is, practically never.
const LOOKS: u32 = 32;
/// After so many looks one has to go whose tuple may be another's, that the world had no room to open, or that was only noted because
/// others use its port: it is noted again with its next packet.
const TAKE_SPARE: u32 = 8;
/// After so many looks one that is over has to go.
const TAKE_OVER: u32 = 14;
/// After so many looks one that is no conversation yet has to go, answered or not: an answer is had for the asking.
const TAKE_UNASSURED: u32 = 20;

/// How many slots are tried if other CPUs take them at the same time.
const TRIES: u32 = 3;
/// One slot in so many is kept for the host's own flows.
const HOST_SHARE: u32 = 16;

global!(
    /// Stores the flow in [`Work::draft`](crate::model::work::Work::draft), if its key is free. Who calls has seen that it was: another flow may
    /// have made room by the time that this is known.
    pub fn store<I: Net>(work: &mut WorkArea<I>, at: At, share: Share) -> Stored {
        work.draft.slot = NOWHERE;
        for attempt in 0..TRIES {
            let Some(found) = seek(work, share) else {
                break;
            };
            let Some(slot) = I::slots().get_ptr_mut(found.0) else {
                break;
            };
            // SAFETY: a slot is a key; whoever reads one that is half written finds no such flow.
            let slot = unsafe { &mut *slot };
            let key = at.key(work);
            // Written at once after the look, so that of two CPUs that found the same slot the slower
            // one has it before the faster one looks again.
            memory::copy(slot, key);
            slot.0.reserved2 = now();
            if attempt == 0 {
                let tag = key.tag();
                work.draft.tag = tag;
                work.draft.slot = found.0;
                let key = at.key(work);
                let inserted = I::flows().insert(key, &work.draft, u64::from(BPF_NOEXIST));
                if inserted.is_err() {
                    slot.0.protocol = 0;
                    work.draft.slot = NOWHERE;
                    break;
                }
            } else if let Some(stored) = find::<I>(key) {
                stored.slot = found.0;
            }
            if has_key::<I>(slot, at.key(work)) {
                return Stored::Done;
            }
            if attempt == TRIES - 1 {
                // It lives without a slot, and is removed when somebody looks it up after its end.
                return Stored::Done;
            }
        }
        if work.draft.slot != NOWHERE {
            // Without a second slot the entry has to go again.
            remove_one::<I>(at.key(work));
        } else if I::flows().get_ptr(at.key(work)).is_some() {
            // There was one, or another CPU was faster with the same flow.
            return Stored::Taken;
        }
        count(Counter::TableFull);
        Stored::NoRoom
    }
);

global!(
    /// Finds a slot that is free.
    fn seek<I: Net>(work: &mut WorkArea<I>, share: Share) -> Option<Slot> {
        let all = slots(I::flow_count());
        let kept = all / HOST_SHARE;
        let (first, number) = match share {
            Share::Pods => (kept, all - kept),
            Share::Node => (0, kept),
        };
        for attempt in 0..LOOKS {
            let slot = look(work, attempt, first, number);
            if slot.is_some() {
                return slot;
            }
        }
        None
    }
);

global!(
    /// Looks at one of `number` slots from `first` on, at random, and empties it if its flow is gone or
    /// may be taken away. It is returned if it is free then.
    fn look<I: Net>(work: &mut WorkArea<I>, attempt: u32, first: u32, number: u32) -> Option<Slot> {
        // SAFETY: the helper has no arguments.
        let random = u64::from(unsafe { bpf_get_prandom_u32() });
        let slot = first + ((random * u64::from(number)) >> 32) as u32;
        let key = I::slots().get_ptr(slot)?;
        // SAFETY: any bytes are a key.
        let mut key = unsafe { *key };
        let written = key.0.reserved2;
        key.0.reserved2 = 0;
        if key.0.protocol == 0 {
            return Some(Slot(slot));
        }
        // It can't have expired yet: in a table that is full of what has ended lately, most looks end here, before they touch an entry. (What has lost
        // its pod so young is found by the later looks.)
        if attempt < TAKE_SPARE && now().wrapping_sub(written) < soonest_end() {
            return None;
        }
        let Some(flow) = find::<I>(&key) else {
            // Whoever wrote it in this tick may be about to store its flow.
            let is_fresh = written == now();
            return (!is_fresh).then_some(Slot(slot));
        };
        if flow.slot != slot {
            return Some(Slot(slot));
        }
        // The two entries of one flow are stored one after the other.
        if key == work.partner_place.key || key == work.place.key {
            return None;
        }
        // Two flows are in it: it stays until it has expired.
        if is_shared(flow) && is_alive(flow, tick()) {
            return None;
        }
        if has_expired::<I>(&key, flow) {
            count(Counter::Expired);
        } else if may_go::<I>(&key, flow, attempt) {
            count(Counter::MadeRoom);
        } else {
            return None;
        }
        remove_partners::<I>(&key, flow);
        let _ = I::flows().remove(&key);
        // That took a while, in which another CPU may have found the slot free.
        let is_left = I::slots().get_ptr(slot).is_some_and(|again| {
            // SAFETY: as above.
            has_key::<I>(unsafe { &*again }, &key)
        });
        is_left.then_some(Slot(slot))
    }
);

/// When a slot is taken, in the part of its key that is zero in all keys: ticks, of which 16 bits are
/// enough to tell now from a while ago.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the lower half")]
fn now() -> u16 {
    tick() as u16
}

/// Ticks after its slot is taken before which no flow expires.
#[inline(always)]
fn soonest_end() -> u16 {
    let closing = constant!(timeout.tcp_closing).min(constant!(timeout.tcp_opening));
    let others = constant!(timeout.udp_opening).min(constant!(timeout.icmp));
    u16::try_from(closing.min(others)).unwrap_or(u16::MAX)
}

/// Whether a flow that lives has to make room at this attempt.
#[inline(always)]
fn may_go<I: Net>(key: &Key<I::Addr>, flow: &Flow<I::Addr>, attempt: u32) -> bool {
    let (protocol, tick) = (key.0.protocol, tick());
    let first = if flow.state & state::SURPLUS != 0
        || flow.halves[0].action == action::OTHERS
        || is_spare(flow, protocol, tick)
    {
        TAKE_SPARE
    } else if is_over(flow, protocol, tick) {
        TAKE_OVER
    } else if flow.state & state::ASSURED != 0 {
        return false;
    } else {
        TAKE_UNASSURED
    };
    if attempt < first {
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

/// Whether a flow has expired, both its entries if it is translated, or lost one of its pods. Of two flows in one entry that one is lost alone.
#[inline(always)]
fn has_expired<I: Net>(key: &Key<I::Addr>, flow: &Flow<I::Addr>) -> bool {
    let mut has_expired = !is_alive(flow, tick());
    let has_partner = flow.state & state::BY_STACK == 0;
    for half in &flow.halves {
        if !has_target::<I>(half) || half.in_ifindex != 0 && device(half.in_ifindex).is_none() {
            if is_shared(flow) {
                continue;
            }
            return true;
        }
        if has_expired && has_partner && half.rewrite != 0 {
            let (partner, _) = outgoing::<I>(half, key.0.protocol).key();
            if find::<I>(&partner).is_some_and(|partner| is_alive(partner, tick())) {
                has_expired = false;
            }
        }
    }
    has_expired
}

//! The two entries of a translated flow: one under the tuple that its owner sends, one under that
//! which the other end sees. Each holds both.

use underpass_abi::{
    addr::{Addr, Family as _},
    counter::Counter,
    endpoint::device as flags,
    flow::{End, Flow, Half, action, rewrite, state},
};
use underpass_ebpf::{ip::Ip, l4::tcp};

use crate::{
    flow::{
        entry::{begin, find, is_alive, remove_all, remove_one},
        table::{At, Share, Stored, store},
        tracking::{self, Noted},
        way::{enter, leave_to_pod, leave_to_wire},
    },
    kernel::{
        global::{global, number},
        maps::{device, endpoint, tick},
        memory,
        net::Net,
        verdict::{Step, Verdict},
        work_area::WorkArea,
    },
    model::{
        direction::{half_of, is_answer, is_inner, leaves_as, outgoing, set_outgoing},
        request::{Opener, Payer, Request, both, early, opened, opener, surplus},
        state::is_guest,
        work::{Place, Work},
    },
};

number!(
    /// What became of a request for an outer tuple.
    pub enum Allocation {
        /// An entry could not be stored.
        NoRoom,
        /// Somebody has the tuple, or no port was free.
        NoPort,
        /// It was granted.
        Granted,
    }
);

impl Allocation {
    /// Whether the flow's packet goes on: without a tuple it can't.
    #[inline(always)]
    pub fn granted(self) -> Step<()> {
        match self {
            Self::Granted => Ok(()),
            Self::NoPort => Err(Verdict::dropped(Counter::DropNoPort)),
            Self::NoRoom => Err(Verdict::dropped(Counter::DropMapFull)),
        }
    }
}

/// The entry under the outer tuple: replies go back to the owner; the owner's direction is taken,
/// should the host itself use it.
#[inline(always)]
pub fn write_outer<I: Net>(flow: &mut Flow<I::Addr>, request: &Request<I>, end: End) {
    memory::clear(flow);
    flow.state = opened(request, end) | state::OUTER | surplus(request);
    begin(flow, request.outer.protocol, tick());
    let own = half_of(flow, end);
    set_outgoing::<I>(own, &request.outer);
    own.action = action::TAKEN;
    let back = half_of(flow, end.other());
    set_outgoing::<I>(back, &request.inner.reversed());
    back.rewrite = rewrite::DST | both(request) | early(request);
    back.action = request.back;
    back.out_ifindex = request.owner;
    // What a bridge has behind it comes by the bridge or by its port. Both ends are replaced only for containers behind the one device.
    let client = device(request.client)
        .filter(|client| client.flags & flags::FOREIGN == 0 || request.opener == Opener::Client);
    if let Some(client) = client {
        enter(back, request.client, client);
    }
    if let Some(pod) = device(request.owner) {
        leave_to_pod(back, request.owner, pod);
    }
    // What is given back goes to whom the half says.
    if request.payer == Payer::Client && (request.client == 0 || client.is_some()) {
        flow.state |= end.other().charged();
    }
}

/// The slots for a flow: the node's own flows have some that pods don't get.
#[inline(always)]
pub fn share<I: Ip>(request: &Request<I>) -> Share {
    if request.owner == 0 && request.opener == Opener::Owner {
        Share::Node
    } else {
        Share::Pods
    }
}

#[inline(always)]
fn fill_inner<I: Net>(out: &mut Half<I::Addr>, request: &Request<I>) {
    set_outgoing::<I>(out, &request.outer);
    if let Some(pod) = device(request.owner) {
        enter(out, request.owner, pod);
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
    (out.passed, out.uplink) = (0, 0);
}

global!(
    /// Stores the entry under the inner tuple of [`Work::request`], whose place is [`Work::place`]. If
    /// another CPU was faster with the same flow, its choice stands and ours is given back.
    pub fn commit<I: Net>(work: &mut WorkArea<I>) -> Allocation {
        let Work {
            place: Place { key, end },
            request,
            draft: flow,
            ..
        } = &mut **work;
        let end = *end;
        let is_shared = request.opener == Opener::Aside
            || request.opener == Opener::Owner && request.owner == 0;
        if is_shared && let Some(flow) = find::<I>(key) {
            // The host's flow has the tuple that is the outer one of a pod's flow, or the flow straight
            // to a container has that of one to a host port: both are in one entry.
            fill_inner::<I>(half_of(flow, end), request);
            return Allocation::Granted;
        }
        memory::clear(flow);
        flow.state = opened(request, end) | surplus(request);
        if request.payer == Payer::Owner {
            flow.state |= end.charged();
        }
        begin(flow, request.inner.protocol, tick());
        fill_inner::<I>(half_of(flow, end), request);
        // The key of a host port's flow is not the packet's: nobody has looked yet whether it is free.
        let mut is_free = true;
        if let Some(known) = find::<I>(key) {
            if is_alive(known, tick()) {
                is_free = false;
            } else if known.state & state::BY_STACK == 0 {
                remove_one::<I>(key);
            } else {
                remove_all::<I>(key, known);
            }
        }
        let share = share(request);
        if is_free && store(work, At::Place, share) == Stored::Done {
            return Allocation::Granted;
        }
        let Work {
            place: Place { key, end },
            request,
            partner_place,
            ..
        } = &mut **work;
        let winner = find::<I>(key).map(|flow| half_of(flow, *end));
        if let Some(winner) = &winner
            && request.opener == Opener::Other
            && winner.rewrite & rewrite::SRC != 0
            && leaves_as::<I>(winner, &request.outer)
        {
            // The same flow, of which the outer entry was removed: it is there again.
            return Allocation::Granted;
        }
        remove_one::<I>(&partner_place.key);
        let Some(winner) = winner else {
            return Allocation::NoRoom;
        };
        if winner.rewrite & rewrite::SRC == 0 || request.opener == Opener::Other {
            return Allocation::NoPort;
        }
        request.outer = outgoing::<I>(winner, request.inner.protocol);
        Allocation::Granted
    }
);

global!(
    /// Restores the other entry of a translated flow, of which that of the packet in [`Work::head`] was
    /// not removed: its half is in [`Work::half`]. Whether it is there again.
    pub fn restore<I: Net>(work: &mut WorkArea<I>) -> bool {
        let Work {
            draft: flow,
            head,
            half: survivor,
            place,
            partner,
            partner_place,
            request,
            state: known,
            ..
        } = &mut **work;
        if survivor.rewrite == 0 {
            return true;
        }
        // By the copy: the memory of an entry that is removed meanwhile is another's.
        *partner = outgoing::<I>(survivor, head.tuple.protocol);
        partner_place.set(partner);
        let end = partner_place.end;
        // What the first entry says besides is of another flow then.
        let Some(first) = find::<I>(&place.key) else {
            return false;
        };
        if is_guest(first, place.end) {
            *known = 0;
        }
        request.opener = opener(survivor.rewrite, *known);
        request.payer = Payer::Nobody;
        if is_inner(survivor.rewrite, *known) {
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
            write_outer::<I>(flow, request, end);
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
            fill_inner::<I>(half_of(flow, end.other()), request);
        }
        let is_swapped = place.end != end;
        let shared = if is_swapped {
            swapped(*known & SHARED)
        } else {
            *known & SHARED
        };
        flow.state = flow.state & !SHARED | shared;
        let restored = half_of(flow, end.other());
        restored.passed = survivor.passed;
        if survivor.action == action::WIRE {
            restored.uplink = survivor.out_ifindex;
            restored.queue |=
                device(restored.uplink).map_or(0, |uplink| uplink.flags & flags::BRIDGE);
        }
        let leads_to_wire = restored.rewrite == rewrite::SRC && survivor.action == action::PEER;
        if leads_to_wire && *known & state::BYPASS != 0 {
            // The way is asked for with the next packet.
            restored.action = action::WIRE;
        }
        begin(flow, head.tuple.protocol, tick());
        let share = share(request);
        store(work, At::PartnerPlace, share) != Stored::NoRoom
    }
);

/// Takes note of the packet in [`Work::head`], which was looked up, and brings the other entry of its flow back, if that was
/// removed. Whether there still is a flow. Drops a packet whose answer nobody would know. What the packet says is old news within a tick: then the
/// other entry, which nothing takes away alone, is not looked for.
#[inline(always)]
pub fn note<I: Net>(work: &mut WorkArea<I>) -> Step<bool> {
    if work.is_noted {
        return Ok(true);
    }
    match tracking::note(work) {
        Noted::Incomplete if !restore(work) && asks(work) => {
            Err(Verdict::dropped(Counter::DropMapFull))
        }
        Noted::Incomplete | Noted::Whole => Ok(true),
        Noted::Gone if work.state & state::PORT != 0 && asks(work) => {
            Err(Verdict::dropped(Counter::DropRemoved))
        }
        Noted::Gone => Ok(false),
    }
}

/// Whether the packet in [`Work::head`], of a translated flow whose direction is in [`Work::half`], may have an answer, and is none itself.
#[inline(always)]
pub fn asks<I: Net>(work: &WorkArea<I>) -> bool {
    let (rewrites, known) = (work.half.rewrite, work.state);
    let is_question = if known & state::PORT == 0 {
        is_inner(rewrites, known)
    } else {
        !is_answer(rewrites, known)
    };
    is_question && work.head.tcp_flags & tcp::RST == 0
}

/// What both entries of a flow say of it.
const SHARED: u32 = state::ANSWERED
    | state::FINISHED
    | state::FIN_B_LAST
    | state::RST
    | state::PORT
    | state::OFFERED
    | state::BYPASS
    | state::STICKY
    | state::ASSURED;

/// The state with its ends exchanged: the bits of end B are next to those of end A.
#[inline(always)]
const fn swapped(flow_state: u32) -> u32 {
    const OF_A: u32 = state::HEARD_A | state::FIN_A;
    const OF_B: u32 = state::HEARD_B | state::FIN_B;
    let others = flow_state & !(OF_A | OF_B) ^ state::FIN_B_LAST;
    others | (flow_state & OF_A) << 1 | (flow_state & OF_B) >> 1
}

/// The host veth of a pod's address; 0 if it is none.
#[inline(always)]
fn owner_of(addr: Addr) -> u32 {
    endpoint(addr).map_or(0, |endpoint| endpoint.ifindex)
}

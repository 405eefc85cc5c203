//! Host ports: a flow to a port of the host goes to the container that serves it.
//!
//! The container sees the client's own address. What comes back must leave with the address and
//! port that the client asked for, so both entries are stored with the first packet, as for a
//! masqueraded flow whose replies come first.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    endpoint::LOOPBACK,
    flow::{Tuple, action, protocol, rewrite, state},
    quota::WORLD,
};
use underpass_ebpf::{
    ip::Head,
    l4::{Kind, tcp},
};

use crate::{
    filter::{
        quota::{charge, refund},
        tunnel::is_closed,
    },
    flow::tracking::{look_up, withdraw},
    kernel::{
        container,
        global::{global, number},
        host_ports::serving,
        maps::{count, device, endpoint, is_service_address},
        net::Net,
        route,
        skb::Skb,
        socket::{Socket, host_uses},
        verdict::{Step, Verdict},
        work_area::WorkArea,
    },
    model::{
        direction::is_answer,
        request::{Opener, Payer},
        state::may_open,
        work::Work,
    },
    nat::{
        mapping::{Allocation, commit},
        port_allocation::{Claim, insert},
    },
};

number!(
    /// What is known of a packet that may be for a host port.
    pub enum Served {
        /// It is for none, and of no flow that is known.
        Unknown,
        /// It is for one, and its flow, which is not known, must be translated at both ends, see
        /// [`hairpin`](crate::nat::hairpin).
        Crowded,
        /// Its flow is known, and in the way of one to a host port: the same holds for it.
        InTheWay,
        /// Its flow is known, and its direction is in [`Work::half`].
        Known,
    }
);

global!(
    /// Sends the flow of the packet in [`Work::head`], which is not known, to the container that serves
    /// its destination. `client` is the host veth that the packet came from, 0 if it came from the
    /// world.
    pub fn open_host_port<I: Net>(
        work: &mut WorkArea<I>,
        ctx: *mut __sk_buff,
        client: u32,
    ) -> Step<Served> {
        let Work { head, request, .. } = &mut **work;
        if head.kind != Kind::Flow || !may_open(head) {
            return Ok(Served::Unknown);
        }
        let Some(target) = serving::<I>(&head.tuple) else {
            return Ok(Served::Unknown);
        };
        // Whoever got these would have the traffic of all pods with this node.
        let pod = device(target.ifindex);
        if is_closed(pod, head.tuple.protocol, head.tuple.dport) {
            return Ok(Served::Unknown);
        }
        if endpoint(target.addr).is_none_or(|pod| pod.ifindex != target.ifindex) {
            return Ok(Served::Unknown);
        }
        let asked = head.tuple.reversed();
        request.outer = asked;
        request.inner = Tuple::new(
            asked.protocol,
            I::narrow(target.addr),
            target.port,
            asked.dst,
            asked.dport,
        );
        request.owner = target.ifindex;
        // Nobody has checked the source of a container whose addresses we do not know.
        let is_anybodys = client != 0 && endpoint(head.tuple.src.wide()).is_none();
        if is_anybodys && route::answers_leave(work, ctx) {
            return Ok(Served::Unknown);
        }
        let Work { head, request, .. } = &mut **work;
        if container::is_same(target.ifindex, client) {
            return Ok(Served::Crowded);
        }
        // A container of another plugin, again: this time its bridge has the packet.
        if target.addr == head.tuple.src.wide() {
            return Ok(Served::Unknown);
        }
        // No pod of this node is out there.
        if client == 0 && endpoint(head.tuple.src.wide()).is_some() {
            return Ok(Served::Unknown);
        }
        request.client = client;
        request.uplink = 0;
        request.opener = Opener::Other;
        (request.out, request.back) = (action::STACK, action::STACK);
        if !is_local(work, ctx) || belongs_to_host(work, ctx) {
            return Ok(Served::Unknown);
        }
        // Of a flow that nobody answers, who began it pays; the world by what it may open to the
        // container.
        let account = if client == 0 {
            target.ifindex | WORLD
        } else {
            client
        };
        work.request.payer = if charge(account) {
            Payer::Client
        } else if client == 0 {
            Payer::Surplus
        } else {
            return Err(Verdict::dropped(Counter::DropFlowQuota));
        };
        let entries = store_both(work);
        // A pod pays for both ends of such a flow when it is stored; the world does not.
        let is_paid = entries == Entries::Stored || entries == Entries::InnerTaken && client == 0;
        if work.request.payer == Payer::Client && !is_paid {
            refund(account);
        }
        match entries {
            Entries::Stored => count(Counter::HostPort),
            // Another CPU may have been faster with the same flow.
            Entries::OuterTaken => {}
            Entries::InnerTaken => return Ok(Served::Crowded),
            Entries::NoRoom => return Err(Verdict::dropped(Counter::DropMapFull)),
        }
        if look_up(work) {
            Ok(Served::Known)
        } else {
            // It has made room for another CPU's flow already. The node has no answer to what is for a container.
            Err(Verdict::dropped(Counter::DropRemoved))
        }
    }
);

/// Removes the flow of the packet in [`Work::head`], which was found, if somebody beyond `client` has opened it to a host port: in the name of
/// who has the packet's source address, be that the pod behind this host veth, or, for [`LOOPBACK`], a process of this host. Whether it did.
///
/// Nobody can tell at an uplink whose address a source will be. Who has it looks here, so it is not kept from the port.
#[inline(always)]
pub fn withdraw_forged<I: Net>(work: &mut WorkArea<I>, client: u32) -> bool {
    let Work {
        head, half, state, ..
    } = &mut **work;
    // A client's packets are found by the outer entry or, where both ends are translated, by the inner one.
    let is_question = half.rewrite & rewrite::DST != 0 && !is_answer(half.rewrite, *state);
    if half.in_ifindex != 0 || *state & state::PORT == 0 {
        return false;
    }
    let is_forged = if client == LOOPBACK {
        half.action != action::HOST && (is_question || *state & state::OUTER != 0)
    } else {
        // Of those behind a bridge nobody knows the addresses: what they have opened is EARLY.
        is_question
            && half.rewrite & rewrite::EARLY == 0
            && endpoint(head.tuple.src.wide()).is_some_and(|own| own.ifindex == client)
    };
    if is_forged {
        withdraw(work);
    }
    is_forged
}

/// What became of both entries of a flow to a host port.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Entries {
    /// They are in the table.
    Stored,
    /// Somebody has the outer tuple.
    OuterTaken,
    /// Somebody has the inner tuple, and the outer entry was removed again.
    InnerTaken,
    /// The table is full.
    NoRoom,
}

/// Stores both entries of [`Work::request`].
#[inline(always)]
fn store_both<I: Net>(work: &mut WorkArea<I>) -> Entries {
    match insert(work, Claim::Free) {
        Allocation::Granted => {}
        Allocation::NoPort => return Entries::OuterTaken,
        Allocation::NoRoom => return Entries::NoRoom,
    }
    // The container's entry is under its own tuple, not under that of the packet.
    aim(work, Aim::Inner);
    let committed = commit(work);
    aim(work, Aim::Packet);
    match committed {
        Allocation::Granted => Entries::Stored,
        Allocation::NoPort => Entries::InnerTaken,
        Allocation::NoRoom => Entries::NoRoom,
    }
}

number!(
    /// Which tuple [`Work::place`] is that of.
    enum Aim {
        /// That of the packet in [`Work::head`].
        Packet,
        /// The inner tuple of [`Work::request`].
        Inner,
    }
);

global!(
    /// Sets [`Work::place`].
    fn aim<I: Net>(work: &mut WorkArea<I>, at: Aim) {
        let Work {
            head,
            place,
            request,
            ..
        } = &mut **work;
        place.set(match at {
            Aim::Packet => &head.tuple,
            Aim::Inner => &request.inner,
        });
    }
);

/// Whether the destination is an address of this host now, and not one of a Service, nor one that
/// only the host itself may use.
///
/// The routing table tells: a local address is not forwarded. Neither is one without a route; the
/// kernel's answer is the same.
#[inline(always)]
pub fn is_local<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> bool {
    let dst = work.head.tuple.dst;
    if is_service(&work.head) || I::is_loopback(dst) || endpoint(dst.wide()).is_some() {
        return false;
    }
    let skb = Skb::new(ctx);
    skb.is_for_host() && route::is_local(work, ctx, skb.ifindex())
}

/// Whether the destination is an address of a Service.
#[inline(always)]
pub fn is_service<I: Net>(head: &Head<I>) -> bool {
    is_service_address(head.tuple.dst.wide())
}

/// Whether the packet is in the middle of a connection of the host's own, made before the port was
/// mapped, or an answer to a socket of the host that is connected to its sender.
#[inline(always)]
pub fn belongs_to_host<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> bool {
    let may_be = match work.head.tuple.protocol {
        protocol::TCP => work.head.tcp_flags & tcp::SYN == 0,
        protocol => protocol == protocol::UDP,
    };
    may_be && host_uses(work, ctx) == Socket::Used
}

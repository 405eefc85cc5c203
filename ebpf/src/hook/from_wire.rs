//! What the world sends: the bypass for flows that are known, translation back for those that the
//! stack carries.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    endpoint::device as flags,
    flow::{action, protocol, rewrite, state},
    node::feature,
};
use underpass_ebpf::{
    l4::{Kind, tcp},
    packet::Covers,
};

use crate::{
    bypass::{self, Side},
    flow::{
        signed::{self, Sign},
        tracking::{Seen, is_known, note},
    },
    fragment::{
        self,
        reorder::{self, Way},
    },
    icmp_error::error_from_wire,
    kernel::{
        ETHERNET,
        global::global,
        maps::{constant, device, endpoint},
        net::Net,
        skb::Skb,
        verdict::{Step, Verdict},
        work_area::WorkArea,
    },
    model::{
        state::{begins, is_asking},
        work::Work,
    },
    nat::{
        hairpin,
        host_port::{Served, open_host_port},
        mapping, translate,
    },
    parse::{parse_packet, parse_quote},
};

/// IPv4 and IPv6; the network header is at `L3`.
#[inline(always)]
pub fn ip<I: Net, const L3: u32>(ctx: *mut __sk_buff) -> Step<Verdict> {
    if L3 == ETHERNET && is_translated(ctx) {
        // Before the bypass: the tuple that it has now may be another flow's for the world.
        // SAFETY: this is the only view, but for the one that it is lent for.
        if let Some(mut work) = unsafe { WorkArea::<I>::open() } {
            hand_on(&mut work, ctx);
        }
        return Ok(Verdict::STACK);
    }
    let seen = if L3 == ETHERNET {
        bypass::take::<I>(ctx, Side::Wire)?
    } else {
        Seen::Perhaps
    };
    // SAFETY: this is the only view, but for those that it is lent for.
    let Some(mut work) = (unsafe { WorkArea::<I>::open() }) else {
        return Ok(Verdict::STACK);
    };
    let work = &mut work;
    hairpin::serve(work, ctx, 0, seen, |work, ctx, seen| {
        translate_back(work, ctx, L3, seen)
    })?;
    Ok(Verdict::STACK)
}

global!(
    /// Translates a packet whose network header is at `l3`, and that no bypass took, if its flow is.
    fn translate_back<I: Net>(
        work: &mut WorkArea<I>,
        ctx: *mut __sk_buff,
        l3: u32,
        seen: Seen,
    ) -> Step<Served> {
        let mut skb = Skb::new(ctx);
        let is_first = seen != Seen::Flow;
        if is_first && (!parse_packet(work, ctx, l3) || !skb.is_for_host()) {
            return Err(Verdict::STACK);
        }
        if work.head.kind == Kind::Error {
            let is_quoted = parse_quote(work, ctx);
            return Err(error_from_wire(work, ctx, is_quoted)?);
        }
        if work.head.kind != Kind::Flow {
            reorder::copy(work, ctx);
            return Err(Verdict::STACK);
        }
        let served = if is_known(work, seen) {
            Served::Known
        } else {
            open_host_port(work, ctx, 0)?
        };
        let is_known = served == Served::Known;
        if served == Served::Crowded {
            return Ok(served);
        }
        if is_known && hairpin::is_in_the_way(work) {
            return Ok(Served::InTheWay);
        }
        if is_known && is_of_pods(work) {
            return Err(Verdict::dropped(Counter::DropNoFlow));
        }
        let is_known = is_known && !is_uninvited(work);
        // Nobody in the world has a tuple of the host with itself.
        let is_translated =
            is_known && work.half.rewrite & rewrite::DST != 0 && work.half.action != action::HOST;
        if is_translated {
            reorder::lead(work, ctx, Way::IN)?;
            mapping::note(work)?;
            translate::as_known(work, &skb)?;
            if must_be_received_again(&skb, work) {
                return Err(skb.receive_again());
            }
            if work.half.out_ifindex != 0 {
                // Whose address it has now was looked at with the flow.
                skb.unmark();
                note_arrival(&mut skb);
                signed::sign(&mut skb, &work.head, Sign::Translated);
                return Err(Verdict::STACK);
            }
        } else {
            if is_known && work.half.action == action::OTHERS {
                note(work);
            }
            // So that the later ones are not kept.
            fragment::remember(&work.head);
        }
        skb.unmark();
        if endpoint(work.head.tuple.dst.wide()).is_some() {
            let sign = if is_translated {
                Sign::Translated
            } else {
                Sign::AsItCame
            };
            note_arrival(&mut skb);
            signed::sign(&mut skb, &work.head, sign);
        } else if may_be_translated(work, is_known) {
            signed::number(work, &mut skb);
        }
        Err(Verdict::STACK)
    }
);

/// Whether the packet, which was translated just now, must be received again for connection tracking to know it, in [`Work::half`]'s direction. What that has put
/// together of pieces is longer than what it leaves by has room for: of IPv6 the kernel would not take it to pieces any more (`ip6_pkt_too_big` asks
/// `skb->ignore_df`, 5.10 to 6.18).
#[inline(always)]
fn must_be_received_again<I: Net>(skb: &Skb, work: &Work<I>) -> bool {
    let Some(here) = device(skb.ifindex()).filter(|here| here.flags & flags::BRIDGE != 0) else {
        return false;
    };
    // None where it is for the node.
    let mtu = device(work.half.out_ifindex).map_or(here.mtu, |to| here.mtu.min(to.mtu));
    let may_be_cut =
        I::PSEUDO == Covers::Pseudo4 && constant!(features) & feature::REDIRECT_LONG != 0;
    let head = &work.head;
    may_be_cut || skb.wire_length(head.l3, head.headers_length()) <= mtu
}

/// Notes by which device the packet came, where the kernel will name another.
#[inline(always)]
fn note_arrival(skb: &mut Skb) {
    if device(skb.ifindex()).is_some_and(|here| here.flags & flags::VRF != 0) {
        skb.mark_arrival();
    }
}

/// Whether the packet was translated before it came here: at a port of this bridge, or by this hook.
#[inline(always)]
fn is_translated(ctx: *mut __sk_buff) -> bool {
    let skb = Skb::new(ctx);
    (skb.is_received_again() || skb.is_bypassed()) && skb.is_at_bridge()
}

global!(
    /// Signs a packet that was translated before it came here.
    fn hand_on<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) {
        let mut skb = Skb::new(ctx);
        if skb.is_received_again() {
            // A bridge takes what is for the address of a port of it as well.
            skb.take_for_host();
        }
        skb.unmark();
        note_arrival(&mut skb);
        if parse_packet(work, ctx, ETHERNET) {
            fragment::remember(&work.head);
            signed::sign(&mut skb, &work.head, Sign::Translated);
        }
    }
);

/// Whether the packet in [`Work::head`](crate::model::work::Work::head), of a flow that was found, would open a connection to who has opened
/// that flow, on the ports of it: it is not the flow's then, and what it finds there is the stack's affair. Unless both ask at the same time.
#[inline(always)]
fn is_uninvited<I: Net>(work: &WorkArea<I>) -> bool {
    work.half.rewrite == rewrite::DST
        && work.state & state::PORT == 0
        && begins(work.head.tcp_flags)
        && !is_asking(work.state)
}

/// Whether the packet in [`Work::head`](crate::model::work::Work::head), of a flow that was found, is in the name of a container of this node
/// that has asked for a host port: its own packets are translated where it sends them. The stack would refuse it, in the name of the port, and
/// the container's connection would suffer.
#[inline(always)]
fn is_of_pods<I: Net>(work: &WorkArea<I>) -> bool {
    let half = &work.half;
    half.rewrite & rewrite::DST != 0 && (half.in_ifindex != 0 || half.rewrite & rewrite::EARLY != 0)
}

/// Whether the stack may give the packet in [`Work::head`](crate::model::work::Work::head), which is for none of the pods, another
/// tuple that is to be learned. Of TCP that is not known that is its opening. A datagram that was in pieces would have the number of the
/// first one, which may have come long ago.
#[inline(always)]
fn may_be_translated<I: Net>(work: &WorkArea<I>, is_known: bool) -> bool {
    if !work.head.plain {
        return false;
    }
    if is_known && work.state & state::BY_STACK != 0 {
        return true;
    }
    (!is_known || work.half.action == action::OTHERS)
        && (work.head.tuple.protocol != protocol::TCP || work.head.tcp_flags & tcp::SYN != 0)
}

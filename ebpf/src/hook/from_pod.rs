//! What a pod sends: the bypass for flows that are known, else checks of its source, then the
//! stack.

use core::num::NonZeroU32;

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    endpoint::{Device, device as flags},
    flow::rewrite,
    node::feature,
};
use underpass_ebpf::{
    ip::Piece,
    l4::{Kind, tcp},
    packet::{Load as _, Packet as _},
};

use crate::{
    bypass::{self, Side},
    filter::anti_spoofing,
    flow::{
        join::begin_again,
        signed::{self, Sign},
        tracking::{Seen, is_known},
    },
    fragment::{
        self,
        reorder::{self, Way},
    },
    icmp_error::error_from_pod,
    kernel::{
        ETHERNET, container,
        global::global,
        maps::{constant, device, endpoint, policy},
        memory,
        net::Net,
        skb::Skb,
        verdict::{Step, Verdict},
        work_area::WorkArea,
    },
    model::direction::{TO_PORT, is_answer},
    nat::{
        hairpin::{self, turn_back},
        host_port::{Served, open_host_port, withdraw_forged},
        mapping, translate,
    },
    parse::{parse_packet, parse_quote},
};

/// IPv4 and IPv6.
#[inline(always)]
pub fn ip<I: Net>(ctx: *mut __sk_buff) -> Step<Verdict> {
    let seen = bypass::take::<I>(ctx, Side::Pod)?;
    // SAFETY: this is the only view, but for those that it is lent for.
    let Some(mut work) = (unsafe { WorkArea::<I>::open() }) else {
        return Ok(Verdict::STACK);
    };
    let work = &mut work;
    let client = check(work, ctx, seen)?;
    if work.head.kind == Kind::Error {
        let is_quoted = parse_quote(work, ctx);
        error_from_pod(work, ctx, is_quoted)?;
    }
    let served = hairpin::serve(work, ctx, client, seen, |work, ctx, seen| {
        serve_pod(work, ctx, client, seen)
    });
    reorder::copy(work, ctx);
    let is_known = served? == Served::Known;
    enter_stack(work, ctx, is_known)
}

global!(
    /// Gives the packet in [`Work::head`](crate::model::work::Work::head) the container that serves the
    /// host port that it is for, if it is for one. One that goes back to where it came from, or to a
    /// process of the host, is sent. `client` is the host veth that it is from.
    fn serve_pod<I: Net>(
        work: &mut WorkArea<I>,
        ctx: *mut __sk_buff,
        client: u32,
        seen: Seen,
    ) -> Step<Served> {
        let served = if is_known(work, seen) && !withdraw_forged(work, client) {
            Served::Known
        } else {
            open_host_port(work, ctx, client)?
        };
        if served != Served::Known {
            return Ok(served);
        }
        if hairpin::is_in_the_way(work) {
            return Ok(Served::InTheWay);
        }
        turn_back(work, ctx)?;
        Ok(Served::Known)
    }
);

/// Before anything else: whether the packet is what it says. A VLAN tag is beside it, not in it, so such a packet looks like any
/// other; but the bypass would put the tag back, and the wire is another network for it.
#[inline(always)]
pub fn enter(ctx: *mut __sk_buff) -> Step<()> {
    let skb = Skb::new(ctx);
    if constant!(features) & feature::CLAIMED_PROTOCOL != 0 && !is_as_claimed(&skb) {
        return Err(Verdict::dropped(Counter::DropEtherType));
    }
    if skb.has_tag() {
        return take_priority_off(ctx);
    }
    Ok(())
}

/// Whether the stack, which goes by the frame, takes the packet for what this program was called for.
#[inline(always)]
fn is_as_claimed(skb: &Skb) -> bool {
    // Below it the frame has a length in place of a type (IEEE 802.3).
    const FIRST_TYPE: u16 = 0x0600;
    let in_frame = skb.load::<u16>(ETHERNET - 2);
    in_frame.is_ok_and(|kind| u32::from(kind) == skb.protocol() || u16::from_be(kind) < FIRST_TYPE)
}

global!(
    /// Takes a VLAN tag off that says a priority alone, as the kernel does when it has seen this hook. Any other one belongs to a device of its own on this one, where
    /// the packet goes without a look at it, as do the packets of another plugin's container.
    fn take_priority_off(ctx: *mut __sk_buff) -> Step<()> {
        let mut skb = Skb::new(ctx);
        let Some(pod) = device(skb.ifindex()) else {
            return Err(Verdict::STACK);
        };
        if pod.flags & flags::ANTI_SPOOF != 0 {
            return Err(Verdict::dropped(Counter::DropVlanTag));
        }
        anti_spoofing::check_mac(&skb, pod)?;
        forget_mark(&mut skb, pod);
        if pod.flags & flags::FOREIGN != 0 || !skb.has_priority_alone() {
            return Err(Verdict::STACK);
        }
        if skb.take_tag_off() {
            Ok(())
        } else {
            Err(Verdict::dropped(Counter::DropVlanTag))
        }
    }
);

/// Everything else: ARP, and what has no business here.
#[inline(always)]
pub fn other(ctx: *mut __sk_buff) -> Step<Verdict> {
    const ARP: u32 = 0x0806u16.to_be() as u32;
    let mut skb = Skb::new(ctx);
    let Some(pod) = device(skb.ifindex()) else {
        return Ok(Verdict::STACK);
    };
    if skb.protocol() == ARP {
        anti_spoofing::check_arp(&skb, pod)?;
    } else if pod.flags & flags::ANTI_SPOOF != 0 {
        return Err(Verdict::dropped(Counter::DropEtherType));
    } else {
        anti_spoofing::check_mac(&skb, pod)?;
    }
    forget_mark(&mut skb, pod);
    Ok(Verdict::STACK)
}

/// Forgets what the pod may have written beside its packet. At a bridge it is the program at the port that may have.
#[inline(always)]
fn forget_mark(skb: &mut Skb, pod: &Device) {
    if !pod.is_way() {
        skb.unmark();
    }
}

global!(
    /// Parses a packet that no bypass took into [`Work::head`](crate::model::work::Work::head), and
    /// drops what the pod may not send. Returns the host veth that its source address is of, which may
    /// be another one of the same container.
    fn check<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff, seen: Seen) -> Step<u32> {
        let mut skb = Skb::new(ctx);
        let Some(pod) = device(skb.ifindex()) else {
            return Err(Verdict::STACK);
        };
        let is_foreign = pod.flags & flags::FOREIGN != 0;
        if !parse_packet(work, ctx, ETHERNET) {
            forget_mark(&mut skb, pod);
            return Err(if is_foreign {
                Verdict::STACK
            } else {
                Verdict::dropped(Counter::DropMalformed)
            });
        }
        if is_foreign && !is_switched(&skb) {
            // To the bridge's MAC. The bridge would say so a little later.
            skb.take_for_host();
        }
        reorder::lead(work, ctx, Way::IN)?;
        let is_translated = pod.is_way() && skb.is_bypassed();
        skb.unmark();
        if is_translated {
            // At the port of the bridge that this device is.
            signed::sign(&mut skb, &work.head, Sign::AsItCame);
            return Err(Verdict::STACK);
        }
        let owner = container::owner(skb.ifindex(), work.head.tuple.src.wide());
        anti_spoofing::check(&skb, &work.head, pod, owner)?;
        if seen != Seen::None && owner.is_some() && work.head.tcp_flags & tcp::SYN != 0 {
            begin_again(work);
        }
        // Without a bypass nobody asks whose it was. But what has an address that is not this interface's own may be of a flow of
        // somebody who has one, and must not be taken for something that the stack has translated.
        let is_own = owner.is_some_and(|owner| owner.get() == skb.ifindex());
        work.is_signed = !is_own || pod.flags & flags::BYPASS != 0;
        work.is_summed = !is_foreign;
        if owner.is_some() && pod.flags & flags::MASQUERADE != 0 {
            skb.mark_masqueraded();
        }
        Ok(owner.map_or(skb.ifindex(), NonZeroU32::get))
    }
);

global!(
    /// Hands the packet in [`Work::head`](crate::model::work::Work::head) to the stack, with its
    /// fingerprint. One to a host port that another pod of this node serves is translated before the
    /// stack routes it: its flow is known, and its direction is in
    /// [`Work::half`](crate::model::work::Work::half).
    fn enter_stack<I: Net>(
        work: &mut WorkArea<I>,
        ctx: *mut __sk_buff,
        is_known: bool,
    ) -> Step<Verdict> {
        let mut skb = Skb::new(ctx);
        // Not `None` where there is none, whose payload may be read from where nothing was written: 5.10 refuses that.
        let mac = if is_known && work.half.rewrite & rewrite::SRC != 0 {
            carrier::<I>(&skb, work.head.tuple.dst).unwrap_or_default()
        } else {
            [0; 3]
        };
        let is_carried = mac[0] | mac[1] | mac[2] != 0;
        if is_known && is_early(&skb, work.half.rewrite, work.state, is_carried) {
            mapping::note(work)?;
            translate::as_known(work, &skb)?;
            if device(skb.ifindex()).is_some_and(|pod| pod.flags & flags::FOREIGN != 0) {
                skb.mark_bypassed();
            }
        }
        // Of a datagram to the host, so that the later ones are not kept.
        fragment::remember(&work.head);
        if is_carried && skb.store(0, &mac).is_ok() {
            skb.take_for_host();
        }
        if work.is_signed {
            signed::sign(&mut skb, &work.head, Sign::AsItCame);
        } else if work.is_summed && work.head.kind == Kind::Flow && work.head.piece == Piece::Whole
        {
            // Where the stack chooses among several ways by `skb->hash`, a flow keeps its way.
            signed::leave_sum(&mut skb, &work.head);
        }
        Ok(Verdict::STACK)
    }
);

/// Whether a packet of a flow that is rewritten like this gets its tuple here, not where it leaves
/// the stack, which carries it all the same if so.
#[inline(always)]
fn is_early(skb: &Skb, how: u8, flow_state: u32, is_carried: bool) -> bool {
    let is_to_port = how & TO_PORT == TO_PORT && !is_answer(how, flow_state);
    is_to_port || how & rewrite::SRC != 0 && !is_carried && is_switched(skb)
}

/// The MAC by which the host's stack carries an answer of a container at a bridge, also to a neighbour there: it leaves by the bridge, which gives it the
/// source that the client asked. Connection tracking has seen what the client sent behind its translation, and must see the answer as that is here. Not where it
/// has seen the question at the client's port of the bridge, untranslated: a client's whose address has no host ports of its own, so that no program sits there.
#[inline(always)]
fn carrier<I: Net>(skb: &Skb, client: I::Addr) -> Option<[u16; 3]> {
    let port = device(skb.ifindex())?;
    // A bridge takes what is for any of its ports.
    let own = port.own_mac;
    if port.flags & flags::AT_UPLINK != 0 {
        return Some(own);
    }
    if !is_switched(skb) || policy() & I::BRIDGES != 0 && endpoint(client.wide()).is_none() {
        return None;
    }
    Some(if own[0] | own[1] | own[2] == 0 {
        memory::mac_words(&port.mac)
    } else {
        own
    })
}

/// Whether a bridge carries the frame to a neighbour of the container, past the host's stack: nothing
/// of ours will see it again.
#[inline(always)]
fn is_switched(skb: &Skb) -> bool {
    device(skb.ifindex()).is_some_and(|pod| {
        pod.flags & flags::FOREIGN != 0
            && skb
                .load::<[u16; 3]>(0)
                .is_ok_and(|to| !anti_spoofing::same_mac(to, pod.mac))
    })
}

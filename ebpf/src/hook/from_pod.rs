//! What a pod sends: the bypass for flows that are known, else checks of its source, then the
//! stack.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{counter::Counter, endpoint::device as flags, flow::rewrite};
use underpass_ebpf::{l4::Kind, packet::Load as _};

use crate::{
    ETHERNET,
    bypass::{self, Side},
    call::Call,
    filter::anti_spoofing,
    flow::{entry, learn},
    fragment::{
        self,
        reorder::{self, Way},
    },
    kernel::{
        maps::device,
        skb::Skb,
        verdict::{CROWDED, NEXT, PASS, Step, Verdict, code},
    },
    nat::{hairpin, host_port, translate},
    parse::PARSED,
};

/// IPv4 and IPv6.
#[inline(always)]
pub fn ip<I: Call>(ctx: *mut __sk_buff) -> i32 {
    let sent = bypass::take::<I>(ctx, Side::Pod);
    if sent != NEXT {
        return sent;
    }
    match I::check(ctx) {
        NEXT => {}
        verdict => return verdict,
    }
    if I::work().is_some_and(|work| work.head.kind == Kind::Error) {
        match I::error_back(ctx, I::parse_quoted(ctx)) {
            NEXT => {}
            verdict => return verdict,
        }
    }
    let mut served = I::serve(ctx);
    if served == CROWDED {
        served = hairpin::make_room::<I>(ctx, Skb::new(ctx).ifindex());
        if served == NEXT {
            served = I::serve(ctx);
        }
    }
    reorder::copy::<I>(ctx);
    match served {
        NEXT | CROWDED => I::enter_stack(ctx),
        verdict => verdict,
    }
}

/// Gives the packet in [`Work::head`](crate::kernel::maps::Work::head) the container that serves the host
/// port that it is for, if it is for one. One that goes back to where it came from, or to a process
/// of the host, is sent: its verdict. [`CROWDED`] if [`twice`] must help, else [`NEXT`].
#[inline(always)]
pub fn serve<I: Call>(ctx: *mut __sk_buff) -> i32 {
    let mut known = I::copy_live();
    if known == entry::ABSENT {
        known = I::host_port(ctx, Skb::new(ctx).ifindex());
    }
    if let Some(refusal) = host_port::refusal(known) {
        return code(Err(refusal));
    }
    match known {
        host_port::CROWDED => CROWDED,
        entry::PRESENT if I::work().is_some_and(|work| hairpin::is_in_the_way(work)) => CROWDED,
        entry::PRESENT => I::turn(ctx),
        _ => NEXT,
    }
}

/// What has a VLAN tag. The tag is beside the packet, not in it, so such a packet looks like any
/// other; but the bypass would put the tag back, and the wire is another network for it.
#[inline(always)]
pub fn tagged(ctx: *mut __sk_buff) -> i32 {
    const GUARDED: u32 = flags::POD | flags::ANTI_SPOOF;
    let pod = device(Skb::new(ctx).ifindex());
    code(Ok(
        if pod.is_some_and(|pod| pod.flags & GUARDED == GUARDED) {
            Verdict::Drop(Counter::DropVlanTag)
        } else {
            Verdict::Stack
        },
    ))
}

/// Everything else: ARP, and what has no business here.
#[inline(always)]
pub fn other(ctx: *mut __sk_buff) -> i32 {
    code(other_step(&Skb::new(ctx)))
}

#[inline(always)]
fn other_step(skb: &Skb) -> Step<Verdict> {
    const ARP: u32 = 0x0806u16.to_be() as u32;
    let Some(pod) = device(skb.ifindex()) else {
        return Ok(Verdict::Stack);
    };
    if skb.protocol() == ARP {
        anti_spoofing::check_arp(skb, pod)?;
    } else if pod.flags & flags::ANTI_SPOOF != 0 {
        return Err(Verdict::Drop(Counter::DropEtherType));
    }
    Ok(Verdict::Stack)
}

/// Whether the pod may send the packet, which no bypass took: its verdict, or [`NEXT`].
#[inline(always)]
pub fn check<I: Call>(ctx: *mut __sk_buff) -> i32 {
    let mut skb = Skb::new(ctx);
    let Some(work) = I::work() else {
        return code(Ok(Verdict::Stack));
    };
    let Some(pod) = device(skb.ifindex()) else {
        return code(Ok(Verdict::Stack));
    };
    if I::parse_whole(ctx, ETHERNET) != PARSED {
        return code(if pod.flags & flags::FOREIGN == 0 {
            Err(Verdict::Drop(Counter::DropMalformed))
        } else {
            Ok(Verdict::Stack)
        });
    }
    let is_foreign = pod.flags & flags::FOREIGN != 0;
    if is_foreign && !is_switched(&skb) {
        // To the bridge's MAC. The bridge would say so a little later.
        skb.take_for_host();
    }
    match reorder::lead::<I>(ctx, Way::In) {
        NEXT => {}
        verdict => return verdict,
    }
    let is_translated = is_foreign && skb.is_bypassed();
    skb.unmark();
    if is_translated {
        // At the port of the bridge that this device is.
        learn::sign(&mut skb, &work.head);
        return PASS;
    }
    if let Err(verdict) = anti_spoofing::check(&skb, &work.head, pod) {
        return code(Err(verdict));
    }
    NEXT
}

/// Hands the packet in [`Work::head`](crate::kernel::maps::Work::head) to the stack, with its fingerprint.
/// One to a host port that another pod of this node serves is translated before the stack routes
/// it.
#[inline(always)]
pub fn enter_stack<I: Call>(ctx: *mut __sk_buff) -> i32 {
    let mut skb = Skb::new(ctx);
    if I::copy_live() == entry::PRESENT
        && I::work().is_some_and(|work| is_early(&skb, work.half.rewrite, work.state))
    {
        hairpin::note::<I>();
        if let Err(verdict) = translate::as_known::<I>(&skb) {
            return code(Err(verdict));
        }
        if device(skb.ifindex()).is_some_and(|pod| pod.flags & flags::FOREIGN != 0) {
            skb.mark_bypassed();
        }
    }
    if let Some(work) = I::work() {
        // Of a datagram to the host, so that the later ones are not kept.
        fragment::remember(&work.head);
        learn::sign(&mut skb, &work.head);
    }
    PASS
}

/// Whether a packet of a flow that is rewritten like this gets its tuple here, not where it leaves
/// the stack.
#[inline(always)]
fn is_early(skb: &Skb, how: u8, flow_state: u32) -> bool {
    let is_to_port = how & TO_PORT == TO_PORT && !hairpin::is_answer(how, flow_state);
    is_to_port || how & rewrite::SRC != 0 && is_switched(skb)
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

/// From a pod, to a host port that another pod serves.
const TO_PORT: u8 = rewrite::EARLY | rewrite::DST;

//! Straight through the stack: what a pod without bypass sends, and what comes to it, where each hook has one thing to do that a look at the
//! flow tells.

use core::num::NonZeroU32;

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    endpoint::{Device, device as flags},
    flow::{End, Flow, Key, Tuple, rewrite, state},
};
use underpass_ebpf::{
    ip::Head,
    l4::{Kind, L4, tcp},
    packet::Packet as _,
    translate::translate,
};

use crate::{
    filter::anti_spoofing,
    flow::{
        entry::{find, is_alive},
        signed::{self, Sign},
        tracking::{is_as_noted, is_stamped},
    },
    kernel::{
        ETHERNET,
        global::global,
        host_ports::serving,
        maps::{device, endpoint, stamp_of_stack, tick},
        net::Net,
        skb::Skb,
        verdict::{Step, Verdict},
    },
    model::direction::{half_of, outgoing},
};

/// From a pod: hands a packet of the flow under `key` to the stack, if it is the pod's own and is translated where it leaves the stack.
#[inline(always)]
pub fn go_on<I: Net>(
    skb: &mut Skb,
    head: &Head<I>,
    flow: &mut Flow<I::Addr>,
    key: &Key<I::Addr>,
    end: End,
) -> Step<()> {
    let half = half_of(flow, end);
    let is_looked_at = is_stamped(half, stamp_of_stack());
    let is_translated_later = half.rewrite == rewrite::SRC
        && half.in_ifindex == skb.ifindex()
        && flow.state & state::BY_STACK == 0
        && head.tcp_flags & tcp::SYN == 0
        && is_alive(flow, tick());
    if !is_translated_later || !is_still::<I>(flow, key) {
        return Ok(());
    }
    match sender(skb) {
        Some(pod) if is_looked_at || is_own(skb, head) => hand_over(skb, head, pod),
        _ => Ok(()),
    }
}

/// From a pod: hands a packet of no flow that is known to the stack, unless it may be for a host port. At a pod's address there is none.
#[inline(always)]
pub fn begin<I: Net>(skb: &mut Skb, head: &Head<I>) -> Step<()> {
    let Some(pod) = sender(skb) else {
        return Ok(());
    };
    let may_be_for_port =
        endpoint(head.tuple.dst.wide()).is_none() && serving::<I>(&head.tuple).is_some();
    if may_be_for_port || !is_own(skb, head) {
        return Ok(());
    }
    hand_over(skb, head, pod)
}

global!(
    /// To an uplink: translates a packet that [`go_on`] has let in, whose network header is at `l3`, and lets it leave.
    pub fn leave<I: Net>(ctx: *mut __sk_buff, l3: u32) -> Step<()> {
        // The verifier knows by this that it is small.
        let l3 = l3 & ETHERNET;
        let mut skb = Skb::new(ctx);
        let Some(mut head) = I::parse_plain(&skb.linear(l3 + I::HEADER_LENGTH + L4::READ), l3)
        else {
            return Ok(());
        };
        if head.kind != Kind::Flow {
            return Ok(());
        }
        let (key, end) = head.tuple.key();
        let Some(flow) = find::<I>(&key) else {
            return Ok(());
        };
        let half = half_of(flow, end);
        let is_its_way = half.in_ifindex == skb.ingress_ifindex()
            && (half.out_ifindex == 0 || half.out_ifindex == skb.ifindex());
        if !is_its_way || half.rewrite != rewrite::SRC || !is_stamped(half, stamp_of_stack()) {
            return Ok(());
        }
        let new = outgoing::<I>(half, head.tuple.protocol);
        let is_routine = flow.state & state::BY_STACK == 0
            && head.tcp_flags & tcp::SYN == 0
            && is_alive(flow, tick())
            && is_as_noted(flow, end, head.tcp_flags);
        if !is_routine || !is_still::<I>(flow, &key) {
            return Ok(());
        }
        give::<I>(&mut skb, &mut head, &new)?;
        skb.unmark();
        Err(Verdict::STACK)
    }
);

global!(
    /// To a pod without bypass: whether the packet is as it has to come there. What no hook has translated may be an answer of a host port of which
    /// others have translated the question as well: then it has the tuple that it is known by only now.
    pub fn has_arrived<I: Net>(ctx: *mut __sk_buff) -> bool {
        let mut skb = Skb::new(ctx);
        let headers = skb.linear(ETHERNET + I::HEADER_LENGTH + L4::READ);
        let Some(head) = I::parse_plain(&headers, ETHERNET).filter(|head| head.kind == Kind::Flow)
        else {
            return false;
        };
        if skb.is_straight() {
            signed::has_sum::<I>(&skb, &head)
        } else {
            signed::came_through::<I>(&skb, &head) == Some(Sign::Translated)
        }
    }
);

/// Hands a packet to the stack, whose source is its pod's own.
#[inline(always)]
fn hand_over<I: Net>(skb: &mut Skb, head: &Head<I>, pod: &Device) -> Step<()> {
    anti_spoofing::check(skb, head, pod, NonZeroU32::new(skb.ifindex()))?;
    signed::leave_sum(skb, head);
    skb.mark_straight(pod.flags & flags::MASQUERADE != 0);
    Err(Verdict::STACK)
}

/// The pod that a packet came from, if it has no bypass and is not another plugin's.
#[inline(always)]
fn sender(skb: &Skb) -> Option<&'static Device> {
    const KIND: u32 = flags::POD | flags::BYPASS | flags::FOREIGN | flags::AT_UPLINK;
    device(skb.ifindex()).filter(|pod| pod.flags & KIND == flags::POD)
}

/// Whether the packet's source is an address of the pod behind this host veth.
#[inline(always)]
fn is_own<I: Net>(skb: &Skb, head: &Head<I>) -> bool {
    endpoint(head.tuple.src.wide()).is_some_and(|owner| owner.ifindex == skb.ifindex())
}

/// Whether what was read of a flow is of the one under `key`: the memory of an entry that is removed may be another's while it is read.
#[inline(always)]
fn is_still<I: Net>(flow: &Flow<I::Addr>, key: &Key<I::Addr>) -> bool {
    let tag = &raw const flow.tag;
    // SAFETY: an entry of the map; volatile, so that it is read after what it vouches for.
    unsafe { tag.read_volatile() == key.tag() }
}

/// Gives a packet another tuple.
#[inline(always)]
fn give<I: Net>(skb: &mut Skb, head: &mut Head<I>, new: &Tuple<I::Addr>) -> Step<()> {
    let is_done = translate(skb, head, new).is_ok() && skb.store(head.l3, &head.header).is_ok();
    if is_done {
        Ok(())
    } else {
        Err(Verdict::dropped(Counter::DropMalformed))
    }
}

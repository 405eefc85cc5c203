//! Learning: a packet left the stack with the tuple it entered with, so whatever decides in the
//! stack let it through unchanged. Every later packet of its flow takes the bypass.

use aya_ebpf::bindings::{__sk_buff, BPF_ANY};
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    endpoint::{Device, device as flags},
    flow::{End, Flow, Half, Key, action, rewrite},
};
use underpass_ebpf::{fingerprint::fingerprint, ip::Head, l4::Kind, packet::Load as _};

use super::{
    flow::{find, half, outgoing, prolong, set_outgoing},
    quota::FULL,
    record,
    source::{is_dhcp, same_mac},
};
use crate::{
    call::{Call, charge},
    maps::{Net, Place, Work, constant, count, device, endpoint, stamp, tick},
    memory,
    skb::Skb,
};

/// There is nothing to remember.
pub const IGNORED: u32 = 0;
/// The flow is in the table.
pub const LEARNED: u32 = 1;

/// Leaves the packet's fingerprint for the hook where it comes out of the stack.
#[inline(always)]
pub fn sign<I: Net>(skb: &mut Skb, head: &Head<I>) {
    if head.kind == Kind::Flow {
        skb.set_hash(fingerprint(constant!(key), &head.tuple));
    }
}

/// Whether the packet came through the stack unchanged.
#[inline(always)]
pub fn is_unchanged<I: Net>(skb: &Skb, head: &Head<I>) -> bool {
    skb.hash() == fingerprint(constant!(key), &head.tuple)
}

/// Learns a flow from the packet in [`Work::head`], which the stack carried from the device
/// `from_ifindex` to the pod behind `to_ifindex`.
#[inline(always)]
pub fn to_pod<I: Net>(ctx: *mut __sk_buff, from_ifindex: u32, to_ifindex: u32) -> u32 {
    let Some(Work {
        head,
        place: Place { key, end },
        partner_place,
        ..
    }) = I::work()
    else {
        return IGNORED;
    };
    let (Some(from), Some(to)) = (device(from_ifindex), device(to_ifindex)) else {
        return IGNORED;
    };
    let tuple = &head.tuple;
    let from_pod = from.flags & flags::POD != 0;
    // A forged source, or an address that moved since, is nothing to remember.
    let source = endpoint(tuple.src.wide());
    if source.is_some_and(|endpoint| !from_pod || endpoint.ifindex != from_ifindex)
        || source.is_none() && from_pod
    {
        return IGNORED;
    }
    if endpoint(tuple.dst.wide()).is_none_or(|endpoint| endpoint.ifindex != to_ifindex) {
        return IGNORED;
    }
    let bypass = to.flags & flags::BYPASS != 0
        && is_reachable(queue(from.flags, to), to)
        && !is_dhcp(tuple.protocol, tuple.dport)
        && if from_pod {
            from.flags & flags::BYPASS != 0
        } else {
            from.flags & flags::LAYER3 == 0
        };
    // What comes from the world to a masqueraded pod is noted even without bypass: its replies must
    // keep their source.
    if !bypass && (from_pod || to.flags & flags::MASQUERADE == 0) {
        return IGNORED;
    }
    let end = *end;
    let opener = if from_pod { from_ifindex } else { 0 };
    let Some(flow) = open::<I>(key, end, opener) else {
        return IGNORED;
    };
    let is_translated = half(flow, end).rewrite != 0;
    let back = half(flow, end.other());
    if back.rewrite & rewrite::EARLY != 0 && bypass {
        // A flow to a host port, from a pod of this node, that the stack let through: both
        // directions are known from the port.
        leave_to_pod(back, from_ifindex, from);
        back.action = action::PEER;
        partner_place.set(&outgoing::<I>(back, tuple.protocol));
        if let Some((partner, _)) = find::<I>(&partner_place.key) {
            let forward = half(partner, partner_place.end.other());
            leave_to_pod(forward, to_ifindex, to);
            forward.action = action::PEER;
        }
        return close::<I>(ctx, key);
    }
    if back.rewrite != 0 || is_translated {
        // The reply of a masqueraded flow, translated back by `from_wire` and left to the stack:
        // nothing new.
        return IGNORED;
    }
    let in_ifindex = if from_pod { from_ifindex } else { 0 };
    let forward = half(flow, end);
    set_outgoing::<I>(forward, tuple);
    enter::<I>(forward, in_ifindex, from);
    leave_to_pod(forward, to_ifindex, to);
    forward.action = if bypass { action::PEER } else { action::STACK };
    let back = half(flow, end.other());
    if back.action == action::NONE || from_pod {
        set_outgoing::<I>(back, &tuple.reversed());
        enter::<I>(back, to_ifindex, to);
        back.action = action::STACK;
        if from_pod {
            leave_to_pod(back, from_ifindex, from);
            back.action = action::PEER;
        }
    }
    close::<I>(ctx, key)
}

/// Learns the way of the packet in [`Work::head`], from the pod behind `pod_ifindex` out of an
/// uplink.
#[inline(always)]
pub fn to_wire<I: Net>(ctx: *mut __sk_buff, pod_ifindex: u32, uplink: u32) -> u32 {
    let Some(Work {
        head,
        place: Place { key, end },
        ..
    }) = I::work()
    else {
        return IGNORED;
    };
    let Some(pod) = device(pod_ifindex) else {
        return IGNORED;
    };
    let Some(flow) = open::<I>(key, *end, pod_ifindex) else {
        return IGNORED;
    };
    let out = half(flow, *end);
    if out.action == action::WIRE {
        return IGNORED;
    }
    set_outgoing::<I>(out, &head.tuple);
    enter::<I>(out, pod_ifindex, pod);
    leave_to_wire(out, uplink);
    out.action = action::WIRE;
    close::<I>(ctx, key)
}

/// Whether the bypass may take over what the stack sends out of this uplink.
///
/// Not where the routing table, asked the simple way, gives another answer than the stack gave:
/// then there is more to the decision (marks, policy) than we could repeat.
#[inline(always)]
pub fn agrees<I: Call>(
    skb: &Skb,
    head: &Head<I>,
    pod_ifindex: u32,
    pod: &Device,
    asked: u32,
) -> bool {
    if pod.flags & flags::BYPASS == 0
        || head.kind != Kind::Flow
        || !is_ethernet_uplink(skb.ifindex())
    {
        return false;
    }
    let Ok(destination) = skb.load::<[u16; 3]>(0) else {
        return false;
    };
    I::route(skb.raw(), pod_ifindex, asked) == skb.ifindex()
        && I::work().is_some_and(|work| same_mac(destination, work.route.eth[0]))
}

/// The uplink that the routing table gives for a packet that a pod just sent; 0 if there is none.
#[inline(always)]
pub fn uplink_of<I: Call>(skb: &Skb, asked: u32) -> u32 {
    let ifindex = I::route(skb.raw(), skb.ifindex(), asked);
    if is_ethernet_uplink(ifindex) {
        ifindex
    } else {
        0
    }
}

#[inline(always)]
fn is_ethernet_uplink(ifindex: u32) -> bool {
    device(ifindex).is_some_and(|device| device.flags & (flags::POD | flags::LAYER3) == 0)
}

/// The device that packets of this half come from.
#[inline(always)]
pub fn enter<I: Net>(half: &mut Half<I::Addr>, ifindex: u32, device: &Device) {
    half.in_ifindex = ifindex;
    // What a netkit sends was not received yet: it can't be put past a device, only be sent by it.
    half.queue = device.flags & flags::NETKIT;
    if device.flags & flags::CHECK_MAC != 0 {
        memory::copy(&mut half.in_mac, &device.peer_mac);
    } else {
        memory::clear(&mut half.in_mac);
    }
}

/// The pod that packets of this half go to, after [`enter`]. The next packet looks again.
#[inline(always)]
pub fn leave_to_pod<A>(half: &mut Half<A>, ifindex: u32, pod: &Device) {
    half.out_ifindex = ifindex;
    let [destination, source] = &mut half.eth;
    memory::copy(destination, &pod.peer_mac);
    memory::copy(source, &pod.mac);
    half.mtu = pod.mtu;
    shape(half, pod);
    half.stamp = if is_reachable(half.queue, pod) {
        stamp()
    } else {
        0
    };
}

/// Whether the bypass can reach a pod: what its host device sends is for the MAC that the pod had at
/// first, which it may have changed where that is not checked. (What is put past the device arrives
/// whatever its MAC.)
#[inline(always)]
pub fn is_reachable(queue: u32, pod: &Device) -> bool {
    queue == 0 || pod.flags & flags::CHECK_MAC != 0
}

/// [`Half::queue`] of packets to a pod from a device with these flags.
#[inline(always)]
fn queue(from: u32, pod: &Device) -> u32 {
    from & flags::NETKIT | pod.flags & flags::SHAPED
}

/// Has packets to a pod pass the queue of its host device, if that shapes them.
#[inline(always)]
pub fn shape<A>(half: &mut Half<A>, pod: &Device) {
    half.queue = queue(half.queue, pod);
}

/// The uplink that packets of this half go to. The next packet asks for the next hop and the MTU.
#[inline(always)]
pub fn leave_to_wire<A>(half: &mut Half<A>, ifindex: u32) {
    half.out_ifindex = ifindex;
    half.mtu = u32::MAX;
    half.stamp = 0;
}

/// The flow under `key` as it is known, or an empty one, heard from `end`. `pod` is the host veth
/// that it came from, 0 if it came from the world; a pod that is over its quota has to ask the stack
/// each time.
#[inline(always)]
fn open<I: Net>(key: &Key<I::Addr>, end: End, pod: u32) -> Option<&'static mut Flow<I::Addr>> {
    if let Some((flow, _)) = find::<I>(key) {
        prolong(flow, key.0.protocol, tick());
        return Some(flow);
    }
    if pod != 0 && charge(pod) == FULL {
        count(Counter::OverQuota);
        return None;
    }
    let flow = I::scratch()?;
    memory::clear(flow);
    flow.state = end.heard();
    if pod != 0 {
        flow.state |= end.charged();
    }
    prolong(flow, key.0.protocol, tick());
    // Stored empty, so that what follows is the same for a new flow and a known one.
    I::opening().insert(key, &*flow, u64::from(BPF_ANY)).ok()?;
    find::<I>(key).map(|(flow, _)| flow)
}

#[inline(always)]
fn close<I: Net>(ctx: *mut __sk_buff, key: &Key<I::Addr>) -> u32 {
    count(Counter::Learned);
    record::learned(&key.0, Skb::new(ctx).ifindex());
    LEARNED
}

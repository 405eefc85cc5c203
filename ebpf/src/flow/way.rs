//! The way of a direction: the devices that its packets come from and go to, and what they leave with there.

use underpass_abi::{
    endpoint::{Device, device as flags},
    flow::{Half, TOLD},
};

use crate::{
    kernel::{maps::stamp, memory, skb::SENT},
    model::route::Route,
};

/// The device that packets of this half come from.
#[inline(always)]
pub fn enter<A>(half: &mut Half<A>, ifindex: u32, device: &Device) {
    half.in_ifindex = ifindex;
    half.queue = device.flags & SENT;
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
pub fn queue(from: u32, pod: &Device) -> u32 {
    from & SENT | pod.flags & flags::SHAPED
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

/// Packets of this half go the way that the routing table has just named, out of an uplink with these flags. Where the
/// neighbour is not known it has no Ethernet addresses: the next packet asks again.
#[inline(always)]
pub fn settle_on_wire<A>(half: &mut Half<A>, route: &Route<A>, kind: u32) {
    let told = if half.mtu == route.mtu {
        half.queue & TOLD
    } else {
        0
    };
    half.mtu = route.mtu;
    half.queue = half.queue & flags::NETKIT | kind & flags::TUNNEL | told;
    memory::copy(&mut half.eth, &route.eth);
    half.stamp = if half.eth[0] == [0; 6] { 0 } else { stamp() };
}

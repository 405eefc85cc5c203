//! Which host veths are of one container: one that is in several networks has one for each, and its own
//! stack decides which interface a packet leaves by, whichever of its addresses the packet carries.

use underpass_abi::{addr::Addr, endpoint::device as flags};

use crate::kernel::{
    global::global,
    maps::{device, endpoint},
};

/// Whether both host veths are of one container.
#[inline(always)]
pub fn is_same(one: u32, other: u32) -> bool {
    one == other || are_siblings(one, other)
}

global!(
    /// See [`is_same`].
    fn are_siblings(one: u32, other: u32) -> bool {
        let (Some(one), Some(other)) = (device(one), device(other)) else {
            return false;
        };
        one.netns != 0 && one.netns == other.netns
    }
);

/// Whether the container behind a host veth has the address, at this interface or at another.
#[inline(always)]
pub fn owns(ifindex: u32, addr: Addr) -> bool {
    endpoint(addr).is_some_and(|endpoint| is_same(endpoint.ifindex, ifindex))
}

/// The host veth that a packet's source address is of, if the packet came by another of the same
/// container; else the device that it came by.
#[inline(always)]
pub fn sender(src: Addr, ifindex: u32) -> u32 {
    match endpoint(src) {
        Some(owner) if is_same(owner.ifindex, ifindex) => owner.ifindex,
        _ => ifindex,
    }
}

/// Whether the bypass treats what comes by the host veth `ifindex` as what comes by `owner`: they are
/// one, or of one container and alike in all that the bypass goes by.
#[inline(always)]
pub fn stands_in(ifindex: u32, owner: u32) -> bool {
    const ALIKE: u32 = flags::BYPASS | flags::NETKIT;
    if ifindex == owner {
        return true;
    }
    let (Some(one), Some(other)) = (device(ifindex), device(owner)) else {
        return false;
    };
    one.netns != 0 && one.netns == other.netns && (one.flags ^ other.flags) & ALIKE == 0
}

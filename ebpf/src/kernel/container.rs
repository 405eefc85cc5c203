//! Which host veths are of one container: one that is in several networks has one for each, and its own
//! stack decides which interface a packet leaves by, whichever of its addresses the packet carries.

use core::num::NonZeroU32;

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

/// The host veth that an address is of, if the container behind `ifindex` has it: at this interface or
/// at another. (No device has the number 0. An `Option<u32>` would be a pair, of which nobody writes the
/// second where there is none, and the verifier of 5.10 refuses to have it copied.)
#[inline(always)]
pub fn owner(ifindex: u32, addr: Addr) -> Option<NonZeroU32> {
    let owner = NonZeroU32::new(endpoint(addr)?.ifindex)?;
    is_same(owner.get(), ifindex).then_some(owner)
}

/// Whether the container behind a host veth has the address.
#[inline(always)]
pub fn owns(ifindex: u32, addr: Addr) -> bool {
    owner(ifindex, addr).is_some()
}

/// The host veth that a packet's source address is of, if the packet came by another of the same
/// container; else the device that it came by.
#[inline(always)]
pub fn sender(src: Addr, ifindex: u32) -> u32 {
    owner(ifindex, src).map_or(ifindex, NonZeroU32::get)
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

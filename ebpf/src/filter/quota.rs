//! A pod's share of flows that nobody answered yet: one that floods fills its own, not that of
//! others.

use underpass_abi::quota::{CAPACITY, SHIFT, WORLD};

use crate::kernel::maps::{device, half_open, set_half_open, tick};

/// The flow fits the pod's quota, which it has been taken from.
pub const GRANTED: u32 = 0;
/// The pod has too many half-open flows.
pub const FULL: u32 = 1;

/// Takes a new flow from the quota of the pod behind the host veth `pod`; with [`WORLD`] from that of
/// flows that the world opens to it.
#[inline(always)]
pub fn charge(pod: u32) -> u32 {
    let Some(cost) = device(pod & !WORLD).map(|pod| u64::from(pod.flow_cost)) else {
        return GRANTED;
    };
    let now = u64::from(tick()) << SHIFT;
    let Some(until) = half_open(pod) else {
        set_half_open(pod, now + cost);
        return GRANTED;
    };
    let after = (*until).max(now) + cost;
    if after > now + CAPACITY {
        return FULL;
    }
    *until = after;
    GRANTED
}

/// A flow was answered, or could not be stored: the quota has room for another.
#[inline(always)]
pub fn refund(pod: u32) -> u32 {
    if let (Some(device), Some(until)) = (device(pod & !WORLD), half_open(pod)) {
        *until = (*until).saturating_sub(u64::from(device.flow_cost));
    }
    GRANTED
}

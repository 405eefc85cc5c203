//! A pod's share of flows that nobody answered yet: one that floods fills its own, not that of
//! others.

use underpass_abi::quota::{CAPACITY, SHIFT, WORLD};

use crate::kernel::{
    global::global,
    maps::{device, half_open, set_half_open, tick},
};

global!(
    /// Whether a new flow fits, and is taken from, the quota of the pod behind the host veth `pod`; with [`WORLD`] from that of
    /// flows that the world opens to it.
    pub fn charge(pod: u32) -> bool {
        let Some(cost) = device(pod & !WORLD).map(|pod| u64::from(pod.flow_cost)) else {
            return true;
        };
        let now = u64::from(tick()) << SHIFT;
        let Some(until) = half_open(pod) else {
            set_half_open(pod, now + cost);
            return true;
        };
        let after = (*until).max(now) + cost;
        if after > now + CAPACITY {
            return false;
        }
        *until = after;
        true
    }
);

global!(
    /// A flow was answered, or could not be stored: the quota has room for another.
    pub fn refund(pod: u32) {
        if let (Some(device), Some(until)) = (device(pod & !WORLD), half_open(pod)) {
            *until = (*until).saturating_sub(u64::from(device.flow_cost));
        }
    }
);

//! A pod's share of flows that nobody answered yet: one that floods fills its own, not that of
//! others.

use underpass_abi::quota::{CAPACITY, SHIFT, TRANSLATED, WORLD};

use crate::kernel::{
    global::global,
    maps::{device, half_open, set_half_open, tick},
};

/// What is beside the ifindex in a bucket's key.
const KINDS: u32 = WORLD | TRANSLATED;

global!(
    /// Whether a new flow fits, and is taken from, a quota of the pod behind a host veth: the key of its bucket.
    pub fn charge(pod: u32) -> bool {
        let Some(cost) = device(pod & !KINDS).map(|pod| u64::from(pod.flow_cost)) else {
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
        if let (Some(device), Some(until)) = (device(pod & !KINDS), half_open(pod)) {
            *until = (*until).saturating_sub(u64::from(device.flow_cost));
        }
    }
);

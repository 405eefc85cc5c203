//! Programs of others at tcx (Linux 6.6), which the kernel asks before all filters of tc, and so before ours.

use underpass_netlink::filter::Direction;

use crate::netkit::{Ids, query};

/// Attach types of `linux/bpf.h`.
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;

/// Asks for the ids of the programs at one direction of a device; none if there is no such device, or no tcx on this
/// kernel.
#[must_use]
pub fn programs(index: u32, direction: Direction) -> Vec<u32> {
    let attach_type = match direction {
        Direction::Ingress => BPF_TCX_INGRESS,
        Direction::Egress => BPF_TCX_EGRESS,
    };
    let mut ids = [0; size_of::<Ids>() / size_of::<u32>()];
    let count = query(index, attach_type, &mut ids).unwrap_or(0);
    ids.into_iter().take(count).collect()
}

//! Bandwidth: a token bucket filter on each end of the veth pair shapes what that end sends.
//!
//! What the container sends is shaped on its own interface, where a full queue holds its sockets
//! back instead of losing packets. Both filters go with the link.

use underpass_abi::endpoint::device;
use underpass_dataplane::Maps;
use underpass_netlink::{
    Netlink,
    link::{Device, Link},
    qdisc::Tbf,
};

use super::link::Pair;
use crate::{
    conf::bandwidth::{Bandwidth, Limit},
    error::Error,
    plan::Plan,
};

/// Bytes of a frame that an MTU does not count: the Ethernet header and a VLAN tag.
const FRAME_OVERHEAD: u32 = 14 + 4;

/// The token bucket filter for a limit, on a device with that MTU.
///
/// A bucket that holds no whole frame would stop all full-sized packets for ever, so it holds one
/// at least.
fn filter(limit: Limit, mtu: u32) -> Tbf {
    let burst = u32::try_from(limit.burst / 8).unwrap_or(u32::MAX);
    Tbf::new(limit.rate / 8, burst.max(mtu + FRAME_OVERHEAD))
}

/// Shapes both directions, before the first packet.
pub(crate) fn apply(node: &Netlink, pod: &Netlink, plan: &Plan, pair: &Pair) -> Result<(), Error> {
    let ends: [(_, _, &Device); 2] = [
        (plan.bandwidth.ingress, node, &pair.host),
        (plan.bandwidth.egress, pod, &pair.pod),
    ];
    for (limit, netlink, end) in ends {
        if let Some(limit) = limit {
            netlink.add_tbf(end, filter(limit, plan.mtu))?;
        }
    }
    Ok(())
}

/// The filters against the limits.
pub(crate) fn verify(
    maps: &Maps,
    netlinks: [&Netlink; 2],
    ends: [&Link; 2],
    bandwidth: Bandwidth,
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    let [here, _] = ends;
    let known = maps.device(here.index)?;
    // That of the ADD: a later plugin may have changed the devices'.
    let mtu = known.map_or(here.mtu, |known| known.mtu);
    let limits = [("ingress", bandwidth.ingress), ("egress", bandwidth.egress)];
    for (((direction, limit), netlink), end) in limits.into_iter().zip(netlinks).zip(ends) {
        let Some(limit) = limit else { continue };
        let wanted = filter(limit, mtu);
        let name = &end.name;
        match netlink.root_tbf(end.index)? {
            None => wrong.push(format!(
                "{name} has no token bucket filter: {direction} is not limited to {} bit/s",
                limit.rate
            )),
            Some(actual) if actual.rate != wanted.rate => wrong.push(format!(
                "{direction} is limited to {} bit/s on {name}, not to {}",
                u128::from(actual.rate) * 8,
                limit.rate
            )),
            Some(actual) if actual != wanted => wrong.push(format!(
                "the token bucket filter on {name} has a buffer of {} ticks and a limit of {} bytes, not {} and {}",
                actual.buffer, actual.limit, wanted.buffer, wanted.limit
            )),
            Some(_) => {}
        }
    }
    let is_shaped = known.is_some_and(|known| known.flags & device::SHAPED != 0);
    if bandwidth.ingress.is_some() && !is_shaped {
        wrong.push(format!(
            "the map DEVICES does not say that {} is shaped: the bypass goes past its limit",
            here.name
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_become_bytes() {
        let limit = Limit {
            rate: 20_000_000,
            burst: 1_000_000,
        };
        assert_eq!(filter(limit, 1500), Tbf::new(2_500_000, 125_000));
    }

    #[test]
    fn a_bucket_holds_a_frame() {
        let tiny = Limit { rate: 8, burst: 8 };
        assert_eq!(filter(tiny, 1500), Tbf::new(1, 1518));
        let large = Limit {
            rate: 8,
            burst: u64::MAX,
        };
        assert_eq!(filter(large, 1500), Tbf::new(1, u32::MAX));
    }
}

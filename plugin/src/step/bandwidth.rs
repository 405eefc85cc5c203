//! Bandwidth: a token bucket filter on each end of the pair shapes what that end sends.
//!
//! What the container sends is shaped on its own interface, where a full queue holds its sockets
//! back instead of losing packets. Both filters go with the pair.

use underpass_abi::endpoint::device;
use underpass_netlink::{
    Netlink,
    link::{Device, Link},
    qdisc::Tbf,
};

use super::{Attachment, Inspection, Interface, Step};
use crate::{
    conf::bandwidth::Limit,
    error::Error,
    finding::{Finding, Findings},
};

/// The handle of the filters of an interface of ours, `1:` in `tc`.
const HANDLE: u16 = 1;
/// Bytes of a frame that an MTU does not count: the Ethernet header and a VLAN tag.
const FRAME_OVERHEAD: u32 = 14 + 4;

/// Makes the token bucket filter for a limit, on a device with that MTU.
///
/// A bucket that holds no whole frame would stop all full-sized packets for ever, so it holds one
/// at least.
pub(super) fn filter(limit: Limit, mtu: u32) -> Tbf {
    let burst = u32::try_from(limit.burst / 8).unwrap_or(u32::MAX);
    Tbf::new(limit.rate / 8, burst.max(mtu + FRAME_OVERHEAD))
}

/// Shapes both directions, before the first packet.
pub(crate) struct Shaping;

impl Step<Interface> for Shaping {
    fn name(&self) -> &'static str {
        "bandwidth"
    }

    fn apply(&self, attachment: &mut Attachment<'_, Interface>) -> Result<(), Error> {
        let made = &attachment.made;
        let limits = made.plan.bandwidth;
        let ends: [(_, &Netlink, &Device); 2] = [
            (limits.ingress, attachment.node, &attachment.host),
            (limits.egress, &made.pod, &made.container),
        ];
        for (limit, netlink, end) in ends {
            if let Some(limit) = limit {
                netlink.add_tbf(end, HANDLE, filter(limit, made.plan.mtu))?;
            }
        }
        Ok(())
    }

    /// Compares the filters with the limits.
    fn verify(
        &self,
        inspection: &Inspection<'_, Interface>,
        findings: &mut Findings,
    ) -> Result<(), Error> {
        let (host, ends) = (&inspection.host, &inspection.found);
        let (Some(limits), Some(loaded)) = (ends.limits, &inspection.loaded) else {
            return Ok(());
        };
        let known = loaded.maps.device(host.index)?;
        // That of the ADD: a later plugin may have changed the devices'.
        let mtu = known.map_or(host.mtu, |known| known.mtu);
        let directions: [(_, _, &Netlink, &Link); 2] = [
            ("ingress", limits.ingress, inspection.node, host),
            ("egress", limits.egress, ends.pod, &ends.container),
        ];
        for (direction, limit, netlink, end) in directions {
            if let Some(limit) = limit {
                let actual = netlink.root_tbf(end.index)?;
                findings.extend(compare(direction, limit, mtu, &end.name, actual));
            }
        }
        let is_shaped = known.is_some_and(|known| known.flags & device::SHAPED != 0);
        if limits.ingress.is_some() && !is_shaped {
            findings.push(Finding::ShapingUnknown(host.name.clone()));
        }
        Ok(())
    }
}

/// Says what is wrong with the filter of a direction, if anything is.
pub(super) fn compare(
    direction: &'static str,
    limit: Limit,
    mtu: u32,
    device: &str,
    actual: Option<Tbf>,
) -> Option<Finding> {
    let wanted = filter(limit, mtu);
    let device = device.to_owned();
    let rate = limit.rate;
    match actual {
        None => Some(Finding::NotShaped {
            device,
            direction,
            rate,
        }),
        Some(actual) if actual.rate != wanted.rate => Some(Finding::OtherRate {
            device,
            direction,
            actual: u128::from(actual.rate) * 8,
            rate,
        }),
        Some(actual) if actual != wanted => Some(Finding::OtherBucket {
            device,
            actual,
            wanted,
        }),
        Some(_) => None,
    }
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

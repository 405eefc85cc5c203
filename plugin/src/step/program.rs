//! Programs on the host's end.

use underpass_abi::endpoint::device;
use underpass_dataplane::{Maps, attach};
use underpass_netlink::{Netlink, link::Link};

use super::{Attachment, Inspection, Interface, Step};
use crate::{
    error::Error,
    finding::{Finding, Findings},
};

/// Attaches the programs to the host's end, whose map entries exist. They go with the pair.
pub(crate) struct Filters;

impl Step<Interface> for Filters {
    fn name(&self) -> &'static str {
        "filters"
    }

    fn apply(&self, attachment: &mut Attachment<'_, Interface>) -> Result<(), Error> {
        let places = attach::places(attachment.made.plan.flags);
        let pins = attachment.maps.pins();
        Ok(attach::attach(
            attachment.node,
            pins,
            &attachment.host,
            places,
        )?)
    }

    fn verify(
        &self,
        inspection: &Inspection<'_, Interface>,
        findings: &mut Findings,
    ) -> Result<(), Error> {
        match &inspection.loaded {
            Some(loaded) => {
                verify_pod_side(inspection.node, &loaded.maps, &inspection.host, findings)
            }
            None => Ok(()),
        }
    }
}

/// Says which programs are not on the host's end of a container's pair, or on its bridge.
pub(super) fn verify_pod_side(
    node: &Netlink,
    maps: &Maps,
    link: &Link,
    findings: &mut Findings,
) -> Result<(), Error> {
    let known = maps.device(link.index)?;
    let places = attach::places(known.map_or(device::POD, |known| known.flags));
    let missing = attach::missing(node, maps.pins(), &[(link.index, places)])?;
    findings.extend(Finding::not_attached(missing, &link.name));
    Ok(())
}

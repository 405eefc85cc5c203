//! Programs on the uplinks that the container's packets leave by, and the epoch.

use tracing::warn;
use underpass_dataplane::{
    Maps,
    lock::Lock,
    policy::{self, Rules},
};
use underpass_netlink::Netlink;

use super::{Attachment, Inspection, Loaded, Mode, Step};
use crate::{
    error::Error,
    finding::{Finding, Findings},
    uplink::{Uplinks, reconcile},
};

/// Brings the uplinks up to date, and what the programs must know of the node's own stack; then makes
/// every flow validate itself again: the last change of an ADD to the maps.
pub(crate) struct UplinkPrograms;

impl<M: Mode> Step<M> for UplinkPrograms {
    fn name(&self) -> &'static str {
        "uplink programs"
    }

    fn apply(&self, attachment: &mut Attachment<'_, M>) -> Result<(), Error> {
        let Attachment {
            node,
            maps,
            uplinks,
            ..
        } = attachment;
        finish(node, maps, uplinks)
    }

    /// Fails where somebody has taken away what was there. What has become of the node since the last ADD is no fault of this attachment,
    /// and a runtime that was told so would make all containers anew: it is a warning, as STATUS has it.
    fn verify(&self, inspection: &Inspection<'_, M>, findings: &mut Findings) -> Result<(), Error> {
        let Some(Loaded { maps, uplinks }) = &inspection.loaded else {
            return Ok(());
        };
        let mut found = Findings::default();
        reconcile::verify(inspection.node, maps, uplinks, &mut found)?;
        for finding in found {
            match finding {
                Finding::OtherTunnels | Finding::PartOfUplink(_) | Finding::OtherUplink(_) => {
                    warn!("{finding}");
                }
                Finding::NotAttached { ref device, .. } if !is_known(maps, uplinks, device)? => {
                    warn!("{finding}");
                }
                finding => findings.push(finding),
            }
        }
        Ok(())
    }
}

/// Tells whether an uplink had its programs once.
fn is_known(maps: &Maps, uplinks: &Uplinks<'_>, name: &str) -> Result<bool, Error> {
    let uplink = uplinks.list.iter().find(|uplink| uplink.name == name);
    let known = uplink.map(|uplink| maps.device(uplink.index)).transpose()?;
    Ok(known.flatten().is_some())
}

fn finish(node: &Netlink, maps: &mut Maps, uplinks: &Uplinks<'_>) -> Result<(), Error> {
    // Nearly always all is well. The kernel answers such questions one after the other, so who asked
    // with the lock in hand would let everybody behind the lock wait for everybody before the kernel.
    let mut findings = Findings::default();
    reconcile::verify(node, maps, uplinks, &mut findings)?;
    let rules = Rules::wanted();
    let lock = Lock::acquire(maps.pins().root())?;
    if !findings.is_empty() {
        // What this call saw may be older than what another one has written since.
        let uplinks = Uplinks::find(node, maps, uplinks.patterns)?;
        reconcile::uplinks(&lock, node, maps, &uplinks)?;
    }
    policy::set(&lock, maps, rules)?;
    Ok(maps.raise_epoch()?)
}

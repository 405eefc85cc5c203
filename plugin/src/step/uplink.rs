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
    finding::Findings,
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
        let found = reconcile::verify(inspection.node, maps, uplinks)?;
        for finding in found.of_node.iter() {
            warn!("{finding}");
        }
        findings.append(found.taken_away);
        Ok(())
    }
}

fn finish(node: &Netlink, maps: &mut Maps, uplinks: &Uplinks<'_>) -> Result<(), Error> {
    // Nearly always all is well. The kernel answers such questions one after the other, so who asked
    // with the lock in hand would let everybody behind the lock wait for everybody before the kernel.
    let found = reconcile::verify(node, maps, uplinks)?;
    let rules = Rules::wanted();
    let lock = Lock::acquire(maps.pins().root())?;
    if !found.is_empty() {
        // What this call saw may be older than what another one has written since.
        let uplinks = Uplinks::find(node, maps, uplinks.patterns)?;
        reconcile::uplinks(&lock, node, maps, &uplinks)?;
    }
    if Rules::in_force(&maps.state()?) != rules {
        // And so may this.
        policy::set(&lock, maps, Rules::wanted())?;
    }
    Ok(maps.raise_epoch()?)
}

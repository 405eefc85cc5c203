//! The steps of an attachment, one file each.
//!
//! ADD walks a list of steps and applies each; CHECK walks the same list and verifies each; DEL and GC walk a
//! list of their own, of what would stay, and revert each. Two steps come before the lists, because what
//! they make is what all others stand on: [`lease::take`] gives the addresses that the plan is made of, and
//! [`link::make`] the pair. There is no [`Attachment`] without them.

mod attachment;
mod detachment;
mod undo;

pub(crate) mod address;
pub(crate) mod bandwidth;
pub(crate) mod chained;
pub(crate) mod chained_bandwidth;
pub(crate) mod endpoint;
pub(crate) mod lease;
pub(crate) mod link;
pub(crate) mod port;
pub(crate) mod program;
pub(crate) mod route;
mod sibling;
pub(crate) mod sysctl;
pub(crate) mod uplink;
pub(crate) mod xdp;

use crate::{error::Error, finding::Findings};

pub(crate) use attachment::{Attachment, Ends, Inspection, Interface, Loaded, Mode, Pair};
pub(crate) use chained::Chained;
pub(crate) use detachment::{Detachment, detach, detach_chained, end_without, forget};
pub(crate) use undo::Undo;

/// A part of an attachment.
pub(crate) trait Step<M: Mode> {
    /// The step's name, in the log and among the times of the last ADD.
    fn name(&self) -> &'static str;

    /// Does the step, and leaves the undoing of what would stay on the attachment's stack.
    fn apply(&self, attachment: &mut Attachment<'_, M>) -> Result<(), Error>;

    /// Compares what is there with what the step makes, and says what differs.
    fn verify(&self, inspection: &Inspection<'_, M>, findings: &mut Findings) -> Result<(), Error>;
}

/// A step that leaves something behind which does not go by itself.
pub(crate) trait Revert {
    /// Takes it away; what is gone already is fine. It needs nothing but what the kernel and the maps still
    /// have.
    fn revert(&self, detachment: &mut Detachment<'_>) -> Result<(), Error>;

    /// Tells whether what comes after it has to stay while this can't be taken away.
    fn comes_before_the_rest(&self) -> bool {
        false
    }
}

/// An interface of ours. The maps come before the filters, and both before the host's end is up: no program
/// meets a packet whose container it does not know.
pub(crate) const INTERFACE: &[&dyn Step<Interface>] = &[
    &sysctl::ContainerSettings,
    &address::Addresses,
    &route::ContainerRoutes,
    &bandwidth::Shaping,
    &xdp::ContainerFrames,
    &sysctl::HostSettings,
    &endpoint::Entries,
    &port::HostPorts,
    &program::Filters,
    // Before the first packet: one that left by an uplink without programs would show the container's
    // address.
    &uplink::UplinkPrograms,
    &xdp::UplinkProgram,
    &link::HostEnd,
    &route::HostRoutes,
    &address::Delivery,
];

/// Host ports of a container that another plugin of the chain attached.
pub(crate) const CHAINED: &[&dyn Step<Chained>] =
    &[&chained::Entries, &port::HostPorts, &uplink::UplinkPrograms];

/// The way back of an interface of ours. First the container is silenced, and its host ports go to others;
/// then the pair goes, which on a busy node takes a while and loses what is still on its way; and only then
/// what the programs know of the container: otherwise its packets would leave with its own address.
const REVERT_INTERFACE: &[&dyn Revert] = &[
    &link::HostEnd,
    &port::HostPorts,
    &link::PairOfDevices,
    &endpoint::Entries,
];

/// The way back of host ports in a chain. The interface is somebody else's, and may be gone.
const REVERT_CHAINED: &[&dyn Revert] = &[&port::HostPorts, &chained::Entries];

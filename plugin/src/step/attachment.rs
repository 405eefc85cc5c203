//! What the steps work on: an attachment that is being made, and one that is being inspected.

use ipnet::IpNet;
use underpass_abi::endpoint::Owner;
use underpass_cni::{IpConfig, Route as CniRoute};
use underpass_dataplane::Maps;
use underpass_ipam::Claim;
use underpass_netlink::{
    Netlink, Netns,
    link::{By, Device, Link},
    xdp::XdpMode,
};

use super::{Step, Undo};
use crate::{
    conf::{Conntrack, Dad, MacCheck, bandwidth::Bandwidth, port::Binding},
    error::Error,
    finding::Findings,
    plan::Plan,
    uplink::Uplinks,
};

/// Who made the interface: it decides what the steps work with.
pub(crate) trait Mode {
    /// What an ADD has made, or found, before the steps.
    type Made;
    /// What a CHECK has found before the steps.
    type Found<'a>;
}

/// An interface that this plugin makes.
#[derive(Debug)]
pub(crate) struct Interface {
    pub(crate) plan: Plan,
    /// Of the addresses, where this process has given them.
    pub(crate) claim: Option<Claim>,
    /// The container's end, in its namespace.
    pub(crate) container: Device,
    pub(crate) netns: Netns,
    /// A socket in the container's namespace.
    pub(crate) pod: Netlink,
    /// How XDP is used, if it is.
    pub(crate) xdp: Option<XdpMode>,
}

impl Mode for Interface {
    type Made = Self;
    type Found<'a> = Ends<'a>;
}

/// The two ends of a pair as it was made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Pair {
    /// The host's end, in the node's namespace.
    pub(crate) host: Device,
    /// The container's end, in its namespace.
    pub(crate) container: Device,
}

/// An attachment that an ADD is making. What it undoes comes first, since fields are dropped in this order.
pub(crate) struct Attachment<'a, M: Mode> {
    pub(crate) undo: Undo<'a>,
    /// A socket in the node's namespace.
    pub(crate) node: &'a Netlink,
    pub(crate) maps: Maps,
    pub(crate) owner: Owner,
    /// The host's end.
    pub(crate) host: Device,
    /// The host ports that lead to the container.
    pub(crate) ports: Vec<Binding>,
    pub(crate) uplinks: Uplinks<'a>,
    pub(crate) made: M::Made,
}

impl<M: Mode> Attachment<'_, M> {
    /// Applies the steps, one after the other, and keeps what they made. After each it calls `done` with the
    /// step's name.
    pub(crate) fn make(
        mut self,
        steps: &[&dyn Step<M>],
        mut done: impl FnMut(&'static str),
    ) -> Result<M::Made, Error> {
        for step in steps {
            step.apply(&mut self).map_err(|error| self.lost(error))?;
            done(step.name());
        }
        self.undo.keep();
        Ok(self.made)
    }

    /// Why a step has failed: if the host's end is gone, because of that, whatever the kernel said to it.
    fn lost(&self, error: Error) -> Error {
        match self.node.link(By::Index(self.host.index)) {
            Ok(None) => Error::AttachmentLost,
            _ => error,
        }
    }
}

/// An attachment that a CHECK looks at.
pub(crate) struct Inspection<'a, M: Mode> {
    /// A socket in the node's namespace.
    pub(crate) node: &'a Netlink,
    pub(crate) owner: Owner,
    /// The host's end.
    pub(crate) host: Link,
    /// The host ports that must lead to the container.
    pub(crate) ports: Vec<Binding>,
    /// None where nothing is loaded.
    pub(crate) loaded: Option<Loaded<'a>>,
    pub(crate) found: M::Found<'a>,
}

/// What is there only where the programs are loaded.
pub(crate) struct Loaded<'a> {
    pub(crate) maps: Maps,
    pub(crate) uplinks: Uplinks<'a>,
}

/// What a CHECK has of an interface, beside the host's end.
pub(crate) struct Ends<'a> {
    /// The container's end.
    pub(crate) container: Link,
    pub(crate) netns: &'a Netns,
    /// A socket in the container's namespace.
    pub(crate) pod: &'a Netlink,
    /// The addresses that the runtime remembers.
    pub(crate) ips: Vec<&'a IpConfig>,
    /// The routes that the runtime remembers.
    pub(crate) routes: &'a [CniRoute],
    pub(crate) mac_check: MacCheck,
    pub(crate) dad: Dad,
    pub(crate) conntrack: Conntrack,
    pub(crate) limits: Option<Bandwidth>,
    /// How XDP is used, if it is.
    pub(crate) xdp: Option<XdpMode>,
}

impl Ends<'_> {
    /// Lists the container's addresses.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = IpNet> {
        self.ips.iter().map(|ip| ip.address)
    }
}

impl<M: Mode> Inspection<'_, M> {
    /// Verifies the steps, one after the other.
    pub(crate) fn verify(
        &self,
        steps: &[&dyn Step<M>],
        findings: &mut Findings,
    ) -> Result<(), Error> {
        steps
            .iter()
            .try_for_each(|step| step.verify(self, findings))
    }
}

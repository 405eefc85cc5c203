//! The plugin under the name `bandwidth`: it limits what a container receives and sends, by the interface that a
//! plugin before it in the chain has made, and passes the result on.

use std::path::Path;

use underpass_cni::{CniResult, Error as CniError, NetworkRequest, Plugin, Request};
use underpass_netlink::{Netlink, Netns, netns};

use super::{identity, no_result, not_chained};
use crate::{
    conf::{
        Conf,
        bandwidth::{self, Bandwidth as Limits},
    },
    error::Error,
    finding::Findings,
    step::chained_bandwidth::Ends,
};

/// The plugin under the name `bandwidth`, which is always chained.
#[derive(Clone, Copy, Debug)]
pub struct Bandwidth;

impl Plugin for Bandwidth {
    fn add(&self, request: &Request) -> Result<CniResult, CniError> {
        let limits = bandwidth::of_attachment(&request.conf)?;
        let previous = request.conf.prev_result()?;
        let previous = previous.ok_or_else(not_chained)?;
        if !limits.is_none() {
            within(request, limits, |ends| ends.apply(limits))?;
        }
        Ok(previous)
    }

    /// Takes the filters off, whatever the config says today. They would go with the interface.
    fn del(&self, request: &Request) -> Result<(), CniError> {
        Ok(del(request)?)
    }

    fn check(&self, request: &Request) -> Result<(), CniError> {
        let limits = bandwidth::of_attachment(&request.conf)?;
        if request.conf.prev_result()?.is_none() {
            return Err(no_result("Required prevResult missing"));
        }
        if limits.is_none() {
            return Ok(());
        }
        let mut findings = Findings::default();
        within(request, limits, |ends| ends.verify(limits, &mut findings))?;
        Ok(findings.into_result()?)
    }

    /// Finds nothing: the filters go with the interface.
    fn gc(&self, _: &NetworkRequest) -> Result<(), CniError> {
        Ok(())
    }

    fn status(&self, request: &NetworkRequest) -> Result<(), CniError> {
        bandwidth::of_network(&request.conf)?;
        Conf::bpf_root(&request.conf)?;
        Ok(())
    }
}

/// Finds the ends of the container's interface, and works on them.
fn within(
    request: &Request,
    limits: Limits,
    work: impl FnOnce(&mut Ends<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let path = request.attachment.netns.clone().unwrap_or_default();
    let ifname = &request.attachment.ifname;
    let netns = Netns::open(&path)?.ok_or(Error::NoNetns(path))?;
    let (node, pod) = (Netlink::open()?, netns.run(Netlink::open)??);
    let owner = identity(request).owner();
    let ends = Ends::find(&node, &pod, ifname, owner)?;
    let mut ends = ends.ok_or_else(|| no_pair(ifname, limits))?;
    let root = Conf::bpf_root(&request.conf)?;
    ends.open_maps(&root)?;
    ends.require_known(&root)?;
    work(&mut ends)
}

fn no_pair(ifname: &str, limits: Limits) -> CniError {
    let (key, rate) = limits
        .first()
        .map_or(("ingressRate", 0), |(key, limit)| (key, limit.rate));
    CniError::unsupported(key, rate).with_details(format!(
        "the container has no interface {ifname}, or it is no veth with its other end on the host (macvlan, ipvlan and \
         host-device are not): there is nothing that could limit it"
    ))
}

fn del(request: &Request) -> Result<(), Error> {
    let path = request.attachment.netns.as_deref().unwrap_or(Path::new(""));
    let netns = match Netns::open(path) {
        Ok(Some(netns)) => netns,
        // What a deleted mount leaves behind is no namespace, either. With the namespace the interface went.
        Ok(None) | Err(netns::Error::NotANamespace { .. }) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let (node, pod) = (Netlink::open()?, netns.run(Netlink::open)??);
    let owner = identity(request).owner();
    match Ends::find(&node, &pod, &request.attachment.ifname, owner)? {
        Some(mut ends) => ends.revert(&Conf::bpf_root(&request.conf)?),
        None => Ok(()),
    }
}

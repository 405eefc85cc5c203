//! The verbs of the plugin where it follows another in a chain: it serves the host ports of the
//! container that the other attached, and passes the result on.

use std::net::IpAddr;

use tracing::warn;
use underpass_cni::{CniResult, Error as CniError, NetworkRequest, Plugin, Request};
use underpass_dataplane::{Maps, Pins};
use underpass_netlink::{Netlink, Netns, link::Device};

use super::{
    gc, identity, maps_to_clean, no_result, not_chained, reap_or_warn, require_detached, status,
};
use crate::{
    conf::{
        chained::{Chained, Name},
        port::{Binding, bindings},
    },
    error::Error,
    finding::{Finding, Findings},
    identity::Identity,
    step::{self, Attachment, CHAINED, Inspection, Loaded, Undo, detach_chained},
    uplink::Uplinks,
};

/// The plugin under the name `portmap`, which is always chained.
#[derive(Clone, Copy, Debug)]
pub struct Portmap;

impl Plugin for Portmap {
    fn add(&self, request: &Request) -> Result<CniResult, CniError> {
        let previous = request.conf.prev_result()?;
        let previous = previous.ok_or_else(not_chained)?;
        Ok(add(request, previous, Name::Portmap)?)
    }

    fn del(&self, request: &Request) -> Result<(), CniError> {
        Ok(del(request)?)
    }

    fn check(&self, request: &Request) -> Result<(), CniError> {
        Ok(check(request, Name::Portmap)?)
    }

    fn gc(&self, request: &NetworkRequest) -> Result<(), CniError> {
        Ok(gc::gc_ports(request)?)
    }

    fn status(&self, request: &NetworkRequest) -> Result<(), CniError> {
        let bpf_root = Chained::of_network(&request.conf, Name::Portmap)?.bpf_root;
        status::ready(&bpf_root, &request.conf.name)
    }
}

/// Serves the host ports, or changes nothing.
pub(super) fn add(request: &Request, previous: CniResult, name: Name) -> Result<CniResult, Error> {
    let conf = Chained::of_attachment(request, name)?;
    let identity = identity(request);
    let ports = wanted(&conf, &previous, &identity.ifname);
    let Some(first) = ports.first() else {
        return Ok(previous);
    };
    let (node, chained) = look(request, &identity, first)?;
    let mut maps = Maps::open_or_load(&conf.bpf_root)?;
    let owner = identity.chained_owner();
    let patterns = chained.uplinks(&maps, conf.uplinks.as_deref())?;
    let uplinks = Uplinks::find(&node, &maps, patterns)?;
    reap_or_warn(&node, &mut maps, &uplinks.indices, &request.conf);
    require_detached(&maps, owner, &identity)?;

    let attachment = Attachment {
        undo: Undo::default(),
        node: &node,
        maps,
        owner,
        host: Device::from(chained.host()),
        ports,
        uplinks,
        made: chained,
    };
    attachment.make(CHAINED, |_| {})?;
    Ok(previous)
}

/// Verifies that the host ports are served.
pub(super) fn check(request: &Request, name: Name) -> Result<(), Error> {
    let conf = Chained::of_attachment(request, name)?;
    let identity = identity(request);
    let remembered = request
        .conf
        .prev_result()?
        .ok_or_else(|| no_result("Required prevResult missing"))?;
    let ports = wanted(&conf, &remembered, &identity.ifname);
    let Some(first) = ports.first() else {
        return Ok(());
    };
    let mut findings = Findings::default();
    let Some(maps) = Maps::open_existing(&Pins::at(&conf.bpf_root))? else {
        findings.push(Finding::NotLoaded(conf.bpf_root));
        return findings.into_result();
    };
    let (node, chained) = look(request, &identity, first)?;
    let patterns = chained.uplinks(&maps, conf.uplinks.as_deref())?;
    let uplinks = Uplinks::find(&node, &maps, patterns)?;
    let inspection = Inspection {
        node: &node,
        owner: identity.chained_owner(),
        host: chained.host().clone(),
        ports,
        loaded: Some(Loaded { maps, uplinks }),
        found: chained,
    };
    inspection.verify(CHAINED, &mut findings)?;
    findings.into_result()
}

/// Takes the host ports from the container, whatever became of it.
pub(super) fn del(request: &Request) -> Result<(), Error> {
    let owner = identity(request).chained_owner();
    match maps_to_clean(&request.conf, &[owner]) {
        Ok(Some(mut maps)) => detach_chained(&Netlink::open()?, &mut maps, owner),
        Ok(None) => Ok(()),
        // The DELs of the plugins before this one come after it, and not at all if it fails.
        Err(error) if has_no_ports(request) => {
            warn!("the container has no host ports, so this DEL succeeds: {error}");
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Tells whether the runtime says that the container has no host ports, as it said in the ADD.
pub(super) fn has_no_ports(request: &Request) -> bool {
    Chained::of_attachment(request, Name::Underpass).is_ok_and(|conf| conf.ports.is_empty())
}

/// Opens a socket in the node's namespace, and finds the interface that the other plugin has made.
fn look(
    request: &Request,
    identity: &Identity,
    first: &Binding,
) -> Result<(Netlink, step::Chained), Error> {
    let path = request.attachment.netns.clone().unwrap_or_default();
    let netns = Netns::open(&path)?.ok_or(Error::NoNetns(path))?;
    let node = Netlink::open()?;
    let pod = netns.run(Netlink::open)??;
    let network = identity.network_id();
    let chained = step::Chained::find(&node, &pod, &identity.ifname, first.addr, network)?;
    Ok((node, chained))
}

/// Lists the host ports that lead to an address of the container: of its interface, or of none that the result has.
fn wanted(conf: &Chained, result: &CniResult, ifname: &str) -> Vec<Binding> {
    let is_of_container = |index: u32| {
        let interface = usize::try_from(index)
            .ok()
            .and_then(|at| result.interfaces.get(at));
        interface.is_none_or(|interface| interface.name == ifname && !interface.sandbox.is_empty())
    };
    let addresses: Vec<IpAddr> = result
        .ips
        .iter()
        .filter(|ip| ip.interface.is_none_or(is_of_container))
        .map(|ip| ip.address.addr())
        .collect();
    bindings(&conf.ports, &addresses)
}

//! The verbs of the plugin where it follows another in a chain: it serves the host ports of the
//! container that the other attached, and passes the result on.

use std::net::IpAddr;

use underpass_cni::{CniResult, Error as CniError, NetworkRequest, Plugin, Request};
use underpass_dataplane::{Maps, Pins, object};
use underpass_netlink::{Netlink, Netns};

use super::{del, gc, identity, status};
use crate::{
    conf::{
        Conf,
        chained::{Chained, Name},
        port::{Binding, bindings},
    },
    error::Error,
    step::{
        Undo,
        foreign::{self, Site},
        port::{self, Claims},
        program::{self, Outward},
    },
};

/// The plugin under the name `portmap`, which is always chained.
#[derive(Clone, Copy, Debug)]
pub struct Portmap;

impl Plugin for Portmap {
    fn add(&self, request: &Request) -> Result<CniResult, CniError> {
        let previous = request.conf.prev_result()?;
        let previous =
            previous.ok_or_else(|| CniError::config("must be called as chained plugin"))?;
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
    let bindings = wanted(&conf, &previous, &identity.ifname);
    let Some(first) = bindings.first() else {
        return Ok(previous);
    };
    let (node, pod) = netlinks(request)?;
    let site = Site::find(&node, &pod, &identity.ifname, first.addr)?;
    let pins = object::open_or_load(&conf.bpf_root)?;
    let mut maps = Maps::open(&pins)?;
    let owner = identity.chained_owner();
    if maps.attachment(owner)?.is_some() {
        return Err(Error::Attached {
            network: identity.network,
            container: identity.container,
            ifname: identity.ifname,
        });
    }
    let Outward { uplinks, services } = program::outward(&node, &maps, conf.uplinks.as_deref())?;
    let claims = Claims {
        owner,
        ifindex: site.ifindex(),
        bindings: &bindings,
    };

    let mut undo = Undo::default();
    foreign::apply(
        &node,
        &mut maps,
        &site,
        &uplinks,
        identity.network_id(),
        claims,
        &mut undo,
    )?;
    port::apply(&node, &mut maps, claims, &services, &mut undo)?;
    program::finish(&node, &mut maps, conf.uplinks.as_deref(), &uplinks)?;
    undo.keep();
    Ok(previous)
}

/// Verifies that the host ports are served.
pub(super) fn check(request: &Request, name: Name) -> Result<(), Error> {
    let conf = Chained::of_attachment(request, name)?;
    let identity = identity(request);
    let remembered = request
        .conf
        .prev_result()?
        .ok_or_else(|| CniError::config("Required prevResult missing"))?;
    let bindings = wanted(&conf, &remembered, &identity.ifname);
    let Some(first) = bindings.first() else {
        return Ok(());
    };
    let mut wrong = Vec::new();
    match del::open(&Pins::at(&conf.bpf_root))? {
        None => wrong.push(format!(
            "no programs are loaded at {}",
            conf.bpf_root.display()
        )),
        Some(maps) => {
            let (node, pod) = netlinks(request)?;
            let site = Site::find(&node, &pod, &identity.ifname, first.addr)?;
            let Outward { uplinks, .. } = program::outward(&node, &maps, conf.uplinks.as_deref())?;
            let owner = identity.chained_owner();
            let claims = Claims {
                owner,
                ifindex: site.ifindex(),
                bindings: &bindings,
            };
            foreign::verify(&node, &maps, &site, &uplinks, claims, &mut wrong)?;
            program::verify_uplinks(&node, &maps, &uplinks, &mut wrong)?;
        }
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(Error::Broken(wrong))
    }
}

/// Takes the host ports from the container, whatever became of it.
fn del(request: &Request) -> Result<(), Error> {
    let owner = identity(request).chained_owner();
    let root = Conf::bpf_root(&request.conf)?;
    let Some(mut maps) = del::open(&Pins::at(&root))? else {
        return Ok(());
    };
    del::take_ports(&Netlink::open()?, &mut maps, owner)
}

/// The host's sockets, and the container's.
fn netlinks(request: &Request) -> Result<(Netlink, Netlink), Error> {
    let path = request.attachment.netns.clone().unwrap_or_default();
    let netns = Netns::open(&path)?.ok_or(Error::NoNetns(path))?;
    Ok((Netlink::open()?, netns.run(Netlink::open)??))
}

/// The host ports that lead to an address of the container.
fn wanted(conf: &Chained, result: &CniResult, ifname: &str) -> Vec<Binding> {
    let is_of_container = |index: u32| {
        let interface = usize::try_from(index)
            .ok()
            .and_then(|at| result.interfaces.get(at));
        interface.is_some_and(|interface| interface.name == ifname && !interface.sandbox.is_empty())
    };
    let addresses: Vec<IpAddr> = result
        .ips
        .iter()
        .filter(|ip| ip.interface.is_none_or(is_of_container))
        .map(|ip| ip.address.addr())
        .collect();
    bindings(&conf.ports, &addresses)
}

//! CHECK: compares what the runtime remembers with what is there, and says everything that differs.

use std::path::Path;

use underpass_cni::{CniResult, Error as CniError, Interface, IpConfig, Request};
use underpass_dataplane::Pins;
use underpass_netlink::{Netlink, Netns};

use super::{chained, del, identity};
use crate::{
    conf::{Conf, chained::Name, port::bindings},
    error::Error,
    step::{address, bandwidth, endpoint, lease, link, port, program, route, xdp},
};

/// Verifies the attachment.
pub(crate) fn check(request: &Request) -> Result<(), Error> {
    if is_chained(request)? {
        return chained::check(request, Name::Underpass);
    }
    let conf = Conf::of_attachment(request)?;
    let identity = identity(request);
    let remembered = request
        .conf
        .prev_result()?
        .ok_or_else(|| CniError::config("underpass: Required prevResult missing"))?;
    let path = request.attachment.netns.clone().unwrap_or_default();
    let container = Container::find(&remembered, &identity.ifname, &path)?;
    let netns = Netns::open(&path)?.ok_or(Error::NoNetns(path))?;
    let node = Netlink::open()?;
    let pod = netns.run(Netlink::open)??;

    let mut wrong = Vec::new();
    if let Err(error) = lease::verify(request) {
        wrong.push(error.to_string());
    }
    let owner = identity.owner();
    let ends = link::verify(
        &node,
        &pod,
        owner,
        &identity.ifname,
        container.mac,
        &mut wrong,
    )?;
    if let Some((here, there)) = ends {
        let ips = &container.ips;
        address::verify(&pod, &here, &there, conf.mac_check, ips, &mut wrong)?;
        route::verify_pod(&pod, &there, ips, &remembered.routes, &mut wrong)?;
        route::verify_host(&node, &here, &there, conf.mac_check, ips, &mut wrong)?;
        match del::open(&Pins::at(&conf.bpf_root))? {
            None => wrong.push(format!(
                "no programs are loaded at {}",
                conf.bpf_root.display()
            )),
            Some(maps) => {
                endpoint::verify(&maps, owner, &here, &there, ips, &mut wrong)?;
                let addresses: Vec<_> = ips.iter().map(|ip| ip.address.addr()).collect();
                let ports = bindings(&conf.ports, &addresses);
                port::verify(&node, &maps, owner, &here, &ports, &mut wrong)?;
                if let Some(limits) = conf.bandwidth {
                    let (netlinks, ends) = ([&node, &pod], [&here, &there]);
                    bandwidth::verify(&maps, netlinks, ends, limits, &mut wrong)?;
                }
                xdp::verify_pod(&maps, &here, xdp::usable(conf.xdp), &mut wrong)?;
                let outward = program::outward(&node, &maps, conf.uplinks.as_deref())?;
                program::verify(&node, &maps, &here, &outward.uplinks, &mut wrong)?;
            }
        }
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(Error::Broken(wrong))
    }
}

/// Whether another plugin of the chain made the interface, maybe ours too. Then no IPAM has to give
/// addresses here, and either the result names no veth of ours or the maps know the host ports.
fn is_chained(request: &Request) -> Result<bool, Error> {
    let Some(remembered) = request.conf.prev_result()? else {
        return Ok(false);
    };
    if request.conf.ipam_type()?.is_some() {
        return Ok(false);
    }
    let identity = identity(request);
    let ours = identity.host_name();
    let is_ours = |interface: &Interface| interface.name == ours && interface.sandbox.is_empty();
    if !remembered.interfaces.iter().any(is_ours) {
        return Ok(true);
    }
    let maps = del::open(&Pins::at(&Conf::bpf_root(&request.conf)?))?;
    let ports = maps.map(|maps| maps.attachment(identity.chained_owner()));
    Ok(ports.transpose()?.flatten().is_some())
}

/// What the runtime remembers of the container's end. Later plugins of a chain may have changed it,
/// and added interfaces of their own.
struct Container<'a> {
    mac: Option<&'a str>,
    ips: Vec<&'a IpConfig>,
}

impl<'a> Container<'a> {
    fn find(remembered: &'a CniResult, ifname: &str, netns: &Path) -> Result<Self, Error> {
        let position = remembered
            .interfaces
            .iter()
            .position(|interface| interface.name == ifname && !interface.sandbox.is_empty())
            .ok_or_else(|| {
                CniError::config(format!("prevResult has no interface {ifname} in a sandbox"))
            })?;
        let interface = &remembered.interfaces[position];
        if Path::new(&interface.sandbox) != netns {
            return Err(CniError::config(format!(
                "Sandbox in prevResult {} doesn't match configured netns: {}",
                interface.sandbox,
                netns.display()
            ))
            .into());
        }
        let ips = remembered
            .ips
            .iter()
            .filter(|ip| ip.interface.is_none_or(|index| index as usize == position))
            .collect();
        Ok(Self {
            mac: Some(interface.mac.as_str()).filter(|mac| !mac.is_empty()),
            ips,
        })
    }
}

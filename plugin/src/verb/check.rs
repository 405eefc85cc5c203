//! CHECK: compares what the runtime remembers with what is there, and says everything that differs.

use std::path::Path;

use underpass_cni::{CniResult, Error as CniError, IpConfig, Request};

use super::{del, identity};
use crate::{
    conf::{Conf, port::bindings},
    datapath::Pins,
    error::Error,
    netlink::Netlink,
    netns::Netns,
    step::{address, bandwidth, endpoint, lease, link, port, program, route},
};

/// Verifies the attachment.
pub(crate) fn check(request: &Request) -> Result<(), Error> {
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
        address::verify(&pod, &here, &there, ips, &mut wrong)?;
        route::verify_pod(&pod, &there, &remembered.routes, &mut wrong)?;
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
                let uplinks = program::uplinks(&node, &maps, conf.uplinks.as_deref())?;
                program::verify(&node, &maps, &here, &uplinks, &mut wrong)?;
            }
        }
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(Error::Broken(wrong))
    }
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

//! CHECK: compares what the runtime remembers with what is there, and says everything that differs.

use std::path::Path;

use tracing::warn;
use underpass_abi::endpoint::device;
use underpass_cni::{CniResult, Error as CniError, Interface as Remembered, IpConfig, Request};
use underpass_dataplane::{Maps, Pins};
use underpass_netlink::{Netlink, Netns};

use super::{chained, identity, is_later, no_result};
use crate::{
    conf::{AttachmentConf, Conf, MacCheck, chained::Name, port::bindings},
    error::Error,
    finding::{Finding, Findings},
    step::{Ends, INTERFACE, Inspection, Loaded, lease, link, xdp},
    uplink::Uplinks,
};

/// Verifies the attachment.
pub(super) fn check(request: &Request) -> Result<(), Error> {
    if is_chained(request)? {
        return chained::check(request, Name::Underpass);
    }
    let AttachmentConf { network, ports, .. } = AttachmentConf::of(request)?;
    let identity = identity(request);
    let owner = identity.owner();
    let remembered = request
        .conf
        .prev_result()?
        .ok_or_else(|| no_result("underpass: Required prevResult missing"))?;
    let path = request.attachment.netns.clone().unwrap_or_default();
    let container = Container::find(&remembered, &identity.ifname, &path)?;
    let netns = Netns::open(&path)?.ok_or(Error::NoNetns(path))?;
    let node = Netlink::open()?;
    let pod = netns.run(Netlink::open)??;

    let mut findings = Findings::default();
    let unsure = lease::verify(request, &mut findings).err();
    let (ifname, mac) = (&identity.ifname, container.mac);
    let Some((host_end, container_end)) =
        link::find(&node, &pod, owner, ifname, mac, &mut findings)?
    else {
        return findings.into_result_with(unsure);
    };
    let addresses: Vec<_> = container.ips.iter().map(|ip| ip.address.addr()).collect();
    let mut loaded = None;
    match Maps::open_existing(&Pins::at(&network.bpf_root))? {
        None => findings.push(Finding::NotLoaded(network.bpf_root.clone())),
        Some(maps) => {
            let uplinks = Uplinks::find(&node, &maps, network.uplinks.as_deref())?;
            if let Some(finding) = uplinks.do_not_masquerade(network.masquerade) {
                warn!("{finding}");
            }
            loaded = Some(Loaded { maps, uplinks });
        }
    }
    let mac_check = mac_check(loaded.as_ref(), host_end.index, network.mac_check)?;
    let inspection = Inspection {
        node: &node,
        owner,
        host: host_end,
        ports: bindings(&ports, &addresses),
        loaded,
        found: Ends {
            container: container_end,
            netns: &netns,
            pod: &pod,
            ips: container.ips,
            routes: &remembered.routes,
            mac_check,
            dad: network.dad,
            conntrack: network.conntrack,
            limits: network.bandwidth,
            xdp: xdp::usable(network.xdp),
        },
    };
    inspection.verify(INTERFACE, &mut findings)?;
    findings.into_result_with(unsure)
}

/// Tells whether the container's MAC is fixed: as its ADD was told, which the programs know. What its network asks for may have changed since.
fn mac_check(loaded: Option<&Loaded<'_>>, host: u32, asked: MacCheck) -> Result<MacCheck, Error> {
    let known = loaded.map(|loaded| loaded.maps.device(host)).transpose()?;
    Ok(match known.flatten() {
        Some(known) if known.flags & device::CHECK_MAC != 0 => MacCheck::On,
        Some(_) => MacCheck::Off,
        None => asked,
    })
}

/// Tells whether another plugin of the chain made the interface, maybe ours too. Then no IPAM has to give
/// addresses here, and either the result names no veth of ours, or the maps know the host ports or a container that has addresses.
fn is_chained(request: &Request) -> Result<bool, Error> {
    let Some(remembered) = request.conf.prev_result()? else {
        return Ok(false);
    };
    if request.conf.ipam_type()?.is_some() {
        return Ok(false);
    }
    let identity = identity(request);
    let ours = identity.host_name();
    let is_ours = |interface: &Remembered| interface.name == ours && interface.sandbox.is_empty();
    if !remembered.interfaces.iter().any(is_ours) {
        return Ok(true);
    }
    match Maps::open_existing(&Pins::at(&Conf::bpf_root(&request.conf)?))? {
        Some(maps) => {
            Ok(maps.attachment(identity.chained_owner())?.is_some() || is_later(request, &maps)?)
        }
        None => Ok(false),
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
                    .with_details("hand CHECK the result of the ADD, and the CNI_IFNAME of it")
            })?;
        let interface = &remembered.interfaces[position];
        if Path::new(&interface.sandbox) != netns {
            return Err(CniError::config(format!(
                "Sandbox in prevResult {} doesn't match configured netns: {}",
                interface.sandbox,
                netns.display()
            ))
            .with_details("hand CHECK the CNI_NETNS of the ADD, and the result of that one")
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

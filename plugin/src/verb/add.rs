//! ADD: the whole of it, in order. Every step leaves its undoing behind, and a failure runs them
//! all.

use std::net::IpAddr;

use ipnet::IpNet;
use underpass_cni::{CniResult, Error as CniError, Request};
use underpass_dataplane::{Maps, object};
use underpass_netlink::{Netlink, Netns, link::By};

use super::{chained, identity};
use crate::{
    conf::{Conf, chained::Name, masquerade::KEY},
    error::Error,
    plan::Plan,
    step::{
        Undo, address, bandwidth, endpoint, lease, link,
        port::{self, Claims},
        program::{self, Outward},
        route, sysctl, xdp,
    },
    stopwatch::Stopwatch,
    uplink,
};

/// Attaches the container, or changes nothing. In a chain, behind another plugin, it serves its host
/// ports.
pub(crate) fn add(request: &Request) -> Result<CniResult, Error> {
    match request.conf.prev_result()? {
        Some(previous) => chained::add(request, previous, Name::Underpass),
        None => attach(request),
    }
}

fn attach(request: &Request) -> Result<CniResult, Error> {
    let mut time = Stopwatch::start();
    let conf = Conf::of_attachment(request)?;
    let identity = identity(request);
    let driver = link::driver(conf.device)?;
    let xdp = xdp::usable(conf.xdp);
    let path = request.attachment.netns.clone().unwrap_or_default();
    let netns = Netns::open(&path)?.ok_or_else(|| Error::NoNetns(path.clone()))?;
    time.lap("config");

    let pins = object::open_or_load(&conf.bpf_root)?;
    let mut maps = Maps::open(&pins)?;
    time.lap("pins");
    if maps.attachment(identity.owner())?.is_some() {
        return Err(Error::Attached {
            network: identity.network,
            container: identity.container,
            ifname: identity.ifname,
        });
    }
    let node = Netlink::open()?;
    let pod = netns.run(Netlink::open)??;
    if pod.link(By::Name(&identity.ifname))?.is_some() {
        return Err(Error::NameTaken {
            host: identity.host_name(),
            pod: identity.ifname,
        });
    }
    time.lap("netlink sockets");
    require_local(&node, &conf.masquerade_addresses)?;
    let Outward { uplinks, services } = program::outward(&node, &maps, conf.uplinks.as_deref())?;
    time.lap("uplinks");

    let mut undo = Undo::default();
    let given = lease::apply(request, &mut undo)?;
    time.lap("lease");
    let sandbox = path.to_string_lossy();
    let mtu = uplink::inherited_mtu(&uplinks);
    let plan = Plan::new(identity, &conf, given, driver, mtu, &sandbox)?;

    let pair = link::apply(&node, &netns, &plan, &mut undo)?;
    time.lap("link");
    sysctl::apply_pod(&netns, &plan)?;
    address::apply(&pod, &plan, &pair)?;
    route::apply_pod(&pod, &plan, &pair)?;
    bandwidth::apply(&node, &pod, &plan, &pair)?;
    xdp::apply_pod(&netns, &maps, &plan, &pair, xdp)?;
    time.lap("container side");
    sysctl::apply_host(&plan, &uplinks)?;
    time.lap("sysctls");
    endpoint::apply(&node, &mut maps, &plan, &pair, &mut undo)?;
    let claims = Claims {
        owner: plan.identity.owner(),
        ifindex: pair.host.index,
        bindings: &plan.ports,
    };
    port::apply(&node, &mut maps, claims, &services, &mut undo)?;
    time.lap("maps");
    program::apply(&node, &pins, &plan, &pair)?;
    time.lap("filters");
    // Before the first packet: one that left by an uplink without programs would show the
    // container's address.
    program::finish(&node, &mut maps, conf.uplinks.as_deref(), &uplinks)?;
    xdp::apply_uplinks(&node, &pins, &uplinks, xdp)?;
    time.lap("uplink programs");
    link::open(&node, &pod, &plan, &pair, &mut undo)?;
    route::apply_host(&node, &plan, &pair)?;
    time.lap("host side");
    address::settle(&pod, &pair.pod, plan.addresses.iter().map(IpNet::addr))?;
    address::settle(&node, &pair.host, plan.gateways.iter().copied())?;
    time.lap("delivery");

    undo.keep();
    time.keep(&conf.bpf_root);
    Ok(plan.result)
}

/// Answers to an address that the node does not have would never arrive.
fn require_local(node: &Netlink, asked: &[IpAddr]) -> Result<(), Error> {
    if asked.is_empty() {
        return Ok(());
    }
    let present = node.addresses()?;
    for address in asked {
        if !present.iter().any(|other| other.net.addr() == *address) {
            return Err(CniError::config(format!(
                "invalid {KEY} {address}: it is no address of this node; give it to a device (`lo` will do), or remove {KEY}"
            ))
            .into());
        }
    }
    Ok(())
}

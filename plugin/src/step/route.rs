//! Routes: the container's own, and on the host one to each of its addresses.

use underpass_abi::endpoint::device;
use underpass_cni::{IpConfig, Route as CniRoute};
use underpass_netlink::{
    Mode, Netlink,
    addr::Scope,
    link::Link,
    route::{Installed, MAIN, Route, SCOPE_LINK},
};

use super::{address::link_local, link::Pair};
use crate::{conf::MacCheck, error::Error, plan::Plan};

/// Every table, in a question.
const ANY_TABLE: u32 = 0;

/// The container's routes; its end is up. They go with the link.
pub(crate) fn apply_pod(pod: &Netlink, plan: &Plan, pair: &Pair) -> Result<(), Error> {
    for route in &plan.routes {
        // The same destination by another gateway is a second next hop; exactly the same route
        // twice is one.
        match pod.add_route(&pair.pod, route, Mode::Append) {
            Err(error) if error.is_present() => {}
            answer => answer?,
        }
    }
    Ok(())
}

/// The host's side, its end up: the gateways' addresses, and each address of the container as a
/// neighbour and a route. All go with the link.
///
/// Where the container may change its MAC (`macspoofchk` is off), the neighbour is left to ARP and
/// neighbour discovery.
pub(crate) fn apply_host(node: &Netlink, plan: &Plan, pair: &Pair) -> Result<(), Error> {
    for gateway in &plan.gateways {
        let scope = if is_link_local(*gateway) {
            Scope::Link
        } else {
            Scope::Global
        };
        node.add_address(&pair.host, (*gateway).into(), scope)?;
    }
    if plan.has_v6() {
        node.add_address(&pair.host, link_local(plan.host.mac), Scope::Link)?;
    }
    for net in &plan.addresses {
        let addr = net.addr();
        if plan.flags & device::CHECK_MAC != 0 {
            node.add_neighbour(&pair.host, addr, plan.pod.mac)?;
        }
        let route = Route {
            scope: SCOPE_LINK,
            ..Route::new(addr.into())
        };
        node.add_route(&pair.host, &route, Mode::Replace)?;
    }
    Ok(())
}

/// The container's routes that the runtime remembers, in whichever table a later plugin moved them
/// to.
pub(crate) fn verify_pod(
    pod: &Netlink,
    there: &Link,
    ips: &[&IpConfig],
    routes: &[CniRoute],
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    let installed = pod.routes_by(ANY_TABLE, there.index)?;
    for gateway in ips.iter().filter_map(|ip| ip.gateway) {
        let is_on_link =
            |one: &Installed| one.route.gateway.is_none() && one.route.dst.contains(&gateway);
        if !installed.iter().any(is_on_link) {
            wrong.push(format!(
                "the container does not find its gateway {gateway} on {}: the route is gone",
                there.name
            ));
        }
    }
    for route in routes {
        let found = installed.iter().any(|one| {
            one.index == there.index
                && one.route.dst == route.dst.trunc()
                && (route.gw.is_none() || one.route.gateway == route.gw)
        });
        if !found {
            wrong.push(format!(
                "the container has no route to {} by {}",
                route.dst, there.name
            ));
        }
    }
    Ok(())
}

/// The host's routes, and its neighbours where the container's MAC is fixed.
pub(crate) fn verify_host(
    node: &Netlink,
    here: &Link,
    there: &Link,
    mac_check: MacCheck,
    ips: &[&IpConfig],
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    let installed = node.routes_by(MAIN, here.index)?;
    let neighbours = node.neighbours(here.index)?;
    for ip in ips {
        let addr = ip.address.addr();
        let dst = addr.into();
        if !installed
            .iter()
            .any(|one| one.index == here.index && one.route.dst == dst)
        {
            wrong.push(format!("the host has no route to {addr} by {}", here.name));
        }
        let knows = neighbours
            .iter()
            .any(|neighbour| neighbour.addr == addr && neighbour.mac == there.mac);
        if mac_check == MacCheck::On && !knows {
            wrong.push(format!(
                "the host has no permanent neighbour {addr} at {} on {}",
                there.mac, here.name
            ));
        }
    }
    Ok(())
}

fn is_link_local(addr: std::net::IpAddr) -> bool {
    match addr {
        std::net::IpAddr::V4(v4) => v4.is_link_local(),
        std::net::IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

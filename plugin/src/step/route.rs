//! Routes: the container's own, and on the host one to each of its addresses.

use std::net::IpAddr;

use underpass_abi::endpoint::device;
use underpass_netlink::{
    Mode, Netlink,
    addr::Scope,
    link::{By, Device},
    neigh::Role,
    route::{Installed, MAIN, Route, SCOPE_LINK},
};

use self::remembered::Remembered;
use super::{Attachment, Inspection, Interface, Step, address::link_local};
use crate::{
    conf::MacCheck,
    error::Error,
    finding::{Finding, Findings},
    plan::metric,
};

mod remembered;

/// Every table, in a question.
const ANY_TABLE: u32 = 0;

/// Gives the container its routes; its end is up. They go with the pair.
pub(crate) struct ContainerRoutes;

impl Step<Interface> for ContainerRoutes {
    fn name(&self) -> &'static str {
        "container routes"
    }

    fn apply(&self, attachment: &mut Attachment<'_, Interface>) -> Result<(), Error> {
        let Interface {
            plan,
            container,
            pod,
            ..
        } = &attachment.made;
        let others = others(pod, container, &plan.routes)?;
        for route in &plan.routes {
            let route = &behind(&others, route);
            // The same destination by another gateway is a second next hop; exactly the same route
            // twice is one.
            match pod.add_route(container, route, Mode::Append) {
                Err(error) if error.is_present() => {}
                answer => answer?,
            }
        }
        Ok(())
    }

    /// Looks for the container's routes that the runtime remembers.
    fn verify(
        &self,
        inspection: &Inspection<'_, Interface>,
        findings: &mut Findings,
    ) -> Result<(), Error> {
        let ends = &inspection.found;
        let container = &ends.container;
        let installed = ends.pod.routes_by(ANY_TABLE, container.index)?;
        let gateways: Vec<_> = ends.ips.iter().filter_map(|ip| ip.gateway).collect();
        for gateway in &gateways {
            let is_on_link =
                |one: &Installed| one.route.gateway.is_none() && one.route.dst.contains(gateway);
            if !installed.iter().any(is_on_link) {
                findings.push(Finding::NoRouteToGateway {
                    gateway: *gateway,
                    container: container.name.clone(),
                });
            }
        }
        let mut left: Vec<_> = installed
            .iter()
            .filter(|one| one.index == container.index)
            .map(|one| &one.route)
            .collect();
        for remembered in Remembered::all(ends.routes, &gateways) {
            remembered.verify(&mut left, container, findings);
        }
        Ok(())
    }
}

/// Lists the default routes that the container has by other interfaces, if one of these is a default route.
fn others(pod: &Netlink, container: &Device, routes: &[Route]) -> Result<Vec<Route>, Error> {
    if !routes.iter().any(is_default) {
        return Ok(Vec::new());
    }
    let installed = pod.default_routes()?;
    Ok(installed
        .into_iter()
        .filter(|one| one.index != container.index)
        .map(|one| one.route)
        .collect())
}

/// Whether it is a default route whose metric nobody has asked for.
fn is_default(route: &Route) -> bool {
    route.dst.prefix_len() == 0 && route.table == MAIN && route.priority.is_none()
}

/// Puts a default route behind those of other interfaces. Between two of one metric IPv4 changes with each look-up, as both gateways are permanent
/// neighbours (`fib_select_default` of `net/ipv4/fib_semantics.c` prefers one that was just heard of), and IPv6 with each flow.
fn behind(others: &[Route], route: &Route) -> Route {
    let metrics = others
        .iter()
        .filter(|other| is_default(route) && other.dst == route.dst)
        .map(metric);
    let last = metrics.max().filter(|last| *last >= metric(route));
    Route {
        priority: last.map_or(route.priority, |last| Some(last.saturating_add(1))),
        ..route.clone()
    }
}

/// Adds the route to an address of the container. Anybody else's stays, and goes first or not by its metric: one that goes first keeps the container
/// from being reached, which is refused.
fn lead(node: &Netlink, host: &Device, route: &Route, address: IpAddr) -> Result<(), Error> {
    let by = match node.add_route(host, route, Mode::Create) {
        Err(error) if error.is_present() => node.device_towards(address)?,
        answer => {
            answer?;
            // The kernel refuses a second route of the same metric alone.
            match node.device_led_to(address)? {
                Some(by) if by != host.index => Some(by),
                None if node.is_stopped(address)? => None,
                _ => return Ok(()),
            }
        }
    };
    let device = by.map(|by| node.link(By::Index(by))).transpose()?.flatten();
    Err(Error::RouteTaken {
        address,
        device: device.map(|device| device.name),
    })
}

/// Gives the host its side, its end up: the gateways' addresses, and each address of the container as a
/// neighbour and a route. All go with the pair.
///
/// Where the container may change its MAC (`macspoofchk` is off), the neighbour is left to ARP and
/// neighbour discovery.
pub(crate) struct HostRoutes;

impl Step<Interface> for HostRoutes {
    fn name(&self) -> &'static str {
        "host routes"
    }

    fn apply(&self, attachment: &mut Attachment<'_, Interface>) -> Result<(), Error> {
        let (node, host) = (attachment.node, &attachment.host);
        let plan = &attachment.made.plan;
        for gateway in &plan.gateways {
            let scope = if is_link_local(*gateway) {
                Scope::Link
            } else {
                Scope::Global
            };
            node.add_address(host, (*gateway).into(), scope)?;
        }
        if plan.has_v6() {
            node.add_address(host, link_local(plan.host.mac), Scope::Link)?;
        }
        for net in &plan.addresses {
            let addr = net.addr();
            if plan.flags & device::CHECK_MAC != 0 {
                node.add_neighbour(host, Role::Host, addr, plan.container.mac)?;
            }
            let route = Route {
                scope: SCOPE_LINK,
                ..Route::new(addr.into())
            };
            lead(node, host, &route, addr)?;
        }
        Ok(())
    }

    /// Looks for the host's routes, and for its neighbours where the container's MAC is fixed.
    fn verify(
        &self,
        inspection: &Inspection<'_, Interface>,
        findings: &mut Findings,
    ) -> Result<(), Error> {
        let (node, host, ends) = (inspection.node, &inspection.host, &inspection.found);
        let installed = node.routes_by(MAIN, host.index)?;
        let neighbours = node.neighbours(host.index)?;
        for net in ends.addresses() {
            let address = net.addr();
            let dst = address.into();
            if !installed
                .iter()
                .any(|one| one.index == host.index && one.route.dst == dst)
            {
                findings.push(Finding::NoHostRoute {
                    address,
                    host: host.name.clone(),
                });
            }
            let mac = ends.container.mac;
            let knows = neighbours
                .iter()
                .any(|neighbour| neighbour.addr == address && neighbour.mac == mac);
            if ends.mac_check == MacCheck::On && !knows {
                findings.push(Finding::NoNeighbour {
                    address,
                    mac,
                    host: host.name.clone(),
                });
            }
        }
        Ok(())
    }
}

fn is_link_local(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

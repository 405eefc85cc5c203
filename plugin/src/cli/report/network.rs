//! The devices of the node, their addresses and their routes, as netlink tells them.

use serde::Serialize;
use underpass_netlink::{
    Netlink,
    addr::Address,
    link::Link,
    route::{Installed, MAIN},
};

use super::super::Failure;

/// A device, with what it has.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Device {
    name: String,
    ifindex: u32,
    kind: Option<String>,
    alias: Option<String>,
    mac: String,
    mtu: u32,
    up: bool,
    operational: bool,
    /// The number of the bridge, bond or VRF that it belongs to.
    controller: Option<u32>,
    rp_filter: i32,
    /// How many XDP programs it has.
    xdp: usize,
    addresses: Vec<String>,
    routes: Vec<Route>,
}

#[derive(Serialize)]
struct Route {
    to: String,
    via: Option<String>,
    source: Option<String>,
    mtu: Option<u32>,
    metric: Option<u32>,
    advertised: bool,
}

/// Looks at the network namespace of the calling thread.
pub(super) fn collect() -> Result<Vec<Device>, Failure> {
    let node = Netlink::open()?;
    let addresses = node.addresses()?;
    let mut devices = Vec::new();
    for link in node.links()? {
        let routes = node.routes_by(MAIN, link.index)?;
        devices.push(device(link, &addresses, &routes));
    }
    Ok(devices)
}

fn device(link: Link, addresses: &[Address], routes: &[Installed]) -> Device {
    let index = link.index;
    let own = addresses.iter().filter(|address| address.index == index);
    // A route with several next hops is several, some of which may be by other devices.
    let by_it = routes.iter().filter(|route| route.index == index);
    Device {
        ifindex: index,
        kind: link.kind.map(|kind| kind.to_string()),
        mac: link.mac.to_string(),
        mtu: link.mtu,
        up: link.up,
        operational: link.operational,
        controller: link.controller,
        rp_filter: link.rp_filter,
        xdp: link.xdp.len(),
        addresses: own.map(|address| address.net.to_string()).collect(),
        routes: by_it.map(route).collect(),
        name: link.name,
        alias: link.alias,
    }
}

fn route(installed: &Installed) -> Route {
    let route = &installed.route;
    Route {
        to: route.dst.to_string(),
        via: route.gateway.map(|gateway| gateway.to_string()),
        source: route.source.map(|source| source.to_string()),
        mtu: route.mtu,
        metric: route.priority,
        advertised: installed.advertised,
    }
}

//! What an attachment will be, decided before anything is touched: config and lease in, names,
//! addresses, routes and map entries out. No input or output happens here.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::NonZeroU16,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use underpass_abi::endpoint::device;
use underpass_cni::{CniResult, Dns, Error, Interface, IpConfig, Route as CniRoute};
use underpass_netlink::{
    Mac,
    link::Driver,
    route::{MAIN, Route, SCOPE_LINK},
};

use crate::{
    conf::{
        AttachmentConf, Bypass, Conf, Conntrack, Dad, DefaultGateway, MacCheck, Masquerade,
        Spoofing,
        bandwidth::Bandwidth,
        port::{Binding, bindings, keep_out_of_tunnel},
    },
    identity::Identity,
    uplink::InheritedMtu,
};

mod check;

/// MTU where neither config nor uplinks say one, in bytes.
const MTU_DEFAULT: u32 = 1500;
/// Smallest MTU that IPv6 works with, in bytes: devices with less have none (`IPV6_MIN_MTU`).
pub const MTU_MIN_V6: u32 = 1280;
/// Metric of IPv6 routes that say none (`IP6_RT_PRIO_USER`).
const METRIC_V6: u32 = 1024;
/// Gateways where the IPAM names none: addresses that mean something on the veth only.
const GATEWAY_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(169, 254, 1, 1));
const GATEWAY_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1));

/// What the IPAM has leased to the container, and what goes with it.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct LeaseResult {
    /// Addresses of the container.
    pub ips: Vec<IpConfig>,
    /// Routes of the container.
    pub routes: Vec<CniRoute>,
    /// Name servers of the container.
    pub dns: Dns,
    /// Where the network's other containers may have addresses, as far as that is known.
    pub subnets: Vec<IpNet>,
}

/// One end of the pair.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct End {
    /// Its name.
    pub name: String,
    /// Its MAC.
    pub mac: Mac,
}

/// Everything about one attachment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Whose it is.
    pub identity: Identity,
    /// What the two ends are.
    pub driver: Driver,
    /// The host's end.
    pub host: End,
    /// The container's end.
    pub container: End,
    /// In bytes, of both ends.
    pub mtu: u32,
    /// The container's addresses, each with the length of its network's prefix.
    pub addresses: Vec<IpNet>,
    /// Next hops that the container's routes use: addresses of the host's end, as `ptp` has them.
    pub gateways: Vec<IpAddr>,
    /// The container's routes, in the order in which they can be added.
    pub routes: Vec<Route>,
    /// How the kernel treats addresses that the container adds later.
    pub dad: Dad,
    /// How the node's connection tracking takes TCP.
    pub conntrack: Conntrack,
    /// Bits of [`device`].
    pub flags: u32,
    /// Destinations that see the container's own address.
    pub no_masquerade: Vec<IpNet>,
    /// What the world shall see instead of the uplink's address, one of a family at most.
    pub masquerade_addresses: Vec<IpAddr>,
    /// How many half-open flows the container may have; the node decides where nothing is said.
    pub half_open_limit: Option<u32>,
    /// The UDP port of the tunnels between the nodes, which the container is kept out of.
    pub tunnel_port: Option<NonZeroU16>,
    /// Host ports that lead to the container.
    pub ports: Vec<Binding>,
    /// What each direction is limited to.
    pub bandwidth: Bandwidth,
    /// The answer to the runtime.
    pub result: CniResult,
}

impl Plan {
    /// Decides everything. `driver` is what the config asks for, on this kernel; `inherited` the MTU
    /// where the config has none, `sandbox` the netns as the runtime wrote it.
    pub fn new(
        identity: Identity,
        conf: &AttachmentConf,
        lease: LeaseResult,
        driver: Driver,
        inherited: Option<InheritedMtu<'_>>,
        sandbox: &str,
    ) -> Result<Self, Error> {
        let LeaseResult {
            mut ips,
            mut routes,
            dns,
            subnets,
        } = lease;
        check::lease(&ips, &routes)?;
        let has_v6 = ips.iter().any(|ip| ip.address.addr().is_ipv6());
        let network = &conf.network;
        let mtu = mtu(network, inherited, has_v6)?;
        let (host, container) = ends(&identity, conf);
        for ip in &mut ips {
            ip.interface = Some(1);
            ip.gateway
                .get_or_insert(fallback_gateway(ip.address.addr()));
        }
        if network.default_gateway == DefaultGateway::Add {
            add_default_routes(&ips, &mut routes);
        }
        let mut gateways: Vec<IpAddr> = Vec::new();
        for gateway in ips.iter().filter_map(|ip| ip.gateway) {
            if !gateways.contains(&gateway) {
                gateways.push(gateway);
            }
        }
        let addresses: Vec<_> = ips.iter().map(|ip| ip.address).collect();
        let interface = |end: &End, sandbox: &str| Interface {
            name: end.name.clone(),
            mac: end.mac.to_string(),
            mtu: Some(mtu),
            sandbox: sandbox.to_owned(),
            ..Interface::default()
        };
        Ok(Self {
            mtu,
            routes: container_routes(&ips, &gateways, &routes),
            dad: network.dad,
            conntrack: network.conntrack,
            flags: flags(network, driver),
            no_masquerade: no_masquerade(network, &addresses, subnets),
            masquerade_addresses: network.masquerade_addresses.clone(),
            half_open_limit: network.half_open_limit,
            tunnel_port: network.tunnel_port,
            ports: host_ports(conf, &addresses)?,
            bandwidth: network.bandwidth.unwrap_or_default(),
            gateways,
            addresses,
            result: CniResult {
                interfaces: vec![interface(&host, ""), interface(&container, sandbox)],
                ips,
                routes,
                dns: network.dns.clone().unwrap_or(dns),
            },
            driver,
            host,
            container,
            identity,
        })
    }

    /// Tells whether the container has an IPv4 address.
    #[must_use]
    pub fn has_v4(&self) -> bool {
        self.addresses.iter().any(|net| net.addr().is_ipv4())
    }

    /// Tells whether the container has an IPv6 address.
    #[must_use]
    pub fn has_v6(&self) -> bool {
        self.addresses.iter().any(|net| net.addr().is_ipv6())
    }
}

fn mtu(conf: &Conf, inherited: Option<InheritedMtu<'_>>, has_v6: bool) -> Result<u32, Error> {
    let needs = format!("an interface with IPv6 addresses needs at least {MTU_MIN_V6}");
    match (conf.mtu, inherited) {
        (Some(mtu), _) if has_v6 && mtu < MTU_MIN_V6 => Err(Error::config(format!(
            "invalid mtu {mtu}: {needs}; raise it, or leave IPv6 out of the network"
        ))),
        (Some(mtu), _) => Ok(mtu),
        (None, Some(InheritedMtu { mtu, uplink })) if has_v6 && mtu < MTU_MIN_V6 => {
            Err(Error::config(format!(
                "invalid mtu {mtu} of the uplink {uplink}, which containers inherit: {needs}; raise that of the uplink, set mtu, or leave IPv6 out of the network"
            )))
        }
        (None, inherited) => Ok(inherited.map_or(MTU_DEFAULT, |inherited| inherited.mtu)),
    }
}

fn ends(identity: &Identity, conf: &AttachmentConf) -> (End, End) {
    let host = End {
        name: identity.host_name(),
        mac: identity.host_mac(),
    };
    let container = End {
        name: identity.ifname.clone(),
        mac: conf.mac.unwrap_or_else(|| identity.container_mac()),
    };
    (host, container)
}

fn fallback_gateway(addr: IpAddr) -> IpAddr {
    match addr {
        IpAddr::V4(_) => GATEWAY_V4,
        IpAddr::V6(_) => GATEWAY_V6,
    }
}

fn same_family(a: IpAddr, b: IpAddr) -> bool {
    a.is_ipv4() == b.is_ipv4()
}

/// A default route for each family with an address, unless the IPAM gave one with a next hop.
fn add_default_routes(ips: &[IpConfig], routes: &mut Vec<CniRoute>) {
    let everything = [IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())];
    for dst in everything {
        let given = routes
            .iter()
            .any(|route| route.dst == dst && route.gw.is_some());
        let gateway = ips
            .iter()
            .filter_map(|ip| ip.gateway)
            .find(|gateway| same_family(*gateway, dst.addr()));
        if let (false, Some(gateway)) = (given, gateway) {
            routes.push(CniRoute::new(dst, Some(gateway)));
        }
    }
}

/// First the gateways, on the link; then each address's own network, through its gateway, unless the
/// IPAM asked for that with attributes of its own; then what the IPAM asked for.
fn container_routes(ips: &[IpConfig], gateways: &[IpAddr], asked: &[CniRoute]) -> Vec<Route> {
    let asked: Vec<Route> = asked
        .iter()
        .map(|route| asked_route(gateways, route))
        .collect();
    let mut routes: Vec<Route> = Vec::new();
    let mut push = |route: Route| {
        if !routes.iter().any(|other| is_same(other, &route)) {
            routes.push(route);
        }
    };
    for ip in ips {
        let Some(gateway) = ip.gateway else { continue };
        push(Route {
            source: Some(ip.address.addr()),
            scope: SCOPE_LINK,
            ..Route::new(gateway.into())
        });
    }
    for ip in ips {
        let network = ip.address.trunc();
        if network.prefix_len() < network.max_prefix_len() {
            let own = Route {
                gateway: ip.gateway,
                source: Some(ip.address.addr()),
                ..Route::new(network)
            };
            if !asked.iter().any(|other| is_same(other, &own)) {
                push(own);
            }
        }
    }
    asked.into_iter().for_each(push);
    routes
}

/// Tells whether the kernel would use one of the two and never the other.
pub(crate) fn is_same(one: &Route, other: &Route) -> bool {
    let key = |route: &Route| (route.dst, route.gateway, route.table, metric(route));
    key(one) == key(other)
}

/// Says which metric the kernel gives a route.
pub(crate) fn metric(route: &Route) -> u32 {
    let unsaid = match route.dst {
        IpNet::V4(_) => 0,
        IpNet::V6(_) => METRIC_V6,
    };
    route.priority.unwrap_or(unsaid)
}

/// Makes of a route as the IPAM asks for it, or as a result says it, what the kernel is given.
pub(crate) fn asked_route(gateways: &[IpAddr], route: &CniRoute) -> Route {
    // As in Go, zero is what was not said.
    let said = |value: Option<u32>| value.filter(|value| *value != 0);
    let gateway = route.gw.or_else(|| {
        gateways
            .iter()
            .copied()
            .find(|gateway| same_family(*gateway, route.dst.addr()))
    });
    // Without a next hop the destination is on the link.
    let scope = if gateway.is_none() && route.dst.addr().is_ipv4() {
        SCOPE_LINK
    } else {
        0
    };
    Route {
        dst: route.dst.trunc(),
        gateway,
        source: None,
        mtu: said(route.mtu),
        advmss: said(route.advmss),
        priority: said(route.priority),
        table: said(route.table).unwrap_or(MAIN),
        scope: route.scope.unwrap_or(scope),
    }
}

fn flags(conf: &Conf, driver: Driver) -> u32 {
    let mut flags = device::POD;
    if driver == Driver::Netkit {
        flags |= device::NETKIT;
    }
    if conf.spoofing == Spoofing::Dropped {
        flags |= device::ANTI_SPOOF;
    }
    if conf.mac_check == MacCheck::On {
        flags |= device::CHECK_MAC;
    }
    if conf.masquerade == Masquerade::On {
        flags |= device::MASQUERADE;
    }
    if conf
        .bandwidth
        .is_some_and(|limits| limits.ingress.is_some())
    {
        flags |= device::SHAPED;
    }
    flags
        | match conf.bypass {
            Bypass::Learned => device::BYPASS,
            Bypass::Off => 0,
        }
}

fn host_ports(conf: &AttachmentConf, addresses: &[IpNet]) -> Result<Vec<Binding>, Error> {
    if let Some(port) = conf.network.tunnel_port {
        keep_out_of_tunnel(&conf.ports, port)?;
    }
    let addresses: Vec<_> = addresses.iter().map(IpNet::addr).collect();
    Ok(bindings(&conf.ports, &addresses))
}

/// Multicast and link-local destinations are never masqueraded; else what the config says, else the
/// network's own: those of the container's addresses, and all `subnets` of the IPAM.
fn no_masquerade(conf: &Conf, addresses: &[IpNet], subnets: Vec<IpNet>) -> Vec<IpNet> {
    if conf.masquerade == Masquerade::Off {
        return Vec::new();
    }
    let own = addresses.iter().map(IpNet::trunc).chain(subnets);
    let nets = conf.non_masquerade.clone();
    never_masqueraded(nets.unwrap_or_else(|| own.collect()))
}

/// Adds multicast and link-local destinations to those that a network says.
pub(crate) fn never_masqueraded(mut nets: Vec<IpNet>) -> Vec<IpNet> {
    nets.extend([
        IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(224, 0, 0, 0), 4)),
        IpNet::V6(Ipv6Net::new_assert(
            Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0),
            8,
        )),
        IpNet::V6(Ipv6Net::new_assert(
            Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0),
            10,
        )),
    ]);
    nets.sort_unstable();
    nets.dedup();
    nets
}

#[cfg(test)]
mod tests;

//! Routes with all the attributes that the contract knows.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{
        RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric,
        RouteProtocol, RouteScope, RouteType,
    },
};

use super::{Error, Mode, Netlink, addr::family, link::Device};

mod default;
mod entry;
mod question;

pub use self::entry::{Entry, Fate, Hop, Mtu};
use self::question::Question;

/// Table that routes are in unless they say otherwise.
pub const MAIN: u32 = 254;
/// Offset of the length of the destination's prefix in an `rtmsg`.
const LENGTH_AT: usize = 1;
/// Scope of destinations on the link itself.
pub const SCOPE_LINK: u8 = 253;

/// Kinds of routes to a namespace itself.
const KEPT: [RouteType; 3] = [RouteType::Local, RouteType::Broadcast, RouteType::Anycast];

/// How many addresses share what leads a packet to somebody.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Led {
    /// The route is for this address alone.
    Alone,
    /// The namespace itself has a range around it.
    WithRange,
}

/// A unicast route, apart from the device to leave by.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Route {
    /// Destinations that it is for.
    pub dst: IpNet,
    /// Next hop; none where the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// Source address to prefer.
    pub source: Option<IpAddr>,
    /// Largest packet that may be sent by it, in bytes.
    pub mtu: Option<u32>,
    /// Largest segment that TCP offers to its other end, in bytes.
    pub advmss: Option<u32>,
    /// Metric: the route with the smallest one counts.
    pub priority: Option<u32>,
    /// The routing table that it is in.
    pub table: u32,
    /// How far the destination is, as `rtm_scope` of `linux/rtnetlink.h`.
    pub scope: u8,
}

/// A route as the kernel has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Installed {
    /// The route itself.
    pub route: Route,
    /// The device to leave by.
    pub index: u32,
    /// True if a router advertisement made it.
    pub advertised: bool,
}

impl Route {
    /// Makes a route of the main table without anything special.
    #[must_use]
    pub fn new(dst: IpNet) -> Self {
        Self {
            dst,
            gateway: None,
            source: None,
            mtu: None,
            advmss: None,
            priority: None,
            table: MAIN,
            scope: 0,
        }
    }

    fn message(&self, index: u32) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header = RouteHeader {
            address_family: family(self.dst.addr()),
            destination_prefix_length: self.dst.prefix_len(),
            // The attribute says which table; the header has room for small numbers only.
            table: u8::try_from(self.table).unwrap_or(RouteHeader::RT_TABLE_UNSPEC),
            protocol: RouteProtocol::Boot,
            scope: RouteScope::from(self.scope),
            kind: RouteType::Unicast,
            ..RouteHeader::default()
        };
        let attributes = &mut message.attributes;
        if self.dst.prefix_len() > 0 {
            attributes.push(RouteAttribute::Destination(self.dst.network().into()));
        }
        attributes.push(RouteAttribute::Oif(index));
        attributes.push(RouteAttribute::Table(self.table));
        if let Some(gateway) = self.gateway {
            // The gateway is a neighbour on the veth, whatever the other routes say.
            message.header.flags = RouteFlags::Onlink;
            attributes.push(RouteAttribute::Gateway(gateway.into()));
        }
        if let Some(source) = self.source {
            attributes.push(RouteAttribute::PrefSource(source.into()));
        }
        if let Some(priority) = self.priority {
            attributes.push(RouteAttribute::Priority(priority));
        }
        let metrics: Vec<_> = [
            self.mtu.map(RouteMetric::Mtu),
            self.advmss.map(RouteMetric::Advmss),
        ]
        .into_iter()
        .flatten()
        .collect();
        if !metrics.is_empty() {
            attributes.push(RouteAttribute::Metrics(metrics));
        }
        message
    }
}

impl Installed {
    /// Reads every next hop of a route that the kernel described.
    fn from_message(message: RouteMessage) -> Vec<Self> {
        let header = &message.header;
        if header.kind != RouteType::Unicast {
            return Vec::new();
        }
        let unspecified = match header.address_family {
            AddressFamily::Inet => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            AddressFamily::Inet6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            _ => return Vec::new(),
        };
        let mut dst = unspecified;
        let mut index = 0;
        let mut route = Route::new(IpNet::from(unspecified));
        route.table = header.table.into();
        route.scope = header.scope.into();
        let advertised = header.protocol == RouteProtocol::Ra;
        let mut hops = Vec::new();
        for attribute in message.attributes {
            match attribute {
                RouteAttribute::Destination(addr) => dst = ip(&addr).unwrap_or(unspecified),
                RouteAttribute::Gateway(addr) => route.gateway = ip(&addr),
                RouteAttribute::PrefSource(addr) => route.source = ip(&addr),
                RouteAttribute::Oif(oif) => index = oif,
                RouteAttribute::Priority(priority) => route.priority = Some(priority),
                RouteAttribute::Table(table) => route.table = table,
                RouteAttribute::Metrics(metrics) => {
                    for metric in metrics {
                        match metric {
                            RouteMetric::Mtu(mtu) => route.mtu = Some(mtu),
                            RouteMetric::Advmss(advmss) => route.advmss = Some(advmss),
                            _ => {}
                        }
                    }
                }
                RouteAttribute::MultiPath(all) => hops = all,
                _ => {}
            }
        }
        let Ok(dst) = IpNet::new(dst, header.destination_prefix_length) else {
            return Vec::new();
        };
        route.dst = dst;
        if hops.is_empty() {
            return vec![Self {
                route,
                index,
                advertised,
            }];
        }
        hops.into_iter()
            .map(|hop| {
                let gateway = hop.attributes.iter().find_map(|attribute| match attribute {
                    RouteAttribute::Gateway(addr) => ip(addr),
                    _ => None,
                });
                let route = Route {
                    gateway,
                    ..route.clone()
                };
                Self {
                    route,
                    index: hop.interface_index,
                    advertised,
                }
            })
            .collect()
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.dst)?;
        if let Some(gateway) = self.gateway {
            write!(f, " via {gateway}")?;
        }
        if self.table != MAIN {
            write!(f, " table {}", self.table)?;
        }
        Ok(())
    }
}

/// How to look a route up whose kind alone matters. For IPv6 the kernel otherwise compares the addresses of all devices, to say which source it would
/// choose: a millisecond with a thousand containers. (For IPv4 it does not, and only a packet's route says that of multicast and 255.255.255.255.)
fn kind_of_route(addr: IpAddr) -> RouteFlags {
    if addr.is_ipv6() {
        RouteFlags::FibMatch
    } else {
        RouteFlags::empty()
    }
}

fn ip(addr: &RouteAddress) -> Option<IpAddr> {
    match addr {
        RouteAddress::Inet(v4) => Some(IpAddr::V4(*v4)),
        RouteAddress::Inet6(v6) => Some(IpAddr::V6(*v6)),
        _ => None,
    }
}

impl Netlink {
    /// Adds a route.
    pub fn add_route(&self, device: &Device, route: &Route, mode: Mode) -> Result<(), Error> {
        self.change(
            &RouteNetlinkMessage::NewRoute(route.message(device.index)),
            mode,
            || format!("add the route {route} by {}", device.name),
        )
        .map_err(|error| {
            error.advise(
                &[libc::EINVAL, libc::ENETUNREACH, libc::EHOSTUNREACH],
                "the kernel takes no such route; look at its destination, next hop, scope and table",
            )
        })
    }

    /// Tells whether packets to this address, arriving by this device, are delivered locally.
    pub fn delivers(&self, device: &Device, addr: IpAddr) -> Result<bool, Error> {
        let out = RouteAttribute::Oif(device.index);
        // No route at all is an answer as well.
        let route = self.route_to(addr, kind_of_route(addr), Some(out))?;
        Ok(route.is_some_and(|route| route.header.kind == RouteType::Local))
    }

    /// Tells whether the address is one of this namespace's own, or one by which it and others are spoken to at once (a link's
    /// broadcast address, the anycast address of its routers): nobody else who has it hears what is sent there.
    pub fn keeps(&self, addr: IpAddr) -> Result<bool, Error> {
        let route = self.route_to(addr, kind_of_route(addr), None)?;
        Ok(route.is_some_and(|route| KEPT.contains(&route.header.kind)))
    }

    /// Tells whether what becomes of a packet for the address is settled by now: this namespace [keeps](Self::keeps) it, or a route is
    /// for this address alone, be it one that [stops](Self::is_stopped) the packet. Needs Linux 4.14 (`RTM_F_FIB_MATCH`).
    pub fn led(&self, addr: IpAddr) -> Result<Option<Led>, Error> {
        let header = match self.look_up(addr, RouteFlags::FibMatch, None) {
            Ok(Some(route)) => route.header,
            Ok(None) => return Ok(None),
            Err(error) => return Ok(self.stops(addr, error)?.then_some(Led::Alone)),
        };
        Ok(
            if header.destination_prefix_length == IpNet::from(addr).prefix_len() {
                Some(Led::Alone)
            } else {
                KEPT.contains(&header.kind).then_some(Led::WithRange)
            },
        )
    }

    /// Tells whether packets for the address are dropped or refused by a route of the main table for this address alone. Needs Linux 4.20
    /// (`NETLINK_GET_STRICT_CHK`).
    pub fn is_stopped(&self, addr: IpAddr) -> Result<bool, Error> {
        match self.look_up(addr, RouteFlags::FibMatch, None) {
            Ok(_) => Ok(false),
            Err(error) => self.stops(addr, error),
        }
    }

    /// Tells whether what the kernel said of the way to the address is said by a route for this address alone. It says the same of one that
    /// stops a range (as `underpass-agent` has one for the addresses that no pod has); so the routes of that kind are listed.
    fn stops(&self, addr: IpAddr, said: Error) -> Result<bool, Error> {
        let kind = match said.errno() {
            Some(libc::EINVAL) => RouteType::BlackHole,
            Some(libc::EHOSTUNREACH) => RouteType::Unreachable,
            Some(libc::EACCES) => RouteType::Prohibit,
            Some(_) => return Ok(false),
            None => return Err(said),
        };
        let alone = IpNet::from(addr);
        let question = Question {
            family: family(addr),
            kind,
            ..Question::of(MAIN)
        };
        let routes = self.dump_family(&question, |payload| {
            entry::destination(payload) == Some(alone)
        })?;
        Ok(!routes.is_empty())
    }

    /// Finds the device of the route that is for this address alone, if the kernel chooses such a one. Needs Linux 4.14 (`RTM_F_FIB_MATCH`).
    pub fn device_led_to(&self, addr: IpAddr) -> Result<Option<u32>, Error> {
        let route = self.route_to(addr, RouteFlags::FibMatch, None)?;
        let length = IpNet::from(addr).prefix_len();
        let route = route.filter(|route| route.header.destination_prefix_length == length);
        let hops = route.map(Installed::from_message);
        Ok(hops.and_then(|hops| Some(hops.first()?.index)))
    }

    /// Asks for the device by which the kernel sends a packet of its own to an address; `None` if it would
    /// not.
    pub fn device_towards(&self, addr: IpAddr) -> Result<Option<u32>, Error> {
        let route = self.route_to(addr, RouteFlags::empty(), None)?;
        let hops = route.map(Installed::from_message);
        Ok(hops.and_then(|hops| Some(hops.first()?.index)))
    }

    /// Asks for the route that the kernel chooses; `None` if it knows none.
    fn route_to(
        &self,
        addr: IpAddr,
        flags: RouteFlags,
        how: Option<RouteAttribute>,
    ) -> Result<Option<RouteMessage>, Error> {
        match self.look_up(addr, flags, how) {
            // No route at all, or one that says so.
            Err(error) if error.errno().is_some() => Ok(None),
            answer => answer,
        }
    }

    /// Asks for the route that the kernel chooses. Its error number says that it knows none, or what the route says.
    fn look_up(
        &self,
        addr: IpAddr,
        flags: RouteFlags,
        how: Option<RouteAttribute>,
    ) -> Result<Option<RouteMessage>, Error> {
        let mut message = RouteMessage::default();
        message.header.flags = flags;
        message.header.address_family = family(addr);
        message.header.destination_prefix_length = IpNet::from(addr).prefix_len();
        message.attributes = vec![RouteAttribute::Destination(addr.into())];
        message.attributes.extend(how);
        let answer = self.get(&RouteNetlinkMessage::GetRoute(message), || {
            format!("look up the route to {addr}")
        })?;
        Ok(match answer {
            Some(RouteNetlinkMessage::NewRoute(route)) => Some(route),
            _ => None,
        })
    }

    /// Lists the unicast routes of one table by one device; a route with several next hops is several, some
    /// of which may be by other devices.
    pub fn routes_by(&self, table: u32, index: u32) -> Result<Vec<Installed>, Error> {
        let messages = self.dump_routes(table, Some(index), RouteProtocol::Unspec, |_| true)?;
        let routes = messages.into_iter().flat_map(Installed::from_message);
        Ok(routes.collect())
    }

    /// Lists routes of both families. The kernel leaves out those of other tables, devices and protocols than are asked for.
    fn dump_routes(
        &self,
        table: u32,
        by: Option<u32>,
        protocol: RouteProtocol,
        mut wanted: impl FnMut(&[u8]) -> bool,
    ) -> Result<Vec<RouteMessage>, Error> {
        let mut routes = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let question = Question {
                family,
                by,
                protocol,
                ..Question::of(table)
            };
            routes.extend(self.dump_family(&question, &mut wanted)?);
        }
        Ok(routes)
    }

    /// Lists routes of one family. The kernel leaves out all others than are asked for.
    fn dump_family(
        &self,
        question: &Question,
        wanted: impl FnMut(&[u8]) -> bool,
    ) -> Result<Vec<RouteMessage>, Error> {
        let table = question.table;
        let message = RouteNetlinkMessage::GetRoute(question.message());
        let answers = match self.dump(&message, wanted, || {
            format!("list the routes of table {table}")
        }) {
            // Without that table, or without that device.
            Err(error) if error.is_absent() => return Ok(Vec::new()),
            answers => answers?,
        };
        let routes = answers.into_iter().filter_map(|answer| match answer {
            RouteNetlinkMessage::NewRoute(message) => Some(message),
            _ => None,
        });
        Ok(routes.collect())
    }
}

//! Routes of any kind with who made them, a few out of however many a table has.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_route::{
    AddressFamily,
    route::{RouteAttribute, RouteMessage, RouteMetric, RouteProtocol, RouteType},
};

use super::{LENGTH_AT, Netlink, ip};
use crate::{Error, socket::attribute};

/// Size of an `rtmsg`, behind which attributes begin.
const HEADER: usize = 12;
/// `RTA_DST` of `linux/rtnetlink.h`.
const DESTINATION: u16 = 1;
/// `RTA_METRICS` of the same.
const METRICS: u16 = 8;

/// A route to somewhere or nowhere.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Destinations that it is for.
    pub dst: IpNet,
    /// Number of who made it, as `rtm_protocol` of `linux/rtnetlink.h`.
    pub protocol: u8,
    /// Metric: the route with the smallest one counts. The kernel lists 1024 for an IPv6 route that was given none.
    pub metric: u32,
    /// How long packets may be, if it says so.
    pub mtu: Option<Mtu>,
    /// What becomes of packets.
    pub fate: Fate,
}

/// What a route says of the length of packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mtu {
    /// In bytes, with the headers of IP (`RTAX_MTU`).
    pub bytes: u32,
    /// Whether no router may say anything else (`RTAX_LOCK`).
    pub locked: bool,
}

/// What a route does with packets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fate {
    /// They leave by one of these.
    Sent(Vec<Hop>),
    /// They do not, for the reason that `ip route` has this word for.
    Stopped(&'static str),
}

/// A way to leave by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hop {
    /// Next hop; none where the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// The device.
    pub index: u32,
}

impl Entry {
    /// Nothing for what is delivered on the node itself, and for multicast.
    fn from_message(message: RouteMessage) -> Option<Self> {
        let stopped = match message.header.kind {
            RouteType::Unicast => None,
            RouteType::BlackHole => Some("blackhole"),
            RouteType::Unreachable => Some("unreachable"),
            RouteType::Prohibit => Some("prohibit"),
            RouteType::Throw => Some("throw"),
            _ => return None,
        };
        let mut dst = None;
        let mut metric = 0;
        let mut mtu = None;
        let mut only = Hop {
            gateway: None,
            index: 0,
        };
        let mut hops = Vec::new();
        for attribute in message.attributes {
            match attribute {
                RouteAttribute::Destination(addr) => dst = ip(&addr),
                RouteAttribute::Priority(priority) => metric = priority,
                RouteAttribute::Metrics(metrics) => mtu = Mtu::of(&metrics),
                RouteAttribute::Gateway(addr) => only.gateway = ip(&addr),
                RouteAttribute::Oif(oif) => only.index = oif,
                RouteAttribute::MultiPath(all) => {
                    hops.extend(all.into_iter().map(|hop| Hop {
                        gateway: hop.attributes.iter().find_map(|attribute| match attribute {
                            RouteAttribute::Gateway(addr) => ip(addr),
                            _ => None,
                        }),
                        index: hop.interface_index,
                    }));
                }
                _ => {}
            }
        }
        if hops.is_empty() {
            hops.push(only);
        }
        // A default route has none.
        let all = match message.header.address_family {
            AddressFamily::Inet => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            AddressFamily::Inet6 => IpAddr::from(Ipv6Addr::UNSPECIFIED),
            _ => return None,
        };
        let length = message.header.destination_prefix_length;
        Some(Self {
            dst: IpNet::new(dst.unwrap_or(all), length).ok()?,
            protocol: message.header.protocol.into(),
            metric,
            mtu,
            // IPv6 names the loopback device in routes without a way.
            fate: stopped.map_or(Fate::Sent(hops), Fate::Stopped),
        })
    }
}

impl Mtu {
    fn of(metrics: &[RouteMetric]) -> Option<Self> {
        /// Number of this metric, which is its bit in the lock (`RTAX_MTU` of `linux/rtnetlink.h`).
        const NUMBER: u32 = 2;
        let bytes = metrics.iter().find_map(|metric| match metric {
            RouteMetric::Mtu(bytes) => Some(*bytes),
            _ => None,
        })?;
        let locked = metrics
            .iter()
            .any(|metric| matches!(metric, RouteMetric::Lock(bits) if bits & 1 << NUMBER != 0));
        Some(Self { bytes, locked })
    }
}

impl Netlink {
    /// Lists the routes of one table that have this protocol number, default routes apart. The kernel leaves out all others.
    pub fn routes_of(&self, table: u32, protocol: u8) -> Result<Vec<Entry>, Error> {
        let wanted = |payload: &[u8]| destination(payload).is_some();
        self.entries(table, RouteProtocol::from(protocol), wanted)
    }

    /// Lists the routes of one table to what `wanted` takes, default routes apart. No others are decoded: there may be hundreds of
    /// thousands.
    pub fn routes_to(
        &self,
        table: u32,
        wanted: impl Fn(IpNet) -> bool,
    ) -> Result<Vec<Entry>, Error> {
        self.entries(table, RouteProtocol::Unspec, |payload| {
            destination(payload).is_some_and(&wanted)
        })
    }

    /// Lists the routes of one table that have metrics of their own, as an MTU, default routes too. No others are decoded.
    pub fn routes_with_metrics(&self, table: u32) -> Result<Vec<Entry>, Error> {
        self.entries(table, RouteProtocol::Unspec, |payload| {
            attribute(payload, HEADER, METRICS).is_some()
        })
    }

    fn entries(
        &self,
        table: u32,
        protocol: RouteProtocol,
        wanted: impl FnMut(&[u8]) -> bool,
    ) -> Result<Vec<Entry>, Error> {
        let messages = self.dump_routes(table, None, protocol, wanted)?.into_iter();
        Ok(messages.filter_map(Entry::from_message).collect())
    }
}

/// Reads the destination of what follows a message's header; a default route has none.
pub(super) fn destination(payload: &[u8]) -> Option<IpNet> {
    let bytes = attribute(payload, HEADER, DESTINATION)?;
    let addr = match AddressFamily::from(*payload.first()?) {
        AddressFamily::Inet => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        AddressFamily::Inet6 => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
        _ => return None,
    };
    IpNet::new(addr, *payload.get(LENGTH_AT)?).ok()
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::Emitable as _;
    use netlink_packet_route::route::RouteHeader;

    use super::{super::Route, *};

    fn bytes(net: &str) -> Vec<u8> {
        let message = Route::new(net.parse().expect("a prefix")).message(2);
        let mut bytes = vec![0; message.buffer_len()];
        message.emit(&mut bytes);
        bytes
    }

    #[test]
    fn a_destination_is_read_without_the_rest() {
        for net in ["10.244.2.0/25", "10.244.2.7/32", "fd00:244:2::/64"] {
            let read = destination(&bytes(net)).map(|net| net.to_string());
            assert_eq!(read.as_deref(), Some(net));
        }
        for net in ["0.0.0.0/0", "::/0"] {
            assert_eq!(destination(&bytes(net)), None);
        }
        let whole = bytes("10.244.2.0/25");
        for length in 0..HEADER + 8 {
            assert_eq!(destination(&whole[..length]), None, "{length}");
        }
    }

    #[test]
    fn a_route_without_a_way_has_no_device() {
        let net = "fd00:244:2::/64".parse().expect("a prefix");
        let mut message = Route::new(net).message(1);
        message.header = RouteHeader {
            protocol: RouteProtocol::Bird,
            kind: RouteType::BlackHole,
            ..message.header
        };
        message.attributes.push(RouteAttribute::Priority(1024));
        let expected = Entry {
            dst: net,
            protocol: 12,
            metric: 1024,
            mtu: None,
            fate: Fate::Stopped("blackhole"),
        };
        assert_eq!(Entry::from_message(message.clone()), Some(expected));
        message.header.kind = RouteType::Local;
        assert_eq!(Entry::from_message(message), None);
    }
}

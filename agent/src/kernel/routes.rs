//! The routes to ranges of pods.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::Context as _;
use ipnet::IpNet;
use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteType,
};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};

use super::{Concern, Kernel, Notes};
use crate::plan::{Desired, Way};

/// Our routes' `protocol`, a number that neither the kernel's header nor iproute2's `rt_protos` gives to anybody.
const PROTOCOL: u8 = 117;

/// Our routes' metric. Whoever has a route of his own to the same range, with a metric that the kernel gives by
/// default (0 for IPv4, 1024 for IPv6), goes first, and neither can replace the other's.
const METRIC: u32 = 2000;

/// A route, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    is_unreachable: bool,
    via: Option<IpAddr>,
    device: Option<u32>,
    on_link: bool,
    metric: u32,
}

impl Kernel {
    /// Makes our routes those that are desired. Those through VXLAN need the number of its `device`.
    pub(super) async fn keep_routes(
        &self,
        desired: &Desired,
        device: Option<u32>,
        notes: &mut Notes,
    ) {
        let mut existing: BTreeMap<IpNet, Vec<(Found, RouteMessage)>> = BTreeMap::new();
        match self.own_routes().await {
            Ok(routes) => {
                for (range, found, message) in routes {
                    existing.entry(range).or_default().push((found, message));
                }
            }
            Err(error) => return notes.errors.push(error),
        }
        // Gateways come before those who need them.
        let mut ways: Vec<_> = desired.routes.iter().collect();
        ways.sort_by_key(|(_, way)| **way != Way::Gateway);
        for (range, way) in ways {
            let concern = match way {
                Way::Own => Concern::Node,
                _ => Concern::Peer,
            };
            let there = existing.remove(range).unwrap_or_default();
            let Some(wanted) = found(way, device) else {
                // Whether there is a device could not be seen: what there is of routes stays.
                notes.unrouted += usize::from(*way != Way::Gateway);
                continue;
            };
            let mut is_there = false;
            for (found, message) in there {
                if found == wanted {
                    is_there = true;
                } else if found.metric != METRIC
                    && let Err(error) = self.handle.route().del(message).execute().await
                {
                    let error = anyhow::Error::new(error)
                        .context(format!("cannot delete an old route to {range}"));
                    notes.complain(concern, error);
                }
            }
            if is_there {
                continue;
            }
            // Nobody else has our metric: what is replaced is a route of ours.
            match self.replace(*range, wanted).await {
                Ok(()) => {
                    let change = format!("route to {range} {}", say(way));
                    notes.changes.push(change);
                }
                Err(error) => notes.complain(concern, error),
            }
        }
        for (range, routes) in existing {
            for (found, message) in routes {
                if desired.keeps_own && found.is_unreachable {
                    continue;
                }
                let outcome = self.handle.route().del(message).execute().await;
                let change = format!("no route to {range} any more");
                notes.note(Concern::Peer, outcome, change);
            }
        }
    }

    async fn replace(&self, range: IpNet, wanted: Found) -> anyhow::Result<()> {
        let mut route = RouteMessageBuilder::<IpAddr>::new()
            .destination_prefix(range.addr(), range.prefix_len())
            .map_err(anyhow::Error::msg)?
            .protocol(RouteProtocol::Other(PROTOCOL))
            .priority(METRIC)
            .table_id(RouteHeader::RT_TABLE_MAIN.into());
        if wanted.is_unreachable {
            route = route.kind(RouteType::Unreachable);
        }
        if let Some(via) = wanted.via {
            route = route.gateway(via).map_err(anyhow::Error::msg)?;
        }
        if let Some(device) = wanted.device {
            route = route.output_interface(device);
        }
        if wanted.on_link {
            route = route.onlink();
        }
        let request = self.handle.route().add(route.build()).replace();
        request
            .execute()
            .await
            .with_context(|| format!("cannot make the route to {range}: {wanted:?}"))
    }

    /// Lists what the main table has on links, each with the device.
    pub(super) async fn link_routes(&self) -> anyhow::Result<BTreeSet<(IpNet, u32)>> {
        let routes = self.routes(RouteProtocol::Unspec, |message| link_route(&message));
        Ok(routes.await?.into_iter().collect())
    }

    /// Lists the devices by which default routes of the main table lead.
    pub(super) async fn ways_out(&self) -> anyhow::Result<BTreeSet<u32>> {
        let routes = self.routes(RouteProtocol::Unspec, |message| {
            is_default(&message).then(|| devices(&message))
        });
        Ok(routes.await?.into_iter().flatten().collect())
    }

    /// Lists the routes of the main table that have our protocol number.
    async fn own_routes(&self) -> anyhow::Result<Vec<(IpNet, Found, RouteMessage)>> {
        self.routes(RouteProtocol::Other(PROTOCOL), |message| {
            let (range, found) = read(&message).filter(|_| is_own(&message))?;
            Some((range, found, message))
        })
        .await
    }

    /// Lists what `read` takes of the routes of both families, with this protocol number or, for `Unspec`, any.
    async fn routes<T>(
        &self,
        protocol: RouteProtocol,
        read: impl Fn(RouteMessage) -> Option<T>,
    ) -> anyhow::Result<Vec<T>> {
        let mut routes = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut request = RouteMessage::default();
            request.header.address_family = family;
            request.header.protocol = protocol;
            let found = self.dump(
                RouteNetlinkMessage::GetRoute(request),
                |message| match message {
                    RouteNetlinkMessage::NewRoute(message) => read(message),
                    _ => None,
                },
            );
            routes.extend(found.await.context("cannot list the routes")?);
        }
        Ok(routes)
    }
}

fn is_own(message: &RouteMessage) -> bool {
    is_main(message) && message.header.protocol == RouteProtocol::Other(PROTOCOL)
}

fn is_main(message: &RouteMessage) -> bool {
    message.header.table == RouteHeader::RT_TABLE_MAIN
}

/// Tells whether it is a default route of the main table.
fn is_default(message: &RouteMessage) -> bool {
    message.header.destination_prefix_length == 0
        && message.header.kind == RouteType::Unicast
        && is_main(message)
}

/// Lists the devices by which a route leads: with several next hops, there may be several.
fn devices(message: &RouteMessage) -> Vec<u32> {
    let attributes = message.attributes.iter();
    let devices = attributes.flat_map(|attribute| match attribute {
        RouteAttribute::Oif(device) => vec![*device],
        RouteAttribute::MultiPath(hops) => hops.iter().map(|hop| hop.interface_index).collect(),
        _ => Vec::new(),
    });
    devices.collect()
}

/// Reads a route of the main table to what is on a link, with the device.
fn link_route(message: &RouteMessage) -> Option<(IpNet, u32)> {
    let (range, found) = read(message)?;
    let is_of_a_link = message.header.kind == RouteType::Unicast && is_main(message);
    match (found.via, found.device) {
        (None, Some(device)) if is_of_a_link => Some((range, device)),
        _ => None,
    }
}

/// Tells whether it may change what should be, or what there is of it: a route of ours, one to a link, one to pods of
/// `ranges`, a default route. A daemon of routes has a hundred thousand others.
pub(super) fn matters(message: &RouteMessage, ranges: &BTreeSet<IpNet>) -> bool {
    let is_of_pods = || {
        let (net, _) = read(message)?;
        // They do not overlap: only the last one before can have it inside.
        let range = ranges.range(..=net).next_back()?;
        range.contains(&net).then_some(())
    };
    is_own(message)
        || is_default(message)
        || is_main(message) && (link_route(message).is_some() || is_of_pods().is_some())
}

/// What a way looks like in the kernel.
fn found(way: &Way, device: Option<u32>) -> Option<Found> {
    let route = Found {
        is_unreachable: false,
        via: None,
        device: None,
        on_link: false,
        metric: METRIC,
    };
    Some(match way {
        Way::Own => Found {
            is_unreachable: true,
            ..route
        },
        Way::Gateway => Found {
            device: Some(device?),
            ..route
        },
        Way::Direct { via, device } => Found {
            via: Some(*via),
            device: Some(*device),
            ..route
        },
        Way::Tunnel { via } => Found {
            via: Some(*via),
            device: Some(device?),
            on_link: true,
            ..route
        },
    })
}

fn say(way: &Way) -> String {
    match way {
        Way::Own => "of our own pods: unreachable where no pod is".to_owned(),
        Way::Gateway => "on the VXLAN device".to_owned(),
        Way::Direct { via, .. } => format!("by {via}"),
        Way::Tunnel { .. } => "through VXLAN".to_owned(),
    }
}

fn read(message: &RouteMessage) -> Option<(IpNet, Found)> {
    let mut found = Found {
        is_unreachable: message.header.kind == RouteType::Unreachable,
        via: None,
        device: None,
        on_link: message.header.flags.contains(RouteFlags::Onlink),
        metric: 0,
    };
    let mut destination = None;
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => destination = ip(address),
            RouteAttribute::Gateway(address) => found.via = ip(address),
            RouteAttribute::Oif(device) => found.device = Some(*device),
            RouteAttribute::Priority(metric) => found.metric = *metric,
            _ => {}
        }
    }
    // IPv6 names the loopback device in routes without a way.
    if found.is_unreachable {
        found.device = None;
    }
    let range = IpNet::new(destination?, message.header.destination_prefix_length).ok()?;
    Some((range, found))
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some((*address).into()),
        RouteAddress::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_route::route::RouteNextHop;

    use super::*;

    fn route(net: &str, via: Option<&str>, table: u8, protocol: u8) -> RouteMessage {
        let net: IpNet = net.parse().expect("a range");
        let mut builder = RouteMessageBuilder::<IpAddr>::new()
            .destination_prefix(net.addr(), net.prefix_len())
            .expect("a destination")
            .protocol(RouteProtocol::from(protocol))
            .table_id(table.into())
            .output_interface(2);
        if let Some(via) = via {
            let via = via.parse().expect("an address");
            builder = builder.gateway(via).expect("a gateway");
        }
        builder.build()
    }

    #[test]
    fn most_of_others_routes_do_not_matter() {
        let ranges = ["10.1.0.0/24", "10.2.0.0/24", "fd00:1::/64"];
        let ranges = ranges.map(|range| range.parse().expect("a range"));
        let ranges = BTreeSet::from(ranges);
        let (v4, v6) = (Some("192.0.2.1"), Some("2001:db8::1"));
        for (net, via, table, protocol, is_heard) in [
            // A daemon's.
            ("203.0.113.0/24", v4, 254, 12, false),
            ("10.0.0.0/8", v4, 254, 12, false),
            ("10.1.1.0/24", v4, 254, 12, false),
            ("fd00:2::/64", v6, 254, 12, false),
            ("2001:db8:1::/48", v6, 254, 12, false),
            // To pods, or a few of them.
            ("10.1.0.0/24", v4, 254, 12, true),
            ("10.2.0.7/32", v4, 254, 12, true),
            ("fd00:1::/64", v6, 254, 12, true),
            ("fd00:1::7/128", v6, 254, 12, true),
            ("10.1.0.0/24", v4, 100, 12, false),
            // Ours, wherever they lead.
            ("203.0.113.0/24", v4, 254, PROTOCOL, true),
            // A link's.
            ("192.0.2.0/24", None, 254, 2, true),
            ("2001:db8::/64", None, 254, 2, true),
            ("192.0.2.1/32", None, 255, 2, false),
            // To the world, by whomever.
            ("0.0.0.0/0", v4, 254, 12, true),
            ("::/0", v6, 254, 9, true),
            ("0.0.0.0/0", None, 254, 3, true),
            ("0.0.0.0/0", v4, 100, 12, false),
        ] {
            let message = route(net, via, table, protocol);
            assert_eq!(matters(&message, &ranges), is_heard, "{net} in {table}");
        }
    }

    #[test]
    fn a_default_route_leads_by_each_of_its_devices() {
        let v4 = route("0.0.0.0/0", Some("192.0.2.1"), 254, 3);
        assert!(is_default(&v4));
        assert_eq!(devices(&v4), [2]);
        let mut several = route("::/0", None, 254, 3);
        let hops = [5, 7].map(|device| {
            let mut hop = RouteNextHop::default();
            hop.interface_index = device;
            hop
        });
        several.attributes = vec![RouteAttribute::MultiPath(hops.to_vec())];
        assert!(is_default(&several));
        assert_eq!(devices(&several), [5, 7]);
        let mut refusal = route("::/0", None, 254, 3);
        refusal.header.kind = RouteType::Unreachable;
        for other in [
            refusal,
            route("0.0.0.0/1", Some("192.0.2.1"), 254, 3),
            route("::/0", Some("2001:db8::1"), 100, 3),
        ] {
            assert!(!is_default(&other), "{other:?}");
        }
    }
}

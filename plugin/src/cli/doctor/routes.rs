//! Whether routes of others go before those that the agent has made to the pods of other nodes.
//!
//! The agent leaves others' routes where they are, and has a metric of its own for that. So a daemon, or somebody's hand, may send
//! elsewhere what is for another node's pods, and nobody is told.

use std::collections::BTreeMap;

use ipnet::IpNet;
use underpass_abi::endpoint::{ALIAS_PREFIX, device};
use underpass_netlink::route::{Entry, Fate, MAIN};

use super::{Diagnosis, Node, Report, some};
use crate::error::Error;

/// The agent's routes have this protocol number: `PROTOCOL` of its `kernel/routes.rs`.
const AGENT: u8 = 117;
/// Routes that the kernel makes by itself, as for an address.
const KERNEL: u8 = 2;
/// What `ip route` gives to routes that are made by hand.
const BOOT: u8 = 3;
/// Those that an administrator wants to stay.
const STATIC: u8 = 4;

/// So many routes are named, and deleted by the fix.
const SHOWN: usize = 3;

pub(super) fn check(node: &Node<'_>, report: &mut Report) -> Result<(), Error> {
    let ours = to_others(node.netlink.routes_of(MAIN, AGENT)?);
    if ours.is_empty() {
        return Ok(());
    }
    let there = node
        .netlink
        .routes_to(MAIN, |net| around(&ours, net).is_some())?;
    let is_inward = |index: u32| {
        let mut devices = node.devices.iter();
        let is_known =
            devices.any(|(known, entry)| *known == index && entry.flags & device::POD != 0);
        is_known
            || node.links.get(&index).is_some_and(|link| {
                let alias = link.alias.as_deref().unwrap_or_default();
                link.loopback || alias.starts_with(ALIAS_PREFIX)
            })
    };
    let name = |index: u32| node.name(index).unwrap_or("?").to_owned();
    report.add(before_ours(&ours, &there, is_inward, name));
    Ok(())
}

/// Keeps the routes to the pods of other nodes: the node's own range has no way, and what is on the device of the tunnel itself is
/// a gateway. They do not overlap.
fn to_others(routes: Vec<Entry>) -> BTreeMap<IpNet, Entry> {
    let leads_on = |route: &Entry| match &route.fate {
        Fate::Sent(hops) => hops.iter().any(|hop| hop.gateway.is_some()),
        Fate::Stopped(_) => false,
    };
    let mut ours = BTreeMap::new();
    for route in routes.into_iter().filter(leads_on) {
        let first = ours.entry(route.dst).or_insert_with(|| route.clone());
        if route.metric < first.metric {
            *first = route;
        }
    }
    ours
}

/// Finds the one to this destination or to more. Only the last one before it can be that, as they do not overlap.
fn around(ours: &BTreeMap<IpNet, Entry>, net: IpNet) -> Option<&Entry> {
    let (range, route) = ours.range(..=net).next_back()?;
    range.contains(&net).then_some(route)
}

/// Says of each family and each maker which routes go before the agent's. Those by devices that lead inwards, to this node's own
/// pods and to itself, do no harm to other nodes' pods.
fn before_ours(
    ours: &BTreeMap<IpNet, Entry>,
    there: &[Entry],
    is_inward: impl Fn(u32) -> bool,
    name: impl Fn(u32) -> String,
) -> Vec<Diagnosis> {
    let leads_inward = |route: &Entry| match &route.fate {
        Fate::Sent(hops) => hops.iter().all(|hop| is_inward(hop.index)),
        Fate::Stopped(_) => false,
    };
    let mut makers: BTreeMap<(bool, u8), Vec<(&Entry, &Entry)>> = BTreeMap::new();
    for route in there {
        let Some(our) = around(ours, route.dst) else {
            continue;
        };
        let is_first = route.dst != our.dst || route.metric < our.metric;
        if route.protocol != AGENT && is_first && !leads_inward(route) {
            let maker = (route.dst.addr().is_ipv6(), route.protocol);
            makers.entry(maker).or_default().push((route, our));
        }
    }
    let makers = makers.into_iter();
    makers
        .map(|((is_ipv6, protocol), pairs)| describe(is_ipv6, protocol, &pairs, &name))
        .collect()
}

fn describe(
    is_ipv6: bool,
    protocol: u8,
    pairs: &[(&Entry, &Entry)],
    name: &impl Fn(u32) -> String,
) -> Diagnosis {
    let named: Vec<_> = pairs
        .iter()
        .map(|(route, our)| format!("{} before {}", say(route, name), say(our, name)))
        .collect();
    let maker = maker(protocol);
    let what = format!(
        "routes that {maker} has made go before the agent's: {}; what is for pods of other nodes takes them",
        some(named.iter().map(String::as_str))
    );
    let ip = if is_ipv6 { "ip -6" } else { "ip" };
    let list = format!("`{ip} route show proto {protocol}` lists all of that number");
    let delete: Vec<_> = pairs
        .iter()
        .take(SHOWN)
        .map(|(route, _)| delete(ip, route))
        .collect();
    let delete = delete.join(" && ");
    let fix = match protocol {
        KERNEL => format!(
            "{delete}; and take the address off the device by which it is made, or give the other node another range; {list}"
        ),
        BOOT | STATIC => format!(
            "{delete}; and look for what makes them at the next boot, if they are not wanted; {list}"
        ),
        _ => {
            format!("{delete}; or stop the daemon that makes them, else they come back; {list}")
        }
    };
    Diagnosis::warning("foreign-route", what, fix)
}

/// Names who has a number, as `ip route` does (`rt_protos`).
fn maker(protocol: u8) -> String {
    let name = match protocol {
        1 => "redirect",
        KERNEL => "kernel",
        BOOT => "boot",
        STATIC => "static",
        8 => "gated",
        9 => "ra",
        11 => "zebra",
        12 => "bird",
        15 => "ntk",
        16 => "dhcp",
        18 => "keepalived",
        42 => "babel",
        80 => "calico",
        186 => "bgp",
        187 => "isis",
        188 => "ospf",
        189 => "rip",
        192 => "eigrp",
        _ => return format!("protocol {protocol}"),
    };
    format!("protocol {protocol} ({name})")
}

/// Says a route as `ip route` does.
fn say(route: &Entry, name: impl Fn(u32) -> String) -> String {
    let mut text = match &route.fate {
        Fate::Stopped(why) => format!("{why} {}", route.dst),
        Fate::Sent(_) => route.dst.to_string(),
    };
    if let Fate::Sent(hops) = &route.fate {
        for hop in hops {
            if let Some(gateway) = hop.gateway {
                text = format!("{text} via {gateway}");
            }
            text = format!("{text} dev {}", name(hop.index));
        }
    }
    format!("{text} metric {}", route.metric)
}

/// The number of its maker tells it from ours, and the metric from others of his: without one `ip` takes the first.
fn delete(ip: &str, route: &Entry) -> String {
    let metric = match route.metric {
        0 => String::new(),
        metric => format!(" metric {metric}"),
    };
    format!(
        "{ip} route del {} proto {}{metric}",
        route.dst, route.protocol
    )
}

#[cfg(test)]
mod tests {
    use underpass_netlink::route::Hop;

    use super::*;

    const POD: u32 = 9;

    fn route(net: &str, via: Option<&str>, index: u32, protocol: u8, metric: u32) -> Entry {
        let gateway = via.map(|via| via.parse().expect("an address"));
        Entry {
            dst: net.parse().expect("a prefix"),
            protocol,
            metric,
            mtu: None,
            fate: Fate::Sent(vec![Hop { gateway, index }]),
        }
    }

    fn unreachable(net: &str, protocol: u8, metric: u32) -> Entry {
        Entry {
            fate: Fate::Stopped("unreachable"),
            ..route(net, None, 0, protocol, metric)
        }
    }

    /// What an agent makes: its own range, a neighbour, and one behind the tunnel.
    fn agents() -> Vec<Entry> {
        vec![
            unreachable("10.244.1.0/24", AGENT, 2000),
            unreachable("fd00:244:1::/64", AGENT, 2000),
            route("10.244.2.0/24", Some("192.0.2.2"), 2, AGENT, 2000),
            route("fd00:244:2::/64", Some("2001:db8::2"), 2, AGENT, 2000),
            route("10.244.3.0/24", Some("10.244.3.0"), 3, AGENT, 2000),
            route("fd00:244:3::/64", Some("fd00:244:3::"), 3, AGENT, 2000),
            route("fd00:244:3::/128", None, 3, AGENT, 2000),
        ]
    }

    fn found(more: &[Entry]) -> Vec<Diagnosis> {
        let there = [agents(), more.to_vec()].concat();
        let name = |index| format!("dev{index}");
        before_ours(&to_others(agents()), &there, |index| index == POD, name)
    }

    #[test]
    fn what_goes_before_the_agents_routes_is_found() {
        for (v4, v6) in [
            ("10.244.2.0/24", "fd00:244:2::/64"),
            ("10.244.2.128/25", "fd00:244:2::/96"),
            ("10.244.3.7/32", "fd00:244:3::7/128"),
            ("10.244.3.0/24", "fd00:244:3::/128"),
        ] {
            // IPv6 lists 1024 for a route that was given no metric.
            for route in [
                route(v4, Some("192.0.2.254"), 2, 12, 0),
                route(v6, Some("2001:db8::fe"), 2, 12, 1024),
                unreachable(v4, 12, 20),
                unreachable(v6, 12, 1024),
            ] {
                let found = found(std::slice::from_ref(&route));
                assert_eq!(found.len(), 1, "{route:?}");
                let net = route.dst.to_string();
                assert!(found[0].what.contains(&net), "{}", found[0].what);
                assert!(found[0].what.contains("12 (bird)"), "{}", found[0].what);
                assert!(found[0].fix.contains(&net), "{}", found[0].fix);
            }
        }
    }

    #[test]
    fn what_does_not_is_no_finding() {
        assert_eq!(found(&[]), []);
        for route in [
            // Behind ours.
            route("10.244.2.0/24", Some("192.0.2.254"), 2, 12, 3000),
            route("fd00:244:2::/64", Some("2001:db8::fe"), 2, 12, 3000),
            // To more than ours.
            route("10.244.0.0/16", Some("192.0.2.254"), 2, 12, 0),
            route("fd00:244::/48", Some("2001:db8::fe"), 2, 12, 1024),
            // To a link.
            route("192.0.2.0/24", None, 2, KERNEL, 0),
            route("2001:db8::/64", None, 2, KERNEL, 256),
            // To a pod of this node's, and one that was left in the range of another's.
            route("10.244.1.5/32", None, POD, BOOT, 0),
            route("10.244.2.5/32", None, POD, BOOT, 0),
            route("fd00:244:2::5/128", None, POD, BOOT, 1024),
            // In this node's own range, which leads to nobody else.
            route("10.244.1.0/25", Some("192.0.2.254"), 2, 12, 0),
        ] {
            assert_eq!(found(std::slice::from_ref(&route)), [], "{route:?}");
        }
    }

    #[test]
    fn one_maker_is_one_finding_of_each_family() {
        let v4 = |last| {
            let net = format!("10.244.2.{last}/32");
            route(&net, Some("192.0.2.254"), 2, 12, 0)
        };
        let v6 = route("fd00:244:2::7/128", Some("2001:db8::fe"), 2, 12, 1024);
        let mut routes: Vec<_> = (1..=5).map(v4).collect();
        routes.extend([v6, unreachable("10.244.3.0/24", 200, 0)]);
        let found = found(&routes);
        let texts: Vec<_> = found
            .iter()
            .map(|found| format!("{}\n{}", found.what, found.fix))
            .collect();
        insta::assert_snapshot!(texts.join("\n"), @r"
        routes that protocol 12 (bird) has made go before the agent's: 10.244.2.1/32 via 192.0.2.254 dev dev2 metric 0 before 10.244.2.0/24 via 192.0.2.2 dev dev2 metric 2000, 10.244.2.2/32 via 192.0.2.254 dev dev2 metric 0 before 10.244.2.0/24 via 192.0.2.2 dev dev2 metric 2000, 10.244.2.3/32 via 192.0.2.254 dev dev2 metric 0 before 10.244.2.0/24 via 192.0.2.2 dev dev2 metric 2000 and 2 more; what is for pods of other nodes takes them
        ip route del 10.244.2.1/32 proto 12 && ip route del 10.244.2.2/32 proto 12 && ip route del 10.244.2.3/32 proto 12; or stop the daemon that makes them, else they come back; `ip route show proto 12` lists all of that number
        routes that protocol 200 has made go before the agent's: unreachable 10.244.3.0/24 metric 0 before 10.244.3.0/24 via 10.244.3.0 dev dev3 metric 2000; what is for pods of other nodes takes them
        ip route del 10.244.3.0/24 proto 200; or stop the daemon that makes them, else they come back; `ip route show proto 200` lists all of that number
        routes that protocol 12 (bird) has made go before the agent's: fd00:244:2::7/128 via 2001:db8::fe dev dev2 metric 1024 before fd00:244:2::/64 via 2001:db8::2 dev dev2 metric 2000; what is for pods of other nodes takes them
        ip -6 route del fd00:244:2::7/128 proto 12 metric 1024; or stop the daemon that makes them, else they come back; `ip -6 route show proto 12` lists all of that number
        ");
    }

    /// A table may have hundreds of thousands.
    #[test]
    fn many_routes_are_looked_at_once_each() {
        let many = (0..=u16::MAX).map(|number| {
            let [high, low] = number.to_be_bytes();
            let net = format!("10.{high}.{low}.0/24");
            route(&net, Some("192.0.2.2"), 2, AGENT, 2000)
        });
        let ours = to_others(many.collect());
        let there: Vec<_> = ours
            .values()
            .map(|our| Entry {
                protocol: 12,
                metric: 0,
                ..our.clone()
            })
            .collect();
        let found = before_ours(&ours, &there, |_| false, |_| "eth0".to_owned());
        assert_eq!(found.len(), 1);
        assert!(
            found[0].what.contains("and 65533 more"),
            "{}",
            found[0].what
        );
        assert!(found[0].fix.len() < 1000, "{}", found[0].fix);
    }
}

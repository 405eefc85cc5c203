//! Whether routes are narrower than the bypass knows.
//!
//! The stack goes by the MTU of a route when it forwards (IPv4 since Linux 5.11, 02a1b175b0e9). `bpf_fib_lookup` tells the programs only one that
//! is locked (`ip_mtu_from_fib_result` of `net/ipv4/route.c`, `ip6_mtu_from_fib6` of `net/ipv6/route.c`) and, for IPv4, any where the node forwards by
//! path MTUs; the bypass sends packets that are longer.

use underpass_netlink::{
    route::{Entry, Fate, MAIN},
    sysctl::Tree,
};

use super::{Diagnosis, Node, Report, some};
use crate::error::Error;

/// Below `/proc/sys/net`.
const BY_PATH_MTU: &str = "ipv4/ip_forward_use_pmtu";

pub(super) fn check(node: &Node<'_>, report: &mut Report) -> Result<(), Error> {
    let routes = node.netlink.routes_with_metrics(MAIN)?;
    // What containers send is no longer than this, where there are some.
    let longest = node.pods().map(|pod| pod.mtu).max();
    let uplink = |index: u32| {
        let uplink = node.uplinks.iter().find(|uplink| uplink.index == index)?;
        Some((uplink.name.as_str(), uplink.device.mtu))
    };
    let by_path_mtu = Tree::of_this_thread().number(BY_PATH_MTU) != Some(0);
    let (v6, v4): (Vec<_>, Vec<_>) = routes
        .into_iter()
        .partition(|route| route.dst.addr().is_ipv6());
    let lock = |ip| {
        format!(
            "lock it where the route is made (`{ip} route change … mtu lock N`), or give the uplink or the network that \"mtu\""
        )
    };
    let warning = |what, fix| Diagnosis::warning("route-mtu", what, fix);
    if !by_path_mtu {
        let fix = format!(
            "sysctl -w net.ipv4.ip_forward_use_pmtu=1; or {}",
            lock("ip")
        );
        report.add(too_narrow(&v4, longest, uplink).map(|what| warning(what, fix)));
    }
    report.add(too_narrow(&v6, longest, uplink).map(|what| warning(what, lock("ip -6"))));
    Ok(())
}

/// Names the routes of a family that have less room than what is sent by them. `uplink` gives the name and the MTU of one.
fn too_narrow<'a>(
    routes: &[Entry],
    longest: Option<u32>,
    uplink: impl Fn(u32) -> Option<(&'a str, u32)>,
) -> Option<String> {
    let named: Vec<_> = routes
        .iter()
        .filter_map(|route| {
            let mtu = route.mtu.filter(|mtu| !mtu.locked)?.bytes;
            let Fate::Sent(hops) = &route.fate else {
                return None;
            };
            let is_narrower = |sent: u32| mtu < longest.map_or(sent, |longest| sent.min(longest));
            let (name, _) = hops
                .iter()
                .filter_map(|hop| uplink(hop.index))
                .find(|(_, sent)| is_narrower(*sent))?;
            Some(format!("{} dev {name} with {mtu} bytes", route.dst))
        })
        .collect();
    if named.is_empty() {
        return None;
    }
    Some(format!(
        "routes have an MTU that is not locked, which what takes the bypass does not go by: {}; where no router beyond says that its packets are too long, they are lost",
        some(named.iter().map(String::as_str))
    ))
}

#[cfg(test)]
mod tests {
    use underpass_netlink::route::{Hop, Mtu};

    use super::*;

    fn route(net: &str, index: u32, mtu: Option<(u32, bool)>) -> Entry {
        Entry {
            dst: net.parse().expect("a prefix"),
            protocol: 3,
            metric: 0,
            mtu: mtu.map(|(bytes, locked)| Mtu { bytes, locked }),
            fate: Fate::Sent(vec![Hop {
                gateway: None,
                index,
            }]),
        }
    }

    fn found(longest: Option<u32>, routes: &[Entry]) -> Option<String> {
        let uplink = |index| (index == 2).then_some(("eth0", 1500));
        too_narrow(routes, longest, uplink)
    }

    #[test]
    fn a_route_narrower_than_packets_is_found() {
        let narrow = [
            route("0.0.0.0/0", 2, Some((1400, false))),
            route("198.51.100.0/24", 2, Some((1300, false))),
            route("2001:db8:7::/64", 2, Some((1280, false))),
        ];
        for longest in [None, Some(1500), Some(9000), Some(1401)] {
            let what = found(longest, &narrow).expect("a finding");
            assert!(
                what.contains("0.0.0.0/0 dev eth0 with 1400 bytes"),
                "{what}"
            );
            assert!(what.contains("198.51.100.0/24"), "{what}");
        }
        let what = found(Some(1400), &narrow).expect("a finding");
        assert!(!what.contains("0.0.0.0/0"), "{what}");
    }

    #[test]
    fn others_are_no_finding() {
        for route in [
            route("0.0.0.0/0", 2, None),
            route("0.0.0.0/0", 2, Some((1400, true))),
            route("0.0.0.0/0", 2, Some((1500, false))),
            route("0.0.0.0/0", 3, Some((1400, false))),
            Entry {
                fate: Fate::Stopped("unreachable"),
                ..route("0.0.0.0/0", 2, Some((1400, false)))
            },
        ] {
            assert_eq!(found(None, std::slice::from_ref(&route)), None, "{route:?}");
        }
        assert_eq!(
            found(Some(1300), &[route("0.0.0.0/0", 2, Some((1400, false)))]),
            None
        );
    }
}

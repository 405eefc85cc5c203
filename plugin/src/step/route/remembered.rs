//! The routes of an ADD's result, and whether they are still there.
//!
//! Later plugins of the chain may have had their way with both. `sbr` moves the routes of the main table to others. Plugins of
//! before 1.1.0 know destinations and next hops only, and leave the rest out of the result that they pass on. So what the result does
//! not say may be anything.

use std::{cmp::Reverse, fmt, net::IpAddr};

use underpass_cni::Route as CniRoute;
use underpass_netlink::{
    link::Link,
    route::{MAIN, Route},
};

use crate::{
    finding::{Finding, Findings},
    plan::{asked_route, is_same, metric},
};

/// What the kernel makes of a larger `mtu` of a route, in bytes (`ip_metrics_convert`).
const MTU_MAX: u32 = 65_535 - 15;
/// The same of `advmss`.
const ADVMSS_MAX: u32 = 65_535 - 40;

/// A route that the runtime remembers.
pub(super) struct Remembered {
    /// As the ADD has installed it.
    route: Route,
    /// The next hop, if the result says it.
    gateway: Option<IpAddr>,
}

impl Remembered {
    /// Lists the routes that must be there. Those that say more come first, so that others do not take theirs.
    pub(super) fn all(routes: &[CniRoute], gateways: &[IpAddr]) -> Vec<Self> {
        let mut said: Vec<_> = routes
            .iter()
            .map(|route| Self {
                route: asked_route(gateways, route),
                gateway: route.gw,
            })
            .collect();
        said.sort_by_key(|one| Reverse(one.precision()));
        let mut all: Vec<Self> = Vec::new();
        for one in said {
            // Which an ADD installs once.
            if !all.iter().any(|other| is_same(&other.route, &one.route)) {
                all.push(one);
            }
        }
        all
    }

    fn precision(&self) -> usize {
        let Route {
            priority, table, ..
        } = self.route;
        [table != MAIN, priority.is_some(), self.gateway.is_some()]
            .into_iter()
            .filter(|says| *says)
            .count()
    }

    /// Says what is wrong with the route, and takes it out of the installed ones that are left: each answers for one.
    pub(super) fn verify(&self, left: &mut Vec<&Route>, container: &Link, findings: &mut Findings) {
        let candidates = left.iter().enumerate();
        let best = candidates
            .filter(|(_, installed)| self.is(installed))
            .max_by_key(|(_, installed)| self.likeness(installed))
            .map(|(at, _)| at);
        let Some(at) = best else {
            findings.push(Finding::NoRoute {
                route: self.to_string(),
                container: container.name.clone(),
            });
            return;
        };
        let installed = left.swap_remove(at);
        let Route { mtu, advmss, .. } = self.route;
        let mtu = mtu.map(|mtu| mtu.min(MTU_MAX));
        let advmss = advmss.map(|advmss| advmss.min(ADVMSS_MAX));
        // The kernel sets the `mtu` of an IPv6 route to that of the device when the latter changes.
        let follows = installed.dst.addr().is_ipv6() && installed.mtu == Some(container.mtu);
        let attributes = [
            ("mtu", installed.mtu, mtu.filter(|_| !follows)),
            ("advmss", installed.advmss, advmss),
        ];
        for (attribute, actual, wanted) in attributes {
            if let Some(wanted) = wanted.filter(|wanted| actual != Some(*wanted)) {
                findings.push(Finding::OtherRoute {
                    route: self.to_string(),
                    container: container.name.clone(),
                    attribute,
                    actual,
                    wanted,
                });
            }
        }
    }

    /// Tells whether an installed route may be this one.
    fn is(&self, installed: &Route) -> bool {
        let Route {
            dst,
            priority,
            table,
            ..
        } = self.route;
        installed.dst == dst
            && (table == MAIN || installed.table == table)
            && (priority.is_none() || installed.priority == priority)
            && (self.gateway.is_none() || installed.gateway == self.gateway)
    }

    /// Says in how much an installed route is as the ADD has made it.
    fn likeness(&self, installed: &Route) -> usize {
        [
            installed.table == self.route.table,
            metric(installed) == metric(&self.route),
            installed.gateway == self.route.gateway,
            installed.mtu == self.route.mtu,
            installed.advmss == self.route.advmss,
        ]
        .into_iter()
        .filter(|same| *same)
        .count()
    }
}

impl fmt::Display for Remembered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Route {
            dst,
            priority,
            table,
            ..
        } = self.route;
        write!(f, "{dst}")?;
        if let Some(priority) = priority {
            write!(f, " of priority {priority}")?;
        }
        if table != MAIN {
            write!(f, " in table {table}")?;
        }
        Ok(())
    }
}

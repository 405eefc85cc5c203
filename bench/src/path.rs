//! Ways for packets, all of them standing side by side: each has namespaces of its own and shares nothing but the machine.

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use serde::Serialize;
use underpass_abi::counter::Counter;
use underpass_tests::{Family, Lab, counter::Counters, netns::Netns};

use crate::{
    load::Ends,
    plugin::{self, Plugin},
};

mod limit;

/// Where a way leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Route {
    /// From a container to another one on the same node.
    PodToPod,
    /// From a container to a server beyond the uplink, masqueraded.
    PodToWorld,
}

impl Route {
    /// Both, in the order of tables.
    pub(crate) const ALL: [Self; 2] = [Self::PodToPod, Self::PodToWorld];

    /// Its name in headings.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::PodToPod => "pod to pod",
            Self::PodToWorld => "pod to world, masqueraded",
        }
    }
}

/// What carries the packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Carrier {
    /// The kernel's limit of the route: one veth pair, or two joined by programs that only redirect.
    Limit,
    /// A plugin.
    #[serde(untagged)]
    Plugin(Plugin),
}

impl Carrier {
    /// Its name in tables.
    pub(crate) const fn name(self, route: Route) -> &'static str {
        match (self, route) {
            (Self::Limit, Route::PodToPod) => "L1",
            (Self::Limit, Route::PodToWorld) => "L2",
            (Self::Plugin(plugin), _) => plugin.name(),
        }
    }

    /// Whether it is a way of this project's plugin.
    pub(crate) const fn is_ours(self) -> bool {
        matches!(self, Self::Plugin(plugin) if plugin.is_ours())
    }
}

/// A way, ready for traffic.
pub(crate) struct Path {
    pub(crate) route: Route,
    pub(crate) carrier: Carrier,
    client: Netns,
    server: Netns,
    /// What lies between: it lives as long as a handle of it does.
    _node: Netns,
    v4: IpAddr,
    v6: IpAddr,
}

impl Path {
    /// Both ends of traffic of a family.
    pub(crate) const fn ends(&self, family: Family) -> Ends<'_> {
        Ends {
            client: &self.client,
            server: &self.server,
            target: match family {
                Family::V4 => self.v4,
                Family::V6 => self.v6,
            },
        }
    }
}

/// All ways, and the nodes that they lead across.
pub(crate) struct Paths {
    pub(crate) paths: Vec<Path>,
    sites: Vec<Site>,
}

/// A node with two containers of one plugin.
struct Site {
    plugin: Plugin,
    lab: Lab,
}

/// How many packets of a node took the bypass in all.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Bypassed {
    pub(crate) plugin: Plugin,
    pub(crate) packets: u64,
    /// Directions of flows that were learned.
    pub(crate) learned: u64,
}

impl Paths {
    /// Builds everything.
    pub(crate) fn build() -> Result<Self> {
        let mut paths = vec![limit::one_pair()?];
        let mut worlds = vec![limit::two_pairs()?];
        let mut sites = Vec::new();
        for plugin in [
            Plugin::Bridge,
            Plugin::BridgeMasquerade,
            Plugin::Ptp,
            Plugin::PtpMasquerade,
            Plugin::Learned,
            Plugin::Eager,
            Plugin::Off,
        ] {
            let (lab, [inner, outer]) =
                site(plugin).with_context(|| format!("set up {}", plugin.name()))?;
            paths.push(inner);
            // Without masquerade the world knows no way back.
            if !matches!(plugin, Plugin::Bridge | Plugin::Ptp) {
                worlds.push(outer);
            }
            sites.push(Site { plugin, lab });
        }
        paths.append(&mut worlds);
        for path in &paths {
            // The plugin's ADD closed the range again in its own way; the client alone decides what it may use.
            path.client
                .set_sysctl("net/ipv4/ip_local_port_range", "1024 65535")?;
        }
        Ok(Self { paths, sites })
    }

    /// What our own nodes counted so far: a way that never took the bypass was not measured as what it is called.
    pub(crate) fn bypassed(&self) -> Result<Vec<Bypassed>> {
        let own = self.sites.iter().filter(|site| site.plugin.is_ours());
        own.map(|site| {
            let counters = Counters::read(&site.lab.node)?;
            Ok(Bypassed {
                plugin: site.plugin,
                packets: counters.bypassed(),
                learned: counters.get(Counter::Learned),
            })
        })
        .collect()
    }
}

/// A node with a world, two containers of a plugin, and the ways between them.
fn site(plugin: Plugin) -> Result<(Lab, [Path; 2])> {
    let lab = Lab::new()?;
    let node = &lab.node;
    let network = plugin.network(node, &Family::BOTH);
    let client = node.netns().sibling("client")?;
    let server = node.netns().sibling("server")?;
    network.add(node, &client)?;
    let result = network.add(node, &server)?.stdout;
    let carrier = Carrier::Plugin(plugin);
    let inner = Path {
        route: Route::PodToPod,
        carrier,
        client: client.clone(),
        server,
        _node: node.netns().clone(),
        v4: plugin::address(&result, Family::V4)?,
        v6: plugin::address(&result, Family::V6)?,
    };
    let outer = Path {
        route: Route::PodToWorld,
        carrier,
        client,
        server: lab.world.netns().clone(),
        _node: node.netns().clone(),
        v4: Family::V4.remote(),
        v6: Family::V6.remote(),
    };
    Ok((lab, [inner, outer]))
}

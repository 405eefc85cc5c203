//! Ways for packets, all of them standing side by side: each has namespaces of its own and shares nothing but the machine.

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::Value;
use underpass_abi::counter::Counter;
use underpass_tests::{Family, Lab, Node, counter::Counters, netns::Netns};

use crate::{
    load::Ends,
    plugin::{self, Plugin},
};

mod flowtable;
mod limit;
mod ports;
mod services;

pub(crate) use services::{Many, Rules, Translated};

/// The ways of another build.
const BEFORE: [Plugin; 2] = [Plugin::LearnedBefore, Plugin::OffBefore];

/// Where a way leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Route {
    /// From a container to another one on the same node.
    PodToPod,
    /// From a container to a server beyond the uplink, masqueraded.
    PodToWorld,
    /// From beyond the uplink to a host port of a container.
    WorldToPort,
    /// From a container to a Service that another one on the same node serves.
    PodToService,
    /// From a container to a Service that a server beyond the uplink serves, which sees the container's address.
    PodToRemoteService,
}

impl Route {
    /// All, in the order of tables.
    pub(crate) const ALL: [Self; 5] = [
        Self::PodToPod,
        Self::PodToWorld,
        Self::WorldToPort,
        Self::PodToService,
        Self::PodToRemoteService,
    ];

    /// Those by Services.
    pub(crate) const SERVICES: [Self; 2] = [Self::PodToService, Self::PodToRemoteService];

    /// Its name in headings.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::PodToPod => "pod to pod",
            Self::PodToWorld => "pod to world, masqueraded",
            Self::WorldToPort => "world to host port",
            Self::PodToService => "pod to Service, endpoint on the node",
            Self::PodToRemoteService => "pod to Service, endpoint beyond the uplink",
        }
    }
}

/// What carries the packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Carrier {
    /// The kernel's limit of the route: one veth pair, or two joined by programs that only redirect. For Services it is ours, learned, straight
    /// to the endpoint.
    Limit,
    /// Two veth pairs joined by programs that only hand packets over, between containers: what the least program at the host's end costs.
    HandedOver,
    /// The stack translates, by the rules of kube-proxy.
    Translated(Translated),
    /// Ours, learned, with as many mappings on the node as [`ports::MAPPINGS`].
    Crowded,
    /// Ours, learned, behind an uplink that carries what a wire does: frames no larger than the MTU, with whole checksums.
    Wire,
    /// The same with XDP on that uplink.
    WireXdp,
    /// A plugin.
    #[serde(untagged)]
    Plugin(Plugin),
}

impl Carrier {
    /// Its name in tables.
    pub(crate) fn name(self, route: Route) -> String {
        let name = match (self, route) {
            (Self::Limit, Route::PodToPod) => "L1",
            (Self::Limit, Route::PodToWorld | Route::WorldToPort) => "L2",
            (Self::Limit, Route::PodToService | Route::PodToRemoteService) => "direct",
            (Self::HandedOver, _) => "redirect",
            (Self::Translated(translated), _) => return translated.name(),
            (Self::Crowded, _) => "learned, 10k",
            (Self::Wire, _) => "learned, wire",
            (Self::WireXdp, _) => "xdp, wire",
            // Host ports are a chained plugin's.
            (Self::Plugin(Plugin::BridgeMasquerade), Route::WorldToPort) => "bridge portmap",
            (Self::Plugin(Plugin::PtpMasquerade), Route::WorldToPort) => "ptp portmap",
            (Self::Plugin(plugin), _) => plugin.name(),
        };
        name.to_owned()
    }

    /// Whether it is a way of this project's plugin.
    pub(crate) const fn is_ours(self) -> bool {
        match self {
            Self::Limit | Self::HandedOver => false,
            Self::Crowded | Self::Wire | Self::WireXdp => true,
            Self::Plugin(plugin) | Self::Translated(Translated { plugin, .. }) => plugin.is_ours(),
        }
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
    /// What the client talks to, and where the server listens, by family.
    v4: Address,
    v6: Address,
}

/// An address of a server, as both ends know it.
#[derive(Clone, Copy)]
struct Address {
    target: IpAddr,
    own: IpAddr,
}

impl From<IpAddr> for Address {
    fn from(ip: IpAddr) -> Self {
        Self {
            target: ip,
            own: ip,
        }
    }
}

impl Path {
    /// Its route and what carries its packets.
    pub(crate) fn name(&self) -> String {
        format!("{}, {}", self.route.name(), self.carrier.name(self.route))
    }

    /// Both ends of traffic of a family.
    pub(crate) const fn ends(&self, family: Family) -> Ends<'_> {
        let Address { target, own } = match family {
            Family::V4 => self.v4,
            Family::V6 => self.v6,
        };
        Ends {
            client: &self.client,
            server: &self.server,
            target,
            own,
        }
    }
}

/// All ways, and the nodes that they lead across.
pub(crate) struct Paths {
    pub(crate) ways: Vec<Path>,
    /// Ways that could not be built here, and why.
    pub(crate) left_out: Vec<String>,
    sites: Vec<Site>,
}

/// A node with containers of one plugin.
struct Site {
    carrier: Carrier,
    purpose: Purpose,
    lab: Lab,
}

/// What the containers of a node do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Purpose {
    /// They talk to each other and to the world.
    Clients,
    /// One of them has host ports.
    HostPorts,
    /// One of them asks for Services.
    Services,
}

impl Purpose {
    /// Its name in tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Clients => "containers as clients",
            Self::HostPorts => "host ports",
            Self::Services => "Services",
        }
    }
}

/// How many packets of a node took the bypass in all.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Bypassed {
    pub(crate) carrier: Carrier,
    /// What the node was for.
    pub(crate) purpose: Purpose,
    pub(crate) packets: u64,
    /// Directions of flows that were learned.
    pub(crate) learned: u64,
}

impl Paths {
    /// Keeps the ways that one of these texts names, by a part of their route's or their own name, and the limit of each route that is left.
    /// None, and all stay.
    pub(crate) fn retain(&mut self, wanted: &[String]) {
        let is_named = |name: &str| {
            wanted.is_empty() || wanted.iter().any(|part| name.contains(part.as_str()))
        };
        let is_wanted = |way: &Path| is_named(&way.name());
        let routes: Vec<Route> = self
            .ways
            .iter()
            .filter(|way| is_wanted(way))
            .map(|way| way.route)
            .collect();
        self.ways.retain(|way| {
            is_wanted(way) || way.carrier == Carrier::Limit && routes.contains(&way.route)
        });
    }

    /// Builds everything.
    pub(crate) fn build() -> Result<Self> {
        let mut paths = vec![limit::one_pair()?, limit::handed_over()?];
        let mut worlds = vec![limit::two_pairs(Route::PodToWorld)?];
        let mut sites = Vec::new();
        let mut left_out = Vec::new();
        let mut plugins = vec![
            Plugin::Bridge,
            Plugin::BridgeMasquerade,
            Plugin::Ptp,
            Plugin::PtpMasquerade,
            Plugin::PtpFlowtable,
            Plugin::Learned,
            Plugin::Off,
        ];
        let before = plugin::before().map_or(&[][..], |_| &BEFORE[..]);
        plugins.extend_from_slice(before);
        for plugin in plugins {
            let site = site(plugin).with_context(|| format!("set up {}", plugin.name()));
            let (lab, [inner, outer]) = match site {
                // Not every kernel has flowtables.
                Err(error) if plugin == Plugin::PtpFlowtable => {
                    let reason = format!("{error:#}");
                    left_out.extend(reason.lines().next().map(str::to_owned));
                    continue;
                }
                outcome => outcome?,
            };
            paths.push(inner);
            // Without masquerade the world knows no way back.
            if !matches!(plugin, Plugin::Bridge | Plugin::Ptp) {
                worlds.push(outer);
            }
            sites.push(Site {
                carrier: Carrier::Plugin(plugin),
                purpose: Purpose::Clients,
                lab,
            });
        }
        paths.append(&mut worlds);
        paths.push(limit::two_pairs(Route::WorldToPort)?);
        let before = before.iter().copied().map(Carrier::Plugin);
        for carrier in [
            Carrier::Plugin(Plugin::BridgeMasquerade),
            Carrier::Plugin(Plugin::PtpMasquerade),
            Carrier::Plugin(Plugin::Learned),
            Carrier::Plugin(Plugin::Off),
            Carrier::Crowded,
            Carrier::Wire,
            Carrier::WireXdp,
        ]
        .into_iter()
        .chain(before)
        {
            add_host_ports(carrier, &mut paths, &mut sites)?;
        }
        Self::ready(paths, left_out, sites)
    }

    /// Builds what tells whether XDP pays.
    pub(crate) fn build_xdp() -> Result<Self> {
        let mut paths = vec![limit::two_pairs(Route::WorldToPort)?];
        let mut sites = Vec::new();
        for carrier in [
            Carrier::Plugin(Plugin::Learned),
            Carrier::Wire,
            Carrier::WireXdp,
        ] {
            add_host_ports(carrier, &mut paths, &mut sites)?;
        }
        Self::ready(paths, Vec::new(), sites)
    }

    /// Builds what tells what the bypass is worth to a Service.
    pub(crate) fn build_services() -> Result<Self> {
        let (mut paths, direct) = services::site(None)?;
        let mut sites = vec![direct];
        let mut left_out = Vec::new();
        for translated in services::ALL {
            let built = services::site(Some(translated))
                .with_context(|| format!("set up {}", translated.name()));
            match built {
                // Not every kernel has flowtables.
                Err(error) if translated.plugin == Plugin::PtpFlowtable => {
                    let reason = format!("{error:#}");
                    left_out.extend(reason.lines().next().map(str::to_owned));
                }
                built => {
                    let (more, site) = built?;
                    paths.extend(more);
                    sites.push(site);
                }
            }
        }
        Self::ready(paths, left_out, sites)
    }

    fn ready(paths: Vec<Path>, left_out: Vec<String>, sites: Vec<Site>) -> Result<Self> {
        for path in &paths {
            // The plugin's ADD closed the range again in its own way; the client alone decides what it may use.
            path.client
                .set_sysctl("net/ipv4/ip_local_port_range", "1024 65535")?;
        }
        Ok(Self {
            ways: paths,
            left_out,
            sites,
        })
    }

    /// What our own nodes counted so far: a way that never took the bypass was not measured as what it is called.
    pub(crate) fn bypassed(&self) -> Result<Vec<Bypassed>> {
        let own = self.sites.iter().filter(|site| site.carrier.is_ours());
        own.map(|site| {
            let counters = Counters::read(&site.lab.node)?;
            Ok(Bypassed {
                carrier: site.carrier,
                purpose: site.purpose,
                packets: counters.bypassed(),
                learned: counters.get(Counter::Learned),
            })
        })
        .collect()
    }
}

fn add_host_ports(carrier: Carrier, paths: &mut Vec<Path>, sites: &mut Vec<Site>) -> Result<()> {
    let name = carrier.name(Route::WorldToPort);
    let (path, site) =
        ports::site(carrier).with_context(|| format!("set up host ports of {name}"))?;
    paths.push(path);
    sites.push(site);
    Ok(())
}

/// A node with a world, two containers of a plugin, and the ways between them.
fn site(plugin: Plugin) -> Result<(Lab, [Path; 2])> {
    let lab = Lab::open()?;
    let node = &lab.node;
    let (client, server, result) = containers(plugin, node)?;
    let carrier = Carrier::Plugin(plugin);
    let inner = Path {
        route: Route::PodToPod,
        carrier,
        client: client.clone(),
        server,
        _node: node.netns().clone(),
        v4: plugin::address(&result, Family::V4)?.into(),
        v6: plugin::address(&result, Family::V6)?.into(),
    };
    let outer = Path {
        route: Route::PodToWorld,
        carrier,
        client,
        server: lab.world.netns().clone(),
        _node: node.netns().clone(),
        v4: Family::V4.remote().into(),
        v6: Family::V6.remote().into(),
    };
    if plugin == Plugin::PtpFlowtable {
        flowtable::add(node)?;
    }
    Ok((lab, [inner, outer]))
}

/// Two containers of a plugin, a client and a server, and what the plugin said of the server.
fn containers(plugin: Plugin, node: &Node) -> Result<(Netns, Netns, Value)> {
    let network = plugin.network(node, &Family::BOTH);
    let client = node.netns().sibling("client")?;
    let server = node.netns().sibling("server")?;
    network.add(node, &client)?;
    let result = network.add(node, &server)?.stdout;
    Ok((client, server, result))
}

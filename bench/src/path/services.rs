//! Ways from a container to a Service that the stack translates, and straight to who serves it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, Result};
use serde::Serialize;
use underpass_tests::{
    Family, Lab,
    netfilter::{
        Transport,
        kube_proxy::{Mode, Policy, Service},
    },
};

use super::{Address, Carrier, Path, Purpose, Route, Site, containers, flowtable};
use crate::{
    load::PORT,
    plugin::{self, Plugin},
};

/// Who translates, and among how many.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Translated {
    pub(crate) plugin: Plugin,
    pub(crate) rules: Rules,
    /// Services on the node.
    pub(crate) services: Many,
}

/// The mode of kube-proxy whose rules translate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Rules {
    Iptables,
    Nftables,
}

/// How many Services there are. The one that is measured is the last.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Many {
    One,
    Hundred,
    TenThousand,
}

impl Many {
    const fn number(self) -> u16 {
        match self {
            Self::One => 1,
            Self::Hundred => 100,
            Self::TenThousand => 10_000,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::One => "1",
            Self::Hundred => "100",
            Self::TenThousand => "10k",
        }
    }
}

impl Translated {
    /// Its name in tables.
    pub(crate) fn name(self) -> String {
        let plugin = match self.plugin {
            Plugin::PtpFlowtable => "flowtable",
            plugin => plugin.name(),
        };
        let rules = match self.rules {
            Rules::Iptables => "ipt",
            Rules::Nftables => "nft",
        };
        format!("{plugin} {rules} {}", self.services.name())
    }
}

/// All that are compared.
pub(super) const ALL: [Translated; 13] = {
    const fn by(plugin: Plugin, rules: Rules, services: Many) -> Translated {
        Translated {
            plugin,
            rules,
            services,
        }
    }
    use Many::{Hundred, One, TenThousand};
    use Rules::{Iptables, Nftables};
    [
        by(Plugin::Ptp, Iptables, One),
        by(Plugin::Ptp, Iptables, Hundred),
        by(Plugin::Ptp, Iptables, TenThousand),
        by(Plugin::Ptp, Nftables, One),
        by(Plugin::Ptp, Nftables, TenThousand),
        by(Plugin::PtpFlowtable, Nftables, One),
        by(Plugin::Routed, Iptables, One),
        by(Plugin::Routed, Iptables, Hundred),
        by(Plugin::Routed, Iptables, TenThousand),
        by(Plugin::Routed, Nftables, One),
        by(Plugin::Routed, Nftables, TenThousand),
        by(Plugin::RoutedOff, Iptables, One),
        by(Plugin::RoutedOff, Nftables, One),
    ]
};

/// A node whose container reaches another one, and a server beyond the uplink, by Services; or, without any, straight.
pub(super) fn site(translated: Option<Translated>) -> Result<(Vec<Path>, Site)> {
    let plugin = translated.map_or(Plugin::Routed, |translated| translated.plugin);
    let lab = Lab::open()?;
    lab.world.route_pods()?;
    let node = &lab.node;
    let (client, server, result) = containers(plugin, node)?;
    let inner = [
        plugin::address(&result, Family::V4)?,
        plugin::address(&result, Family::V6)?,
    ];
    let outer = Family::BOTH.map(Family::remote);
    let endpoints = [inner, outer];
    // Who talks straight to an endpoint has a Service beside it, and the same connection tracking.
    let (rules, count) = translated.map_or((Rules::Iptables, Many::One), |translated| {
        (translated.rules, translated.services)
    });
    let mode = match rules {
        Rules::Iptables => Mode::Iptables,
        Rules::Nftables => Mode::Nftables,
    };
    let count = count.number();
    let mut services = elsewhere(count);
    let mut clusters = endpoints;
    for (to, at) in clusters.iter_mut().enumerate() {
        for (family, address) in Family::BOTH.into_iter().zip(at) {
            let cluster = cluster(family, u16::MAX - u16::try_from(to)?);
            services.extend(served(cluster, *address));
            *address = cluster;
        }
    }
    lab.firewall
        .proxy(mode, &services)
        .with_context(|| format!("serve {count} Services by {mode:?}"))?;
    lab.firewall.set_liberal(true)?;
    if plugin.is_ours() {
        node.underpass(&["load"])?;
    }
    if plugin == Plugin::PtpFlowtable {
        flowtable::add(node)?;
    }
    let targets = if translated.is_some() {
        clusters
    } else {
        endpoints
    };
    let carrier = translated.map_or(Carrier::Limit, Carrier::Translated);
    let world = lab.world.netns();
    let path =
        |route, server: &underpass_tests::netns::Netns, own: [IpAddr; 2], at: [IpAddr; 2]| {
            let address = |which: usize| Address {
                target: at[which],
                own: own[which],
            };
            Path {
                route,
                carrier,
                client: client.clone(),
                server: server.clone(),
                _node: node.netns().clone(),
                v4: address(0),
                v6: address(1),
            }
        };
    let paths = vec![
        path(Route::PodToService, &server, inner, targets[0]),
        path(Route::PodToRemoteService, world, outer, targets[1]),
    ];
    let site = Site {
        carrier,
        purpose: Purpose::Services,
        lab,
    };
    Ok((paths, site))
}

/// The cluster IP of a Service.
const fn cluster(family: Family, number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::new(10, 97, high, low)),
        Family::V6 => IpAddr::V6(Ipv6Addr::new(0xfd00, 0x97, 0, 0, 0, 0, 0, number)),
    }
}

/// A Service by TCP and by UDP.
fn served(cluster: IpAddr, endpoint: IpAddr) -> [Service; 2] {
    [Transport::Tcp, Transport::Udp].map(|transport| Service {
        name: format!("at-{cluster}").replace([':', '.'], "-"),
        transport,
        cluster: SocketAddr::new(cluster, PORT),
        node_port: None,
        policy: Policy::Cluster,
        endpoints: vec![SocketAddr::new(endpoint, PORT)],
    })
}

/// So many Services, less the measured ones, by TCP: nobody asks for them.
fn elsewhere(count: u16) -> Vec<Service> {
    let families = Family::BOTH.into_iter();
    families
        .flat_map(|family| {
            (1..count).flat_map(move |number| {
                let endpoint = family.pod_elsewhere(7);
                served(cluster(family, number), endpoint)
                    .into_iter()
                    .take(1)
            })
        })
        .collect()
}

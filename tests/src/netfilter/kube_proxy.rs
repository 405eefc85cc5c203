//! kube-proxy's rules, in the shapes of its two modes: chains, hooks, priorities, marks and order are those of Kubernetes.

mod iptables;
pub mod ipvs;
mod nftables;

use std::{
    env,
    net::{IpAddr, SocketAddr},
    sync::LazyLock,
};

use anyhow::Result;

use super::Transport;
use crate::{Family, netns::Netns};

/// Which mode's rules every firewall has beside its own: `iptables`, which is the default, `nftables` or `none`.
const VARIABLE: &str = "UNDERPASS_TEST_PROXY";

/// The bit that marks a packet of a new connection for masquerade.
const MARK: &str = "0x4000";

/// How kube-proxy runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Chains that are walked rule by rule, as `iptables-nft` puts them into the kernel.
    Iptables,
    /// A table of its own, with maps from destinations to chains.
    Nftables,
}

/// Which endpoints a Service has for what comes from outside the cluster: its `externalTrafficPolicy`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// All of them; they see the node's address.
    Cluster,
    /// Those of this node, as which all count here; they see the client's address.
    Local,
}

/// A Service with one port.
#[derive(Clone, Debug)]
pub struct Service {
    /// Its name, different from those of other Services.
    pub name: String,
    /// The protocol of its port.
    pub transport: Transport,
    /// Its cluster IP and port.
    pub cluster: SocketAddr,
    /// The port of every node at which it is served, too.
    pub node_port: Option<u16>,
    /// Who serves that, and whom they see.
    pub policy: Policy,
    /// Its endpoints. Where there are none, it refuses.
    pub endpoints: Vec<SocketAddr>,
}

impl Service {
    /// What tells its chains from those of others.
    fn key(&self) -> String {
        format!("{}-{}", self.name, self.transport.nft())
    }

    fn family(&self) -> Family {
        Family::of(self.cluster.ip())
    }

    /// What is sent to its cluster IP and port.
    fn destination(&self) -> String {
        format!(
            "{} daddr {} {} dport {}",
            self.family().nft(),
            self.cluster.ip(),
            self.transport.nft(),
            self.cluster.port()
        )
    }

    /// What comes to its cluster IP from outside the cluster. Another node may have the endpoint, and the answer must come back here.
    fn outside_cluster(&self) -> String {
        let ip = self.family().nft();
        let (family, cluster) = (self.family(), self.cluster.ip());
        let (pods, others) = (family.pods(), family.cluster_pods());
        // Two conditions instead of one with a set: among ten thousand sets the kernel takes minutes to find each one's own.
        format!("{ip} daddr {cluster} {ip} saddr != {pods} {ip} saddr != {others}")
    }

    /// All that pods' addresses are from, on whatever node: a set of `nft`.
    fn pods(&self) -> String {
        let family = self.family();
        format!("{{ {}, {} }}", family.pods(), family.cluster_pods())
    }

    /// A number for each endpoint, and where it is.
    fn numbered(&self) -> impl Iterator<Item = (usize, SocketAddr)> {
        self.endpoints.iter().copied().enumerate()
    }
}

/// The mode that the environment asks for.
///
/// # Panics
/// If it names one that is none.
#[must_use]
pub fn usual() -> Option<Mode> {
    static MODE: LazyLock<Option<Mode>> = LazyLock::new(|| match env::var(VARIABLE).as_deref() {
        Err(_) | Ok("iptables") => Some(Mode::Iptables),
        Ok("nftables") => Some(Mode::Nftables),
        Ok("none") => None,
        Ok(value) => panic!("{VARIABLE}={value} is neither iptables, nftables nor none"),
    });
    *MODE
}

/// Services that no test asks: three with three endpoints each on other nodes, and one without any.
pub(super) fn elsewhere() -> Vec<Service> {
    Family::BOTH.into_iter().flat_map(of_cluster).collect()
}

fn of_cluster(family: Family) -> Vec<Service> {
    [
        ("web", Transport::Tcp, 80, Some(32_701), 3),
        ("names", Transport::Udp, 53, None, 3),
        ("store", Transport::Tcp, 5432, Some(32_702), 3),
        ("idle", Transport::Tcp, 80, Some(32_703), 0),
    ]
    .into_iter()
    .zip(1..)
    .map(
        |((name, transport, port, node_port, endpoints), number)| Service {
            name: name.to_owned(),
            transport,
            cluster: SocketAddr::new(family.cluster_ip(number), port),
            node_port,
            policy: Policy::Cluster,
            endpoints: (0..endpoints)
                .map(|at| SocketAddr::new(family.pod_elsewhere(10 * number + at), 8000 + port))
                .collect(),
        },
    )
    .collect()
}

/// Rules for those of these Services that are of one family.
pub(super) fn rules(mode: Mode, family: Family, services: &[Service]) -> String {
    let services: Vec<&Service> = services
        .iter()
        .filter(|service| service.family() == family)
        .collect();
    match mode {
        Mode::Iptables => iptables::tables(family, &services),
        Mode::Nftables => nftables::table(family, &services),
    }
}

/// Sets what kube-proxy sets beside its rules.
pub(super) fn prepare(netns: &Netns, mode: Mode) -> Result<()> {
    // So that node ports are served at 127.0.0.1: the answers of pods must come in with that destination.
    let route = match mode {
        Mode::Iptables => "1",
        Mode::Nftables => "0",
    };
    netns.set_sysctl("net/ipv4/conf/all/route_localnet", route)
}

/// What has the nftables mode serve node ports at one address more.
pub(super) fn primary_address(address: IpAddr) -> String {
    let ip = Family::of(address).nft();
    format!(
        "add element {ip} {} nodeport-ips {{ {address} }}\n",
        nftables::TABLE
    )
}

/// What removes a family's rules of any mode, where there are some.
pub(super) fn removal(family: Family) -> String {
    let ip = family.nft();
    let [nat, filter] = iptables::TABLES;
    let tables = [nat, filter, nftables::TABLE];
    // To delete a table that is not there would fail; to add one that is there does nothing.
    let remove = |table| format!("add table {ip} {table}\ndelete table {ip} {table}\n");
    tables.map(remove).concat()
}

/// The chain of each endpoint, with this prefix to its name; `mark` is the chain that marks for masquerade.
fn endpoint_chains(service: &Service, prefix: &str, mark: &str) -> String {
    let (ip, key) = (service.family().nft(), service.key());
    let endpoints = service.numbered().map(|(at, endpoint)| {
        let rules = [
            // Who asks itself must not see its own address, or it would answer itself past the node.
            format!("{ip} saddr {} jump {mark}", endpoint.ip()),
            format!(
                "meta l4proto {} dnat to {endpoint}",
                service.transport.nft()
            ),
        ];
        chain(&format!("{prefix}-{key}-{at}"), &rules)
    });
    endpoints.collect()
}

fn chain(name: &str, rules: &[String]) -> String {
    format!(
        "    chain {name} {{\n        {}\n    }}\n",
        rules.join("\n        ")
    )
}

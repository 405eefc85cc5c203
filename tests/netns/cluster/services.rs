//! Services by kube-proxy's rules on each node, with endpoints on other nodes: beside the one who asks, and beyond a router.

use std::net::{IpAddr, SocketAddr};

use rstest::rstest;
use underpass_tests::{
    netfilter::{
        Netfilter, Transport,
        kube_proxy::{
            Mode::{self, Iptables, Nftables},
            Policy, Service,
        },
    },
    netns::Netns,
    prelude::*,
    traffic,
};

use super::{firewall::none_was_invalid, fixture::Cluster, member::Member};
use crate::kube_proxy::NODE_PORT;

/// Where the backends listen.
const PORT: u16 = 8_080;
/// Bytes of a transfer, both ways.
const LONG: u64 = 3_000_000;
/// So many packets are asked for, and nearly all of them must take the bypass.
const MANY: usize = 40;
const MOST: u64 = 60;

/// Three nodes, of which the last is beyond a router, with a pod on each. Each has kube-proxy, and a Service for every pod and policy.
struct Scene {
    _servers: Vec<(tcp::Server, udp::Server)>,
    firewalls: Vec<Netfilter>,
    pods: Vec<Pod>,
    cluster: Cluster,
}

/// The Service in front of this pod alone.
const fn port_of(pod: usize, policy: Policy) -> u16 {
    let ports = match policy {
        Policy::Cluster => [80, 81, 82],
        Policy::Local => [90, 91, 92],
    };
    ports[pod]
}

/// Services of both policies, by both protocols.
fn in_front_of(family: Family, number: usize, pod: &Pod) -> Vec<Service> {
    let mut services = Vec::new();
    for transport in [Transport::Tcp, Transport::Udp] {
        for policy in [Policy::Cluster, Policy::Local] {
            let port = port_of(number, policy);
            services.push(Service {
                name: format!("pod{port}"),
                transport,
                cluster: family.service_at(port),
                node_port: Some(NODE_PORT + port),
                policy,
                endpoints: vec![pod.at(family, PORT)],
            });
        }
    }
    services
}

impl Scene {
    fn set(mode: Mode) -> Result<Self> {
        let cluster = Cluster::new(&[0, 0, 1])?;
        cluster.settle()?;
        let firewalls = cluster.fortify()?;
        for firewall in &firewalls {
            // Connection tracking has the translation: it must take back what it did not see.
            firewall.set_liberal(true)?;
        }
        let pods = cluster.pods()?;
        let mut services = Vec::new();
        let mut servers = Vec::new();
        for family in Family::BOTH {
            for (number, pod) in pods.iter().enumerate() {
                servers.push(traffic::serve(pod.netns(), pod.at(family, PORT))?);
                services.extend(in_front_of(family, number, pod));
            }
        }
        for (firewall, member) in firewalls.iter().zip(&cluster.members) {
            firewall.proxy(mode, &services)?;
            if mode == Nftables {
                for family in Family::BOTH {
                    firewall.serve_node_ports_at(member.address(family))?;
                }
            }
        }
        Ok(Self {
            _servers: servers,
            firewalls,
            pods,
            cluster,
        })
    }

    fn member(&self, number: usize) -> &Member {
        &self.cluster.members[number]
    }

    /// The endpoint sees the pod's own address.
    fn by_a_cluster_ip(&self, family: Family, from: usize, to: usize) -> Result<()> {
        let client = &self.pods[from];
        let at = family.service_at(port_of(to, Policy::Cluster));
        self.reaches(client.netns(), at, client.ip(family), &[from, to])
    }

    /// The first node asks in the client's place, so that the answer comes back to it: from the device that leads to the endpoint.
    fn by_a_node_port(&self, family: Family, to: usize) -> Result<()> {
        let asked = self.member(0);
        let port = NODE_PORT + port_of(to, Policy::Cluster);
        let at = SocketAddr::new(asked.address(family), port);
        let seen = if asked.link == self.member(to).link {
            asked.address(family)
        } else {
            asked.tunnel_address(family)?
        };
        self.reaches(&self.cluster.fabric, at, seen, &[to])?;
        for from in 0..self.pods.len() {
            self.reaches(self.pods[from].netns(), at, seen, &[from, to])?;
        }
        Ok(())
    }

    /// The endpoint's own node is asked, and does not take the client's place. A pod's node has taken it before.
    fn by_a_local_node_port(&self, family: Family, to: usize) -> Result<()> {
        let asked = self.member(to);
        let port = NODE_PORT + port_of(to, Policy::Local);
        let at = SocketAddr::new(asked.address(family), port);
        self.reaches(&self.cluster.fabric, at, asked.gateway(family), &[to])?;
        let seen = self.member(0).address(family);
        self.reaches(self.pods[0].netns(), at, seen, &[0, to])
    }

    /// Talks by UDP and TCP; whoever answers must see this address. On these nodes nearly all of it passes the stack by.
    fn reaches(
        &self,
        from: &Netns,
        at: SocketAddr,
        expected: IpAddr,
        bypassing: &[usize],
    ) -> Result<()> {
        let meters = bypassing
            .iter()
            .map(|number| Meter::start(&self.member(*number).node))
            .collect::<Result<Vec<_>>>()?;
        let talk = || -> Result<()> {
            let mut client = udp::Client::open(from, Family::of(at.ip()))?;
            let seen = client.chat(at, MANY)?.seen.ip();
            ensure!(seen == expected, "by UDP it came from {seen}");
            for meter in &meters {
                let counted = meter.read()?;
                ensure!(counted.bypassed() >= MOST, "by UDP: {counted:?}");
            }
            let mut client = tcp::Client::connect(from, at)?;
            let seen = client.chat(MANY)?.ip();
            ensure!(seen == expected, "by TCP it came from {seen}");
            client.exchange(LONG, LONG)?;
            for meter in &meters {
                let counted = meter.read()?;
                ensure!(counted.bypassed() >= 2 * MOST, "by TCP: {counted:?}");
            }
            Ok(())
        };
        talk().with_context(|| format!("{} to {at}", from.name()))
    }
}

/// A pod asks a cluster IP, or a port of a node; so do the world, pods of other nodes, and the endpoint itself. On the nodes of whoever
/// is a pod all have learned.
#[rstest]
fn all_reach_pods_of_other_nodes(#[values(Iptables, Nftables)] mode: Mode) -> Result<()> {
    needs_root!();
    let scene = Scene::set(mode)?;
    for family in Family::BOTH {
        for (from, to) in [(0, 1), (0, 2), (2, 0)] {
            scene.by_a_cluster_ip(family, from, to)?;
        }
        for to in [1, 2] {
            scene.by_a_node_port(family, to)?;
            scene.by_a_local_node_port(family, to)?;
        }
    }
    none_was_invalid(&scene.firewalls)
}

//! A cluster: nodes on one or two links, an agent on each, and what they have become.

use std::{collections::BTreeSet, fs, sync::Arc};

use nix::mount::{MsFlags, mount};
use underpass_tests::{
    counter::Counters, netfilter::Netfilter, netns::Netns, prelude::*, traffic::serve,
};

use super::{
    api::{AT, Api},
    member::{HEALTH, LOG, Member, cidr, nodad},
};

/// The nodes of a cluster, and what connects them.
pub(super) struct Cluster {
    pub(super) api: Api,
    pub(super) members: Vec<Member>,
    /// The switch of each link, and the router between them. To nodes it is the world as well.
    pub(super) fabric: Netns,
}

impl Cluster {
    /// A cluster with a node for each entry, on the link with that number (0 or 1). Agents run on all of them.
    pub(super) fn new(links: &[u8]) -> Result<Self> {
        let mut cluster = Self::of(links, Node::new)?;
        cluster.start_agents()?;
        Ok(cluster)
    }

    /// Starts the agent of each node.
    pub(super) fn start_agents(&mut self) -> Result<()> {
        self.members.iter_mut().try_for_each(Member::start_agent)
    }

    /// As [`Self::new`], without agents.
    pub(super) fn idle(links: &[u8]) -> Result<Self> {
        Self::of(links, Node::new)
    }

    /// As [`Self::idle`], and nothing is loaded on any node, as after a boot: for tests about that.
    pub(super) fn cold(links: &[u8]) -> Result<Self> {
        Self::of(links, Node::unloaded)
    }

    fn of(places: &[u8], node: fn() -> Result<Node>) -> Result<Self> {
        let api = Api::default();
        let fabric = Netns::isolated("fabric")?;
        let mut lines: Vec<String> = Family::BOTH
            .map(|family| {
                format!(
                    "address add {}/{} dev lo",
                    family.remote(),
                    family.host_bits()
                )
            })
            .to_vec();
        for link in 0..2 {
            lines.push(format!("link add br{link} type bridge"));
            lines.push(format!("link set br{link} up"));
            for family in Family::BOTH {
                lines.push(format!(
                    "address add {} dev br{link} {}",
                    cidr(family, link, 254),
                    nodad(family)
                ));
            }
        }
        fabric.ip(&lines)?;
        fabric.set_sysctl("net/ipv4/ip_forward", "1")?;
        fabric.set_sysctl("net/ipv6/conf/all/forwarding", "1")?;
        let mut cluster = Self {
            api,
            members: Vec::new(),
            fabric,
        };
        for (number, link) in (1..).zip(places) {
            cluster.join(node()?, number, *link)?;
        }
        Ok(cluster)
    }

    fn join(&mut self, node: Node, number: u8, link: u8) -> Result<()> {
        let node = Arc::new(node);
        let port = format!("node{number}");
        let netns = node.netns().clone();
        netns.run(|| {
            let no_options: Option<&str> = None;
            mount(
                Some("var"),
                "/var/lib",
                Some("tmpfs"),
                MsFlags::empty(),
                no_options,
            )
        })?;
        self.fabric.cable(&port, &netns, Node::UPLINK, 1500)?;
        self.fabric
            .ip(&[format!("link set {port} master br{link}")])?;
        let member = Member {
            name: port,
            _door: self.api.open(&netns)?,
            node,
            agent: None,
            build: None,
            outside: V4,
            link,
            number,
        };
        netns.ip(&member.readdress())?;
        self.register(&member);
        self.members.push(member);
        Ok(())
    }

    /// Has the API know a node.
    pub(super) fn register(&self, member: &Member) {
        self.api
            .set(&member.name, &member.addresses(), &member.ranges());
    }

    /// Has the API name the nodes' addresses of this family first: those of VXLAN's outside.
    pub(super) fn put_outside(&mut self, family: Family) {
        for member in &mut self.members {
            member.outside = family;
        }
        self.members.iter().for_each(|member| self.register(member));
    }

    /// Gives all links an MTU, in bytes.
    pub(super) fn narrow(&self, mtu: u32) -> Result<()> {
        for member in &self.members {
            member.node.netns().set_mtu(Node::UPLINK, mtu)?;
            self.fabric.set_mtu(&member.name, mtu)?;
        }
        Ok(())
    }

    /// Puts a strict firewall, and kube-proxy, on each node. What the agent itself is connected with is not tracked: the firewall's timers are
    /// shorter than a watch is silent.
    pub(super) fn fortify(&self) -> Result<Vec<Netfilter>> {
        let nodes = self.members.iter().map(|member| &member.node);
        nodes
            .map(|node| {
                let firewall = Netfilter::new(node)?;
                node.netns().nft(&untracked())?;
                Ok(firewall)
            })
            .collect()
    }

    /// Adds a node on a link, and its agent.
    pub(super) fn grow(&mut self, link: u8) -> Result<()> {
        let number = self
            .members
            .iter()
            .map(|member| member.number)
            .max()
            .unwrap_or(0)
            + 1;
        self.join(Node::new()?, number, link)?;
        self.members.last_mut().context("a member")?.start_agent()
    }

    /// Gives a node another address and another range, as one that was deleted and registered again has.
    pub(super) fn move_to(&mut self, index: usize, number: u8) -> Result<()> {
        let member = &mut self.members[index];
        member.number = 100 + number;
        member.node.netns().ip(&member.readdress())?;
        self.register(&self.members[index]);
        Ok(())
    }

    /// Adds a pod on each node, once its network knows the ranges of all: routes wait for that, but not for ever.
    pub(super) fn pods(&self) -> Result<Vec<Pod>> {
        let ranges: Vec<_> = self.members.iter().flat_map(Member::ranges).collect();
        self.members
            .iter()
            .map(|member| {
                member.keeps_source_to(&ranges)?;
                member.pod(&format!("pod-of-{}", member.name))
            })
            .collect()
    }

    /// Waits until every node has exactly the routes that it should have.
    pub(super) fn settle(&self) -> Result<()> {
        self.members
            .iter()
            .try_for_each(|member| self.settle_one(member))
    }

    pub(super) fn settle_one(&self, member: &Member) -> Result<()> {
        let expected: BTreeSet<String> = self
            .members
            .iter()
            .flat_map(|other| Family::BOTH.map(|family| other.route(family, member)))
            .collect();
        eventually(&format!("the routes of {}", member.name), || {
            let routes = member.routes()?;
            ensure!(
                routes == expected,
                "{routes:?} instead of {expected:?}; the agent said\n{}",
                member
                    .node
                    .netns()
                    .run(|| fs::read_to_string(LOG))
                    .unwrap_or_default()
            );
            Ok(())
        })
    }

    /// Sees that every node has put packets past its stack onto an uplink, and into a pod.
    pub(super) fn all_bypass(&self) -> Result<()> {
        self.members
            .iter()
            .try_for_each(|member| Counters::expect_bypass(&member.node, &member.name))
    }

    /// Has each of these pods reach all others, who see its own address.
    pub(super) fn all_reach_all(pods: &[Pod]) -> Result<()> {
        for family in Family::BOTH {
            let servers = pods
                .iter()
                .map(|pod| serve(pod.netns(), pod.at(family, 80)))
                .collect::<Result<Vec<_>>>()?;
            for from in pods {
                for to in pods {
                    if from.ip(family) == to.ip(family) {
                        continue;
                    }
                    let mut client = tcp::Client::connect(from.netns(), to.at(family, 80))?;
                    let seen = client.exchange(200_000, 200_000)?.seen.ip();
                    ensure!(seen == from.ip(family), "{} saw {seen} by TCP", to.name());
                    let mut client = udp::Client::open(from.netns(), family)?;
                    let seen = client.chat(to.at(family, 80), 5)?.seen.ip();
                    ensure!(seen == from.ip(family), "{} saw {seen} by UDP", to.name());
                }
            }
            drop(servers);
        }
        Ok(())
    }
}

/// Rules of nftables by which connections with the API and with the agent are not tracked.
fn untracked() -> String {
    let ports = [AT, HEALTH].map(|at| at.rsplit(':').next().unwrap_or_default());
    let ports = ports.join(", ");
    let chain = |hook: &str, device: &str| {
        format!(
            "chain {hook} {{ type filter hook {hook} priority raw
                {device} lo tcp dport {{ {ports} }} notrack
                {device} lo tcp sport {{ {ports} }} notrack
            }}"
        )
    };
    let chains = [chain("output", "oifname"), chain("prerouting", "iifname")];
    format!("table inet untracked {{\n{}\n}}\n", chains.join("\n"))
}

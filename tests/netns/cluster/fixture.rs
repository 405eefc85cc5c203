//! A cluster: nodes on one or two links, an agent on each, and what they have become.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    mount::{MsFlags, mount},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use underpass_tests::{
    counter::Counters,
    netns::{Netns, die_together},
    node::plugin,
    patience,
    prelude::*,
    runtime::Conf,
    traffic::serve,
};

use super::api::{AT, Api, Door};

/// The folder of networks, in each node's own `/run`.
const NET: &str = "/run/opt/net.d";
/// The folder of plugins.
const BIN: &str = "/run/opt/bin";
/// Where the agent serves health and metrics.
const HEALTH: &str = "127.0.0.1:9810";
/// What the agent says.
const LOG: &str = "/run/agent.log";
/// The number by which the agent knows its routes.
const PROTOCOL: &str = "117";

/// How long a change may take until it is everywhere: a client of the API that was refused a few times asks again after half a minute.
const SOON: Duration = Duration::from_mins(1);

/// The nodes of a cluster, and what connects them.
pub(super) struct Cluster {
    pub(super) api: Api,
    pub(super) members: Vec<Member>,
    /// The switch of each link, and the router between them.
    fabric: Netns,
}

/// A node, its agent and its pods' ranges.
pub(super) struct Member {
    pub(super) name: String,
    pub(super) node: Arc<Node>,
    pub(super) agent: Option<Agent>,
    link: u8,
    number: u8,
    _door: Door,
}

/// A running agent. It ends with this handle, or with the test.
pub(super) struct Agent {
    id: Pid,
    thread: Option<JoinHandle<()>>,
}

impl Agent {
    fn start(mut command: Command, netns: &Netns) -> Result<Self> {
        let (started, id) = mpsc::channel();
        let netns = netns.clone();
        // It dies with the thread that started it.
        let thread = thread::spawn(move || {
            netns.run(|| {
                let child = die_together(&mut command).stdin(Stdio::null()).spawn();
                let id = child.as_ref().map(Child::id).map_err(ToString::to_string);
                let _ = started.send(id);
                let _ = child.map(|mut child| child.wait());
            });
        });
        let id = id.recv()?.map_err(anyhow::Error::msg);
        Ok(Self {
            id: Pid::from_raw(id.context("start the agent")?.cast_signed()),
            thread: Some(thread),
        })
    }

    fn end(&mut self, signal: Signal) {
        if let Some(thread) = self.thread.take() {
            // The thread waits for it, so the number is still its own.
            let _ = kill(self.id, signal);
            let _ = thread.join();
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.end(Signal::SIGKILL);
    }
}

impl Cluster {
    /// A cluster with a node for each entry, on the link with that number (0 or 1). Agents run on all of them.
    pub(super) fn new(links: &[u8]) -> Result<Self> {
        let mut cluster = Self::idle(links)?;
        for member in &mut cluster.members {
            member.start_agent()?;
        }
        Ok(cluster)
    }

    /// As [`Self::new`], without agents.
    pub(super) fn idle(places: &[u8]) -> Result<Self> {
        let api = Api::default();
        let fabric = Netns::isolated("fabric")?;
        let mut lines = Vec::new();
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
            cluster.join(number, *link)?;
        }
        Ok(cluster)
    }

    fn join(&mut self, number: u8, link: u8) -> Result<()> {
        let node = Arc::new(Node::new()?);
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

    /// Adds a node on a link, and its agent.
    pub(super) fn grow(&mut self, link: u8) -> Result<()> {
        let number = self
            .members
            .iter()
            .map(|member| member.number)
            .max()
            .unwrap_or(0)
            + 1;
        self.join(number, link)?;
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

    /// Adds a pod on each node.
    pub(super) fn pods(&self) -> Result<Vec<Pod>> {
        self.members
            .iter()
            .map(|member| member.pod(&format!("pod-of-{}", member.name)))
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
        for member in &self.members {
            let counted = Counters::read(&member.node)?;
            for counter in [Counter::BypassWire, Counter::BypassPeer] {
                ensure!(
                    counted.get(counter) > 0,
                    "{}: no {}",
                    member.name,
                    counter.name()
                );
            }
        }
        Ok(())
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

impl Member {
    /// Starts the agent.
    pub(super) fn start_agent(&mut self) -> Result<()> {
        let kubeconfig = PathBuf::from("/run/kubeconfig");
        let text = format!(
            "apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster:\n    server: http://{AT}\n\
             contexts:\n- name: c\n  context:\n    cluster: c\n    user: u\ncurrent-context: c\nusers:\n- name: u\n  user: {{}}\n"
        );
        self.node.netns().run(|| fs::write(&kubeconfig, text))?;
        let mut command = Command::new(plugin().with_file_name("underpass-agent"));
        let log = self.node.netns().run(|| fs::File::create(LOG))?;
        command
            .env_clear()
            .stderr(log)
            .env("KUBECONFIG", kubeconfig)
            .args(["--node", &self.name, "--bin-dir", BIN, "--net-dir", NET])
            .args(["--resync", "2", "--listen", HEALTH]);
        self.agent = Some(Agent::start(command, self.node.netns())?);
        Ok(())
    }

    /// Ends the agent by a signal.
    pub(super) fn stop_agent(&mut self, signal: Signal) {
        if let Some(mut agent) = self.agent.take() {
            agent.end(signal);
        }
    }

    /// Waits until the agent says that it is ready.
    pub(super) fn is_ready(&self) -> Result<()> {
        eventually(&format!("{} is ready", self.name), || {
            let said = self.get("/readyz")?;
            ensure!(said.starts_with("HTTP/1.1 200"), "{said}");
            Ok(())
        })
    }

    /// Asks the agent by HTTP.
    pub(super) fn get(&self, path: &str) -> Result<String> {
        let at: SocketAddr = HEALTH.parse()?;
        self.node.netns().run(|| {
            use std::io::{Read as _, Write as _};
            let mut stream = std::net::TcpStream::connect(at)?;
            write!(stream, "GET {path} HTTP/1.1\r\nhost: agent\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        })
    }

    /// A pod of the network that the agent installed.
    pub(super) fn pod(&self, name: &str) -> Result<Pod> {
        self.is_ready()?;
        let text = self
            .node
            .netns()
            .run(|| fs::read(format!("{NET}/10-underpass.conflist")))?;
        let list: Value = serde_json::from_slice(&text)?;
        let conf = list["plugins"][0].as_object().context("a plugin")?.iter();
        let conf = conf.fold(Conf::new(&self.node), |conf, (key, value)| {
            conf.with(key, value.clone())
        });
        let conf = conf
            .with("name", list["name"].clone())
            .with("cniVersion", list["cniVersion"].clone());
        Pod::add(&self.node, name, &conf)
    }

    pub(super) fn address(&self, family: Family) -> IpAddr {
        outside(family, self.link, self.number)
    }

    /// What gives the uplink its addresses and default routes again.
    pub(super) fn readdress(&self) -> Vec<String> {
        let mut lines = vec![format!("address flush dev {} scope global", Node::UPLINK)];
        for family in Family::BOTH {
            lines.push(format!(
                "address add {} dev {} {}",
                cidr(family, self.link, self.number),
                Node::UPLINK,
                nodad(family)
            ));
            let gateway = outside(family, self.link, 254);
            lines.push(format!(
                "route replace {} via {gateway}",
                family.everywhere()
            ));
        }
        lines
    }

    /// Waits until the VXLAN device knows so many addresses behind it.
    pub(super) fn knows_neighbours(&self, count: usize) -> Result<()> {
        eventually("the neighbours behind VXLAN", || {
            let list = self.node.netns().ip_json(&[
                "neighbour",
                "show",
                "dev",
                "underpass-vxlan",
                "nud",
                "permanent",
            ])?;
            let known = list.as_array().context("a list")?.len();
            ensure!(known == count, "{list}");
            Ok(())
        })
    }

    fn addresses(&self) -> Vec<String> {
        Family::BOTH
            .map(|family| self.address(family).to_string())
            .to_vec()
    }

    pub(super) fn range(&self, family: Family) -> String {
        match family {
            V4 => format!("10.244.{}.0/24", self.number),
            V6 => format!("fd00:244:{}::/64", self.number),
        }
    }

    fn ranges(&self) -> Vec<String> {
        Family::BOTH.map(|family| self.range(family)).to_vec()
    }

    /// How this member's pods are reached from another one's, as [`Self::routes`] says it.
    fn route(&self, family: Family, from: &Self) -> String {
        let range = self.range(family);
        if self.number == from.number {
            format!("{range} unreachable")
        } else if self.link == from.link {
            format!("{range} via {} dev {}", self.address(family), Node::UPLINK)
        } else {
            let gateway = range.split('/').next().unwrap_or("");
            format!("{range} via {gateway} dev underpass-vxlan")
        }
    }

    /// Removes the routes of a family that have the agent's number.
    pub(super) fn flush(&self, family: Family) -> Result<()> {
        let family = if family == V4 { "-4" } else { "-6" };
        self.node.netns().expect(
            Command::new("ip").args([family, "route", "flush", "proto", PROTOCOL]),
            &[],
        )?;
        Ok(())
    }

    /// The routes that have the agent's number, by what the kernel says.
    pub(super) fn routes(&self) -> Result<BTreeSet<String>> {
        let mut routes = BTreeSet::new();
        for family in ["-4", "-6"] {
            let list = self
                .node
                .netns()
                .ip_json(&[family, "-d", "route", "show", "proto", PROTOCOL])?;
            for route in list.as_array().context("a list")? {
                let text = |key: &str| route[key].as_str().unwrap_or("?");
                routes.insert(if text("type") == "unreachable" {
                    format!("{} unreachable", text("dst"))
                } else {
                    format!(
                        "{} via {} dev {}",
                        text("dst"),
                        text("gateway"),
                        text("dev")
                    )
                });
            }
        }
        Ok(routes)
    }
}

/// Tries until it holds, or for too long.
pub(super) fn eventually(what: &str, mut holds: impl FnMut() -> Result<()>) -> Result<()> {
    let end = Instant::now() + patience::here(SOON);
    loop {
        match holds() {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > end => return Err(error.context(what.to_owned())),
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// A node's address on a link.
fn outside(family: Family, link: u8, number: u8) -> IpAddr {
    match family {
        V4 => IpAddr::from([198, 18, 10 + link, number]),
        V6 => IpAddr::from([
            0x2001,
            0xdb8,
            10 + u16::from(link),
            0,
            0,
            0,
            0,
            u16::from(number),
        ]),
    }
}

fn cidr(family: Family, link: u8, number: u8) -> String {
    format!(
        "{}/{}",
        outside(family, link, number),
        if family == V4 { 24 } else { 64 }
    )
}

fn nodad(family: Family) -> &'static str {
    if family == V4 { "" } else { "nodad" }
}

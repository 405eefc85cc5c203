//! A node of a cluster: where it is, the agent on it, and what that made of it.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, SocketAddr},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    process::Command,
    sync::Arc,
    thread::sleep,
    time::Duration,
};

use ipnet::IpNet;
use nix::sys::signal::Signal;
use serde_json::Value;
use underpass_tests::{node::plugin, prelude::*, runtime::Conf};

use super::{
    agent::Agent,
    api::{AT, Door, TOKEN},
};

/// The agent's kubeconfig.
pub(super) const CREDENTIALS: &str = "/run/kubeconfig";

/// The folder of networks, in each node's own `/run`.
pub(super) const NET: &str = "/run/opt/net.d";
/// The folder of plugins.
pub(super) const BIN: &str = "/run/opt/bin";
/// Where the agent serves health and metrics.
pub(super) const HEALTH: &str = "127.0.0.1:9810";
/// What the agent says.
pub(super) const LOG: &str = "/run/agent.log";
/// The agent's VXLAN device.
pub(super) const TUNNEL: &str = "underpass-vxlan";
/// The number by which the agent knows its routes.
const PROTOCOL: &str = "117";

/// A node, its agent and its pods' ranges.
pub(super) struct Member {
    pub(super) name: String,
    pub(super) node: Arc<Node>,
    pub(super) agent: Option<Agent>,
    /// The executable that the agent installs, if it is another than the one beside it.
    pub(super) build: Option<PathBuf>,
    /// Of its addresses the API names that of this family first.
    pub(super) outside: Family,
    pub(super) link: u8,
    pub(super) number: u8,
    pub(super) _door: Door,
}

impl Member {
    /// Starts the agent.
    pub(super) fn start_agent(&mut self) -> Result<()> {
        self.start_agent_with(&["--resync", "2"])
    }

    /// Starts the agent with these options.
    pub(super) fn start_agent_with(&mut self, options: &[&str]) -> Result<()> {
        let log = self.node.netns().run(|| fs::File::create(LOG))?;
        let mut command = self.command(options)?;
        command.stderr(log);
        self.agent = Some(Agent::start(command, self.node.netns())?);
        Ok(())
    }

    /// Has the agent run underpass by a script that does these lines first.
    pub(super) fn interpose(&mut self, lines: &str) -> Result<()> {
        let path = PathBuf::from("/run/interposed");
        let script = format!("#!/bin/sh\n{lines}\nexec {} \"$@\"\n", plugin().display());
        self.node.netns().run(|| {
            fs::write(&path, script)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
        })?;
        self.build = Some(path);
        Ok(())
    }

    /// Says where the API is, and by which token the agent may use it.
    pub(super) fn write_credentials(&self, token: &str) -> Result<()> {
        let text = format!(
            "apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster:\n    server: http://{AT}\n\
             contexts:\n- name: c\n  context:\n    cluster: c\n    user: u\ncurrent-context: c\n\
             users:\n- name: u\n  user:\n    token: {token}\n"
        );
        self.node.netns().run(|| fs::write(CREDENTIALS, text))?;
        Ok(())
    }

    /// The agent's command with these options.
    pub(super) fn command(&self, options: &[&str]) -> Result<Command> {
        self.write_credentials(TOKEN)?;
        let mut command = Command::new(plugin().with_file_name("underpass-agent"));
        command
            .env_clear()
            .env("KUBECONFIG", CREDENTIALS)
            .args(["--node", &self.name, "--bin-dir", BIN, "--net-dir", NET])
            .args(["--listen", HEALTH])
            .args(options);
        if let Some(build) = &self.build {
            command.arg("--underpass").arg(build);
        }
        Ok(command)
    }

    /// The agent, which runs.
    pub(super) fn running(&self) -> Result<&Agent> {
        self.agent.as_ref().context("no agent runs")
    }

    /// Waits until the agent has ended by itself.
    pub(super) fn await_end(&self) -> Result<()> {
        eventually(&format!("the agent of {} ends", self.name), || {
            ensure!(self.running()?.has_ended(), "{}", self.log()?);
            Ok(())
        })
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

    /// A number of the agent's own metrics.
    pub(super) fn metric(&self, name: &str) -> Result<u64> {
        let said = self.get("/metrics")?;
        let mut lines = said.lines();
        let value =
            lines.find_map(|line| line.strip_prefix("underpass_agent_")?.strip_prefix(name));
        let value = value.with_context(|| format!("no {name} in {said}"))?;
        Ok(value.trim().parse()?)
    }

    /// Waits until the agent has compared a few times more: what it would do, it has done.
    pub(super) fn compares(&self) -> Result<()> {
        let before = self.metric("syncs_total")?;
        eventually("three comparisons", || {
            let now = self.metric("syncs_total")?;
            ensure!(now >= before + 3, "{now} after {before}");
            Ok(())
        })
    }

    /// Waits until the agent has compared nothing for a while and runs no command, and will not unless something happens.
    pub(super) fn rests(&self) -> Result<()> {
        eventually("no comparison", || {
            let before = self.metric("syncs_total")?;
            sleep(Duration::from_secs(1));
            let now = self.metric("syncs_total")?;
            ensure!(now == before, "{now} after {before}");
            let commands = self.running()?.commands()?;
            ensure!(commands.is_empty(), "it runs {commands:?}");
            Ok(())
        })
    }

    /// What the agent has said.
    pub(super) fn log(&self) -> Result<String> {
        self.node.netns().run(|| Ok(fs::read_to_string(LOG)?))
    }

    /// A pod of the network that the agent installed.
    pub(super) fn pod(&self, name: &str) -> Result<Pod> {
        Pod::add(&self.node, name, &self.conf()?)
    }

    /// The network that the agent installed.
    pub(super) fn conf(&self) -> Result<Conf> {
        self.is_ready()?;
        let list = self.conflist()?.context("there is no conflist")?;
        let conf = list["plugins"][0].as_object().context("a plugin")?.iter();
        let conf = conf.fold(Conf::new(&self.node), |conf, (key, value)| {
            conf.with(key, value.clone())
        });
        Ok(conf
            .with("name", list["name"].clone())
            .with("cniVersion", list["cniVersion"].clone()))
    }

    /// The conflist, which must be one if there is any.
    pub(super) fn conflist(&self) -> Result<Option<Value>> {
        self.read(&format!("{NET}/10-underpass.conflist"))?
            .map(|text| serde_json::from_slice(&text).context("the conflist is no JSON"))
            .transpose()
    }

    /// Waits until the network has pods keep their addresses on the way to these ranges.
    pub(super) fn keeps_source_to(&self, ranges: &[String]) -> Result<()> {
        let ranges: Vec<IpNet> = ranges
            .iter()
            .map(|range| Ok(range.parse()?))
            .collect::<Result<_>>()?;
        eventually(&format!("the network of {}", self.name), || {
            let conflist = self.conflist()?.context("no conflist")?;
            let said = conflist["plugins"][0]["nonMasqueradeCIDRs"].clone();
            let kept: Vec<IpNet> = serde_json::from_value(said)?;
            let is_kept = |range| kept.iter().any(|kept| kept.contains(range));
            ensure!(ranges.iter().all(is_kept), "{kept:?} of {ranges:?}");
            Ok(())
        })
    }

    /// Reads a file of the node, if it is there.
    pub(super) fn read(&self, path: &str) -> Result<Option<Vec<u8>>> {
        self.node.netns().run(|| match fs::read(path) {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("read {path}")),
        })
    }

    /// Names the files of a folder of the node; none, where it is not there.
    pub(super) fn names(&self, folder: &str) -> Result<BTreeSet<String>> {
        self.node.netns().run(|| {
            let entries = fs::read_dir(folder).into_iter().flatten();
            entries
                .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
                .collect()
        })
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
            let gateway = self.gateway(family);
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
                TUNNEL,
                "nud",
                "permanent",
            ])?;
            let known = list.as_array().context("a list")?.len();
            ensure!(known == count, "{list}");
            Ok(())
        })
    }

    pub(super) fn addresses(&self) -> Vec<String> {
        let mut families = Family::BOTH;
        families.sort_by_key(|family| *family != self.outside);
        families
            .map(|family| self.address(family).to_string())
            .to_vec()
    }

    /// The world's address on its link.
    pub(super) fn gateway(&self, family: Family) -> IpAddr {
        outside(family, self.link, 254)
    }

    /// Waits until its VXLAN device sends from this address, or from none in particular.
    pub(super) fn sends_from(&self, address: Option<&str>) -> Result<()> {
        eventually(&format!("a device that sends from {address:?}"), || {
            let arguments = ["-d", "link", "show", "dev", TUNNEL];
            let device = self.node.netns().ip_json(&arguments)?;
            let data = &device[0]["linkinfo"]["info_data"];
            let mut local = ["local", "local6"]
                .iter()
                .filter_map(|key| data[key].as_str());
            ensure!(data.is_object() && local.next() == address, "{data}");
            Ok(())
        })
    }

    /// The address of its VXLAN device.
    pub(super) fn tunnel_address(&self, family: Family) -> Result<IpAddr> {
        let range = self.range(family);
        let (address, _) = range.split_once('/').context("a range")?;
        Ok(address.parse()?)
    }

    pub(super) fn range(&self, family: Family) -> String {
        match family {
            V4 => format!("10.244.{}.0/24", self.number),
            V6 => format!("fd00:244:{}::/64", self.number),
        }
    }

    pub(super) fn ranges(&self) -> Vec<String> {
        Family::BOTH.map(|family| self.range(family)).to_vec()
    }

    /// How this member's pods are reached from another one's, as [`Self::routes`] says it.
    pub(super) fn route(&self, family: Family, from: &Self) -> String {
        let range = self.range(family);
        if self.number == from.number {
            format!("{range} unreachable")
        } else if self.link == from.link {
            format!("{range} via {} dev {}", self.address(family), Node::UPLINK)
        } else {
            let gateway = range.split('/').next().unwrap_or("");
            format!("{range} via {gateway} dev {TUNNEL}")
        }
    }

    /// Waits until it has a direct route to each of these ranges, by the address at the same place.
    pub(super) fn learns(&self, ranges: &[String], via: &[String]) -> Result<()> {
        eventually("direct routes", || {
            let routes = self.routes()?;
            for (range, via) in ranges.iter().zip(via) {
                let route = format!("{range} via {via} dev {}", Node::UPLINK);
                ensure!(routes.contains(&route), "{route}: {routes:?}");
            }
            Ok(())
        })
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

    /// The routes to ranges that have the agent's number, by what the kernel says. Those to the gateways of others are left out.
    pub(super) fn routes(&self) -> Result<BTreeSet<String>> {
        let mut routes = BTreeSet::new();
        for family in ["-4", "-6"] {
            let list = self
                .node
                .netns()
                .ip_json(&[family, "-d", "route", "show", "proto", PROTOCOL])?;
            for route in list.as_array().context("a list")? {
                let text = |key: &str| route[key].as_str().unwrap_or("?");
                if !text("dst").contains('/') {
                    continue;
                }
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

/// A node's address on a link.
pub(super) fn outside(family: Family, link: u8, number: u8) -> IpAddr {
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

pub(super) fn cidr(family: Family, link: u8, number: u8) -> String {
    format!(
        "{}/{}",
        outside(family, link, number),
        if family == V4 { 24 } else { 64 }
    )
}

pub(super) fn nodad(family: Family) -> &'static str {
    if family == V4 { "" } else { "nodad" }
}

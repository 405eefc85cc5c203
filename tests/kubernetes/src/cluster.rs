//! The cluster, and what connects its nodes.
//!
//! ```text
//!   control   node1   node2           node3
//!      |        |       |               |
//!   ===+========+=======+== router =====+===     link 0, link 1
//! ```

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use underpass_tests::{netns::Netns, prelude::*};

use crate::{
    control::Control,
    eventually,
    member::Member,
    pod::{Pod, Wish},
    ranges,
};

/// The number of the control plane on link 0.
const CONTROL: u8 = 100;
/// The number of the router on each link.
const ROUTER: u8 = 254;

/// Everything that runs.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) members: Vec<Member>,
    pub(crate) control: Control,
    /// The switch of each link, and the router between them: for nodes it is the world.
    pub(crate) world: Netns,
}

impl Cluster {
    /// Starts a cluster with a node for each entry, on the link with that number (0 or 1). No agent runs.
    pub(crate) fn start(links: &[u8]) -> Result<Self> {
        let world = fabric()?;
        let machine = machine(&world, "control", 0, CONTROL)?;
        let names: Vec<String> = (1..=links.len())
            .map(|number| format!("node{number}"))
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let address = ranges::node(V4, 0, CONTROL).to_string();
        let control = Control::start(&machine, &address, &names)?;
        let mut members = Vec::new();
        for (number, &link) in (1..).zip(links) {
            let node = machine_of_pods(&world, number, link)?;
            let mut member = Member::new(&control, node, link, number)?;
            member.start()?;
            members.push(member);
        }
        Ok(Self {
            members,
            control,
            world,
        })
    }

    /// The node with that name.
    pub(crate) fn member(&self, name: &str) -> Result<&Member> {
        let mut members = self.members.iter();
        members
            .find(|member| member.name == name)
            .with_context(|| format!("there is no {name}"))
    }

    /// Waits for a pod on each node, in the order of the nodes.
    pub(crate) fn pods(&self) -> Result<Vec<Pod>> {
        let name = |member: &Member| format!("on-{}", member.name);
        let wishes: Vec<Wish> = self
            .members
            .iter()
            .map(|member| Wish::new(&name(member), &member.name))
            .collect();
        Pod::start(self, &wishes)
    }

    /// What the API says about a node.
    pub(crate) fn node(&self, name: &str) -> Result<Value> {
        self.control.get(&["node", name])
    }

    /// Waits until a condition of a node has that status: its message.
    pub(crate) fn condition(&self, name: &str, kind: &str, status: &str) -> Result<String> {
        let mut said = String::new();
        eventually(&format!("{kind} of {name} is {status}"), || {
            let node = self.node(name)?;
            let mut conditions = node["status"]["conditions"]
                .as_array()
                .into_iter()
                .flatten();
            let condition = conditions
                .find(|condition| condition["type"] == kind)
                .with_context(|| format!("{name} has no such condition yet"))?;
            condition["message"]
                .as_str()
                .unwrap_or_default()
                .clone_into(&mut said);
            ensure!(condition["status"] == status, "{condition}");
            Ok(())
        })?;
        Ok(said)
    }

    /// Takes away what a check has left that failed.
    pub(crate) fn clear(&self) -> Result<()> {
        let all = ["delete", "pods,services", "--all", "--wait=false"];
        self.control.kubectl(&all).map(drop)?;
        eventually("no pod is left", || {
            let pods = self.control.get(&["pods"])?;
            let left = pods["items"].as_array().map_or(0, Vec::len);
            ensure!(left == 0, "{left} pods are left");
            Ok(())
        })
    }

    /// What each part said last, for who looks for the reason of a failure.
    pub(crate) fn last_words(&self) -> String {
        let mut said: Vec<String> = self.members.iter().map(Member::last_words).collect();
        said.push(self.control.last_words());
        said.join("\n\n")
    }

    /// Ends all of it; fails if anything is left.
    pub(crate) fn destroy(self) -> Result<()> {
        self.members.into_iter().try_for_each(Member::destroy)?;
        self.control.destroy()
    }
}

/// The address by which the world talks to the nodes on a link.
pub(crate) fn router(family: Family, link: u8) -> std::net::IpAddr {
    ranges::node(family, link, ROUTER)
}

fn fabric() -> Result<Netns> {
    let fabric = Netns::isolated("fabric")?;
    let mut lines = Vec::new();
    for link in 0..2 {
        lines.push(format!("link add br{link} type bridge"));
        lines.push(format!("link set br{link} up"));
        lines.extend(addresses(&format!("br{link}"), link, ROUTER));
    }
    fabric.ip(&lines)?;
    fabric.set_sysctl("net/ipv4/ip_forward", "1")?;
    fabric.set_sysctl("net/ipv6/conf/all/forwarding", "1")?;
    Ok(fabric)
}

/// A machine on a link, whose default routes lead to the router.
fn machine(fabric: &Netns, port: &str, link: u8, number: u8) -> Result<Arc<Node>> {
    let node = Arc::new(Node::unloaded()?);
    let netns = node.netns();
    fabric.cable(port, netns, Node::UPLINK, 1500)?;
    fabric.ip(&[format!("link set {port} master br{link}")])?;
    let mut lines = addresses(Node::UPLINK, link, number);
    for family in Family::BOTH {
        let router = ranges::node(family, link, ROUTER);
        lines.push(format!("route add {} via {router}", family.everywhere()));
    }
    netns.ip(&lines)?;
    Ok(node)
}

/// A machine as those who set up a Kubernetes prepare it.
fn machine_of_pods(fabric: &Netns, number: u8, link: u8) -> Result<Arc<Node>> {
    let node = machine(fabric, &format!("node{number}"), link, number)?;
    node.netns().set_sysctl("net/ipv4/ip_forward", "1")?;
    node.netns()
        .set_sysctl("net/ipv6/conf/all/forwarding", "1")?;
    Ok(node)
}

fn addresses(device: &str, link: u8, number: u8) -> Vec<String> {
    let add = |family| {
        let nodad = if family == V4 { "" } else { "nodad" };
        format!(
            "address add {} dev {device} {nodad}",
            ranges::on_link(family, link, number)
        )
    };
    Family::BOTH.map(add).to_vec()
}

//! Everything beyond the node's uplink: its gateway, and servers behind it.

use std::{
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use crate::{Family, Node, netns::Netns, patience, wire::Wire};

/// The world around one node. It knows no route to pods unless a test gives it one.
#[derive(Debug)]
pub struct World {
    netns: Netns,
}

impl World {
    /// The world's end of the node's uplink.
    pub const LINK: &str = "eth0";

    /// Connects a node to a new world by a pair of such devices with this MTU, in bytes.
    pub fn beyond(node: &Node, wire: Wire, mtu: u32) -> Result<Self> {
        let netns = node.netns().sibling("world")?;
        wire.connect([node.netns(), &netns], [Node::UPLINK, Self::LINK], mtu)?;
        let mut theirs = Vec::new();
        let mut ours = Vec::new();
        for family in Family::BOTH {
            let (bits, host) = (family.link_bits(), family.host_bits());
            let dad = nodad(family);
            theirs.push(format!(
                "address add {}/{bits} dev {} {dad}",
                family.gateway(),
                Self::LINK
            ));
            for server in [family.remote(), family.other_remote()] {
                theirs.push(format!("address add {server}/{host} dev lo {dad}"));
            }
            ours.push(format!(
                "address add {}/{bits} dev {} {dad}",
                family.node(),
                Node::UPLINK
            ));
            ours.push(format!(
                "route add {} via {} dev {}",
                family.everywhere(),
                family.gateway(),
                Node::UPLINK
            ));
        }
        netns.ip(&theirs)?;
        node.netns().ip(&ours)?;
        settle(&netns, Family::V6.gateway())?;
        settle(node.netns(), Family::V6.node())?;
        Ok(Self { netns })
    }

    /// Its network namespace.
    #[must_use]
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Gives the world routes to the pods' ranges by way of the node: pods that need no masquerade.
    pub fn route_pods(&self) -> Result<()> {
        self.netns.ip(&Family::BOTH
            .map(|family| format!("route add {} via {}", family.pods(), family.node())))
    }
}

/// Waits until the kernel delivers packets to an IPv6 address: it makes the route for that a while after the address, even where no
/// duplicate is looked for.
fn settle(netns: &Netns, addr: IpAddr) -> Result<()> {
    let deadline = Instant::now() + patience::here(Duration::from_secs(10));
    loop {
        // In any table: that of a VRF is not asked about by a look-up.
        let routes = netns.ip_json(&["-6", "route", "show", "table", "all", "type", "local"])?;
        let mut routes = routes.as_array().into_iter().flatten();
        if routes.any(|route| route["dst"] == addr.to_string()) {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{addr} has no local route in {}",
            netns.name()
        );
        thread::sleep(Duration::from_millis(5));
    }
}

fn nodad(family: Family) -> &'static str {
    match family {
        Family::V4 => "",
        Family::V6 => "nodad",
    }
}

//! Everything beyond the node's uplink: its gateway, and servers behind it.

use std::{
    fs,
    net::{IpAddr, Ipv6Addr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use crate::{Family, Node, netns::Netns, patience, rtnl::Route, wire::Wire};

/// Of the node, and of the world. The kernel gives a device an address of its own up to a second after it is up (linkwatch), and has
/// none to ask for a neighbour with until then where a packet's source is not the device's: that of a pod, that of a server.
const LINK_LOCAL: [IpAddr; 2] = [
    IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1)),
];

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
        netns.rtnl(|world| {
            world.add_address(Self::LINK, LINK_LOCAL[1], 64)?;
            for family in Family::BOTH {
                world.add_address(Self::LINK, family.gateway(), family.link_bits())?;
                for server in [family.remote(), family.other_remote()] {
                    world.add_address("lo", server, family.host_bits())?;
                }
            }
            Ok(())
        })?;
        node.netns().rtnl(|node| {
            node.add_address(Node::UPLINK, LINK_LOCAL[0], 64)?;
            for family in Family::BOTH {
                node.add_address(Node::UPLINK, family.node(), family.link_bits())?;
                let route = Route::default(family).via(family.gateway());
                node.add_route(route.by(Node::UPLINK))?;
            }
            Ok(())
        })?;
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
        self.netns.rtnl(|rtnl| {
            let mut routes = Family::BOTH.map(|family| Route::to(family.pods()).via(family.node()));
            routes
                .iter_mut()
                .try_for_each(|route| rtnl.add_route(*route))
        })
    }
}

/// Waits until the kernel delivers packets to an IPv6 address: it makes the route for that a while after the address, even where no
/// duplicate is looked for.
pub(crate) fn settle(netns: &Netns, addr: IpAddr) -> Result<()> {
    let IpAddr::V6(addr) = addr else {
        return Ok(());
    };
    let deadline = Instant::now() + patience::here(Duration::from_secs(10));
    loop {
        // All tables are in there: that of a VRF is not asked about by a look-up.
        let routes = netns
            .run(|| fs::read_to_string("/proc/thread-self/net/ipv6_route"))
            .context("list the IPv6 routes")?;
        if routes.lines().any(|route| is_local(route, addr)) {
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

/// Columns: destination, its prefix length, source, its prefix length, next hop, metric, references, uses, flags, device; all of them
/// hexadecimal.
fn is_local(route: &str, addr: Ipv6Addr) -> bool {
    const RTF_LOCAL: u32 = 0x8000_0000;
    let columns: Vec<&str> = route.split_ascii_whitespace().collect();
    let flags = columns.get(8).map(|flags| u32::from_str_radix(flags, 16));
    columns.first() == Some(&format!("{:032x}", u128::from(addr)).as_str())
        && columns.get(1) == Some(&"80")
        && matches!(flags, Some(Ok(flags)) if flags & RTF_LOCAL != 0)
}

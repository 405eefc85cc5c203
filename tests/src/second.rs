//! A second uplink of a node, to the same world: another network card, or a tunnel.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::Result;

use crate::{Family, Lab, Node, rtnl::Route, tun::Tunnel, wire::Wire, world};

/// What a second uplink is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A device of its own.
    Wire(Wire),
    /// A device without Ethernet headers that every kernel has.
    Tunnel,
}

/// A second uplink. A tunnel ends with it.
#[derive(Debug)]
pub struct Second {
    _tunnel: Option<Tunnel>,
}

impl Second {
    /// The name of both its ends.
    pub const LINK: &str = "eth1";

    /// Connects node and world once more. Nothing is routed by it unless a test does so.
    pub fn connect(lab: &Lab, kind: Kind) -> Result<Self> {
        let ends = [lab.node.netns(), lab.world.netns()];
        let tunnel = match kind {
            Kind::Wire(wire) => {
                wire.connect(ends, [Self::LINK; 2], 1500)?;
                None
            }
            Kind::Tunnel => Some(Tunnel::dig(ends, Self::LINK, 1500)?),
        };
        for (end, own) in ends.into_iter().zip([Self::node, Self::gateway]) {
            end.rtnl(|rtnl| {
                rtnl.set_up(Self::LINK)?;
                Family::BOTH.into_iter().try_for_each(|family| {
                    rtnl.add_address(Self::LINK, own(family), family.link_bits())
                })
            })?;
            world::settle(end, own(Family::V6))?;
        }
        Ok(Self { _tunnel: tunnel })
    }

    /// The node's address on it.
    #[must_use]
    pub const fn node(family: Family) -> IpAddr {
        address(family, 2)
    }

    /// The world's address on it.
    #[must_use]
    pub const fn gateway(family: Family) -> IpAddr {
        address(family, 1)
    }

    /// The next hop of the node by way of it, as `ip route` has it.
    #[must_use]
    pub fn way(family: Family) -> String {
        format!("via {} dev {}", Self::gateway(family), Self::LINK)
    }

    /// The next hop of the node by way of its first uplink.
    #[must_use]
    pub fn other_way(family: Family) -> String {
        format!("via {} dev {}", family.gateway(), Node::UPLINK)
    }

    /// Has the node leave by both uplinks.
    pub fn share(lab: &Lab) -> Result<()> {
        lab.node.netns().ip(&Family::BOTH.map(|family| {
            format!(
                "route replace {} nexthop {} nexthop {}",
                family.everywhere(),
                Self::other_way(family),
                Self::way(family)
            )
        }))
    }

    /// Has the world answer pods by this uplink.
    pub fn answer(lab: &Lab) -> Result<()> {
        lab.world.netns().rtnl(|rtnl| {
            Family::BOTH.into_iter().try_for_each(|family| {
                let route = Route::to(family.pods()).via(Self::node(family));
                rtnl.replace_route(route.by(Self::LINK))
            })
        })
    }
}

const fn address(family: Family, last: u8) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::new(198, 18, 3, last)),
        Family::V6 => IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, last as u16)),
    }
}

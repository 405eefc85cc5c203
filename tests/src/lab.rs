//! A node and a world, connected: where nearly every test starts.

use std::{net::IpAddr, sync::Arc};

use anyhow::Result;

use crate::{
    Node, Pod, frame::Ends, netfilter::Netfilter, runtime::Conf, wire::Wire, world::World,
};

/// A node with one uplink to a world, and a strict firewall.
#[derive(Debug)]
pub struct Lab {
    /// The firewall of that node.
    pub firewall: Netfilter,
    /// The host of containers.
    pub node: Arc<Node>,
    /// What is beyond its uplink.
    pub world: World,
}

impl Lab {
    /// A lab with an ordinary Ethernet MTU.
    pub fn new() -> Result<Self> {
        Self::with_mtu(1500)
    }

    /// A lab without any firewall, and so without connection tracking.
    pub fn open() -> Result<Self> {
        Self::open_with_mtu(1500)
    }

    /// As [`Self::open`], and the uplink has this MTU, in bytes.
    pub fn open_with_mtu(mtu: u32) -> Result<Self> {
        Self::open_over(Wire::Ethernet, mtu)
    }

    /// As [`Self::open_with_mtu`], and the uplink is such a device.
    pub fn open_over(wire: Wire, mtu: u32) -> Result<Self> {
        let node = Arc::new(Node::new()?);
        Ok(Self {
            world: World::beyond(&node, wire, mtu)?,
            firewall: Netfilter::none(&node),
            node,
        })
    }

    /// A lab whose uplink has this MTU, in bytes.
    pub fn with_mtu(mtu: u32) -> Result<Self> {
        Self::over(Wire::Ethernet, mtu)
    }

    /// A lab whose uplink is such a device, with this MTU, in bytes.
    pub fn over(wire: Wire, mtu: u32) -> Result<Self> {
        Self::around(Node::new()?, wire, mtu)
    }

    /// An ordinary lab for tests about what is loaded and when.
    pub fn unloaded() -> Result<Self> {
        Self::around(Node::unloaded()?, Wire::Ethernet, 1500)
    }

    /// Another ordinary lab, whose node has the same mounts as this one's.
    pub fn beside(&self) -> Result<Self> {
        Self::around(self.node.beside()?, Wire::Ethernet, 1500)
    }

    fn around(node: Node, wire: Wire, mtu: u32) -> Result<Self> {
        let world = World::beyond(&node, wire, mtu)?;
        let node = Arc::new(node);
        Ok(Self {
            firewall: Netfilter::new(&node)?,
            node,
            world,
        })
    }

    /// A pod of the default network.
    pub fn pod(&self, name: &str) -> Result<Pod> {
        self.pod_with(name, &self.conf())
    }

    /// A pod of the network that `conf` describes.
    pub fn pod_with(&self, name: &str, conf: &Conf) -> Result<Pod> {
        Pod::add(&self.node, name, conf)
    }

    /// Both ends of a frame that the world sends to its gateway's neighbour, the node.
    pub fn ends_from_world(&self, src: IpAddr, dst: IpAddr) -> Result<Ends> {
        Ok(Ends {
            src_mac: self.world.netns().mac(World::LINK)?,
            dst_mac: self.node.netns().mac(Node::UPLINK)?,
            src,
            dst,
        })
    }

    /// The default network.
    #[must_use]
    pub fn conf(&self) -> Conf {
        Conf::new(&self.node)
    }
}

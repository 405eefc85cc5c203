//! The devices between a node and its world.

use std::process::Command;

use anyhow::{Result, bail};
use rtnetlink::{
    LinkBond, LinkBridge, LinkMacVlan, LinkMessageBuilder, LinkVlan, LinkVrf, LinkWireguard,
    packet_route::link::{BondMode, MacVlanMode},
};

use crate::{Family, kernel::Facility, netns::Netns};

/// What kind of device a node's uplink is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wire {
    /// A veth.
    Ethernet,
    /// A bridge of the node, of which a veth is a port.
    Bridge,
    /// A VLAN device on such a bridge, whose tagged packets netfilter is shown as well.
    BridgeVlan,
    /// A VLAN device on a veth that has no address.
    Vlan,
    /// A macvlan device on a veth that has no address.
    MacVlan,
    /// A bond of one veth.
    Bond,
    /// A WireGuard device; its packets travel by a veth.
    WireGuard,
    /// A veth in a VRF of the node. Containers are outside of it, so the node has a default route into it, and a rule that lets
    /// packets for containers out.
    Vrf,
}

const VLAN: u16 = 7;
/// The routing table of a VRF.
const TABLE: u32 = 100;
/// Before the rule that VRFs have, which is number 1000.
const RULE: u32 = 900;
/// Bytes that WireGuard adds to a packet at most.
const OVERHEAD: u32 = 80;
const LISTENS: u16 = 51_820;

/// Where WireGuard's packets travel.
const OUTSIDE: [&str; 2] = ["203.0.113.2", "203.0.113.1"];

impl Wire {
    /// The veth below a device, or at a bridge.
    pub const BELOW: &str = "below";

    /// True if this kernel lacks it; that is printed.
    pub fn is_missing(self) -> Result<bool> {
        match self {
            Self::Ethernet => Ok(false),
            Self::Bridge => Facility::BridgeNetfilter.is_missing(),
            Self::BridgeVlan => {
                Ok(Facility::BridgeNetfilter.is_missing()? || Facility::Vlan.is_missing()?)
            }
            Self::Vlan => Facility::Vlan.is_missing(),
            Self::MacVlan => Facility::MacVlan.is_missing(),
            Self::Bond => Facility::Bond.is_missing(),
            Self::WireGuard => Facility::WireGuard.is_missing(),
            Self::Vrf => Facility::Vrf.is_missing(),
        }
    }

    /// Makes devices of these names and this MTU, in bytes, in a node and a world, and connects them.
    pub(crate) fn connect(self, ends: [&Netns; 2], names: [&str; 2], mtu: u32) -> Result<()> {
        match self {
            Self::Ethernet => cable(ends, names, mtu)?,
            Self::Bridge => {
                let ([node, _], [own, other]) = (ends, names);
                cable(ends, [Self::BELOW, other], mtu)?;
                bridge(node, own, mtu)?;
            }
            Self::BridgeVlan => {
                let ([node, world], [own, other]) = (ends, names);
                cable(ends, [Self::BELOW; 2], mtu)?;
                bridge(node, "tagged", mtu)?;
                node.set_up("tagged")?;
                node.set_sysctl("net/bridge/bridge-nf-filter-vlan-tagged", "1")?;
                vlan(node, own, "tagged", mtu)?;
                vlan(world, other, Self::BELOW, mtu)?;
            }
            Self::Vlan => {
                cable(ends, [Self::BELOW; 2], mtu)?;
                for (end, name) in ends.iter().zip(names) {
                    vlan(end, name, Self::BELOW, mtu)?;
                }
            }
            Self::MacVlan => {
                let ([node, _], [own, other]) = (ends, names);
                cable(ends, [Self::BELOW, other], mtu)?;
                let below = node.ifindex(Self::BELOW)?;
                let device = LinkMacVlan::new(own, below, MacVlanMode::Bridge);
                node.rtnl(|rtnl| rtnl.add(device.mtu(mtu).build()))?;
            }
            Self::Bond => {
                let ([node, _], [own, other]) = (ends, names);
                cable(ends, [Self::BELOW, other], mtu)?;
                let device = LinkBond::new(own).mode(BondMode::ActiveBackup).miimon(100);
                node.rtnl(|rtnl| rtnl.add(device.mtu(mtu).build()))?;
                let bond = node.ifindex(own)?;
                // It takes nobody that is up.
                node.rtnl(|rtnl| {
                    rtnl.set(Self::BELOW, LinkMessageBuilder::down)?;
                    rtnl.set(Self::BELOW, |link| link.controller(bond))
                })?;
            }
            Self::WireGuard => {
                cable(ends, [Self::BELOW; 2], mtu + OVERHEAD)?;
                tunnel(ends, names, mtu)?;
            }
            Self::Vrf => {
                cable(ends, names, mtu)?;
                let [node, _] = ends;
                node.rtnl(|rtnl| rtnl.add(LinkVrf::new("red", TABLE).up().build()))?;
                let red = node.ifindex("red")?;
                node.rtnl(|rtnl| {
                    rtnl.set(names[0], |link| link.controller(red))?;
                    let mut families = Family::BOTH.into_iter();
                    families.try_for_each(|family| rtnl.add_rule_to_main(family.pods(), RULE))
                })?;
            }
        }
        for (end, name) in ends.iter().zip(names) {
            end.set_up(name)?;
        }
        Ok(())
    }
}

/// A veth pair, up.
fn cable(ends: [&Netns; 2], [here, there]: [&str; 2], mtu: u32) -> Result<()> {
    let [node, world] = ends;
    node.cable(here, world, there, mtu)
}

/// A bridge, of which [`Wire::BELOW`] is a port.
fn bridge(node: &Netns, name: &str, mtu: u32) -> Result<()> {
    // One that was given to it stays, whoever joins.
    let mac = node.mac(Wire::BELOW)?.to_vec();
    node.rtnl(|rtnl| rtnl.add(LinkBridge::new(name).mtu(mtu).address(mac).build()))?;
    let bridge = node.ifindex(name)?;
    node.rtnl(|rtnl| rtnl.set(Wire::BELOW, |link| link.controller(bridge)))
}

fn vlan(end: &Netns, name: &str, below: &str, mtu: u32) -> Result<()> {
    let below = end.ifindex(below)?;
    end.rtnl(|rtnl| rtnl.add(LinkVlan::new(name, below, VLAN).mtu(mtu).build()))
}

fn tunnel(ends: [&Netns; 2], names: [&str; 2], mtu: u32) -> Result<()> {
    let mut keys = Vec::new();
    for (end, own) in ends.iter().zip(OUTSIDE) {
        end.rtnl(|rtnl| rtnl.add_address(Wire::BELOW, own.parse()?, 24))?;
        let private = end.expect(Command::new("wg").arg("genkey"), &[])?;
        let public = end.expect(Command::new("wg").arg("pubkey"), private.as_bytes())?;
        keys.push((private, public));
    }
    let [node, world] = &keys[..] else {
        bail!("two ends have two keys");
    };
    for (at, (own, peer)) in [(node, world), (world, node)].into_iter().enumerate() {
        let (end, name) = (ends[at], names[at]);
        end.rtnl(|rtnl| rtnl.add(LinkWireguard::new(name).mtu(mtu).build()))?;
        let everything = Family::BOTH.map(Family::everywhere).join(", ");
        let config = format!(
            "[Interface]\nPrivateKey = {}\nListenPort = {LISTENS}\n\
             [Peer]\nPublicKey = {}\nAllowedIPs = {everything}\nEndpoint = {}:{LISTENS}\n",
            own.0.trim(),
            peer.1.trim(),
            OUTSIDE[1 - at],
        );
        end.expect(
            Command::new("wg").args(["setconf", name, "/proc/self/fd/0"]),
            config.as_bytes(),
        )?;
    }
    Ok(())
}

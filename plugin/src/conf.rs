//! The plugin's own keys of the network config, decoded into types that can't hold a wrong value.

use std::{
    net::IpAddr,
    num::NonZeroU16,
    path::{Path, PathBuf},
};

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::Value;
use underpass_cni::{Dns, Error, NetConf, Request, address, args::CniArgs};
use underpass_netlink::Mac;

use crate::glob::Glob;

pub mod bandwidth;
pub mod chained;
pub mod masquerade;
mod number;
pub mod port;

/// Where pins are unless the config says otherwise.
pub const BPF_ROOT: &str = "/sys/fs/bpf/underpass";
/// Smallest MTU that IPv4 works with, in bytes.
pub const MTU_MIN: u32 = 68;
/// Largest MTU of a veth, in bytes.
pub const MTU_MAX: u32 = 65_535;

/// When flows leave the host's stack.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bypass {
    /// From the second packet on, once the stack let the first through unchanged.
    #[default]
    Learned,
    /// Never.
    Off,
}

/// The kind of devices that carry a container's packets.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    #[default]
    /// A pair of veths, which every kernel has.
    Veth,
    /// A pair of netkits.
    Netkit,
    /// A netkit where the kernel has it.
    Auto,
}

/// Who takes known flows from the world off an uplink first.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Xdp {
    /// The program at tc.
    #[default]
    Off,
    /// One that the driver runs, where it can.
    Native,
    /// One that the kernel runs in the driver's place.
    Generic,
}

/// The rule for packets that a container sends in another's name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spoofing {
    /// Such packets are dropped.
    Dropped,
    /// Such packets pass.
    Allowed,
}

/// The rule for containers that change their MAC. Nobody but the host's end of its veth ever sees it, so
/// that harms nobody.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MacCheck {
    /// Frames with another MAC are dropped.
    On,
    /// Frames with any MAC pass.
    Off,
}

/// The rule for the source of traffic to the world.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Masquerade {
    /// It leaves with an address of the node.
    On,
    /// It leaves with the container's own address.
    Off,
}

/// The rule for the container's default route.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DefaultGateway {
    /// It leads through this interface.
    Add,
    /// It leads through this interface if the IPAM's routes say so.
    FromIpam,
}

/// The rule for duplicates of addresses that the container adds later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dad {
    /// The kernel looks for them.
    On,
    /// The kernel does not look.
    Off,
}

/// The rule for the node's connection tracking.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Conntrack {
    /// It takes TCP as the node's administrator has set it.
    AsItIs,
    /// It is made to take TCP of which it did not see all.
    Liberal,
}

/// What the network's config says: enough for GC, STATUS and commands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Conf {
    /// The devices that carry the container's packets.
    pub device: Device,
    /// The MTU in bytes; if it is not said, the smallest of the uplinks.
    pub mtu: Option<u32>,
    /// With whose address traffic to the world leaves.
    pub masquerade: Masquerade,
    /// Destinations that see the container's own address; if none are said, the ranges of its own addresses.
    pub non_masquerade: Option<Vec<IpNet>>,
    /// Names of uplinks; if none are said, they are found by their addresses and routes.
    pub uplinks: Option<Vec<Glob>>,
    /// What the world sees of masqueraded packets; at most one of a family.
    pub masquerade_addresses: Vec<IpAddr>,
    /// The number of flows of a container that may wait for their answer; if it is not said, the node decides.
    pub half_open_limit: Option<u32>,
    /// When flows leave the host's stack.
    pub bypass: Bypass,
    /// How the node's connection tracking takes TCP.
    pub conntrack: Conntrack,
    /// Who takes known flows from the world first.
    pub xdp: Xdp,
    /// What becomes of packets in another's name.
    pub spoofing: Spoofing,
    /// What becomes of frames with another MAC.
    pub mac_check: MacCheck,
    /// The UDP port of the tunnels between the nodes, which containers are kept out of before there is a device for them.
    pub tunnel_port: Option<NonZeroU16>,
    /// Where the container's default route leads.
    pub default_gateway: DefaultGateway,
    /// How the kernel treats addresses that the container adds later.
    pub dad: Dad,
    /// The folder on a bpffs where this node's pins are.
    pub bpf_root: PathBuf,
    /// Name servers; if none are said, the IPAM's.
    pub dns: Option<Dns>,
    /// The limits; none if no key says anything.
    pub bandwidth: Option<bandwidth::Bandwidth>,
}

/// What ADD and CHECK need to know: the network's config, and what the runtime asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AttachmentConf {
    /// The network's config, with name servers and limits as the attachment has them.
    pub network: Conf,
    /// The container's MAC; if it is not said, it follows from the attachment.
    pub mac: Option<Mac>,
    /// Host ports that lead to the container.
    pub ports: Vec<port::PortMapping>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the contract's keys, turned into enums at once"
)]
struct Keys {
    device: Option<Device>,
    mtu: i64,
    ip_masq: bool,
    ip_masq_backend: String,
    #[serde(rename = "nonMasqueradeCIDRs")]
    non_masquerade_cidrs: Option<Vec<String>>,
    masquerade_address: Option<Value>,
    max_half_open_flows: Option<i64>,
    uplinks: Option<Vec<String>>,
    bypass: Option<Bypass>,
    conntrack_liberal: bool,
    xdp: Option<Xdp>,
    anti_spoof: Option<bool>,
    macspoofchk: Option<bool>,
    tunnel_port: Option<i64>,
    is_default_gateway: bool,
    // A routed interface is a gateway, and sends packets back to where they came from, without
    // being told.
    #[serde(rename = "isGateway")]
    _is_gateway: bool,
    #[serde(rename = "hairpinMode")]
    _hairpin_mode: bool,
    enabledad: bool,
    bpf_root: String,
    // Keys of the bridge plugin that only a bridge can obey.
    promisc_mode: bool,
    force_address: bool,
    preserve_default_vlan: bool,
    port_isolation: bool,
    disable_container_interface: bool,
    vlan: i64,
    vlan_trunk: Vec<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RuntimeKeys {
    mac: String,
    dns: RuntimeDns,
    port_mappings: Vec<port::Entry>,
    bandwidth: Option<bandwidth::Keys>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RuntimeDns {
    servers: Vec<String>,
    searches: Vec<String>,
    options: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ArgsKeys {
    mac: String,
}

impl Conf {
    /// Decodes and checks everything that concerns the whole network.
    pub fn of_network(conf: &NetConf) -> Result<Self, Error> {
        refuse_eager(conf)?;
        let keys: Keys = conf.plugin()?;
        keys.refuse_unsupported()?;
        let anti_spoof = keys.anti_spoof.unwrap_or(true);
        Ok(Self {
            device: keys.device.unwrap_or_default(),
            mtu: number::mtu(keys.mtu)?,
            masquerade: if keys.ip_masq {
                Masquerade::On
            } else {
                Masquerade::Off
            },
            non_masquerade: keys
                .non_masquerade_cidrs
                .map(|list| list.iter().map(|text| destination(text)).collect())
                .transpose()?,
            masquerade_addresses: masquerade::addresses(keys.masquerade_address, keys.ip_masq)?,
            half_open_limit: keys
                .max_half_open_flows
                .map(number::half_open_limit)
                .transpose()?,
            uplinks: keys
                .uplinks
                .map(|list| list.into_iter().map(Glob::new).collect()),
            bypass: keys.bypass.unwrap_or_default(),
            conntrack: if keys.conntrack_liberal {
                Conntrack::Liberal
            } else {
                Conntrack::AsItIs
            },
            xdp: keys.xdp.unwrap_or_default(),
            spoofing: if anti_spoof {
                Spoofing::Dropped
            } else {
                Spoofing::Allowed
            },
            mac_check: if keys.macspoofchk.unwrap_or(anti_spoof) {
                MacCheck::On
            } else {
                MacCheck::Off
            },
            tunnel_port: keys.tunnel_port.map(number::tunnel_port).transpose()?,
            default_gateway: if keys.is_default_gateway {
                DefaultGateway::Add
            } else {
                DefaultGateway::FromIpam
            },
            dad: if keys.enabledad { Dad::On } else { Dad::Off },
            bpf_root: root(keys.bpf_root)?,
            dns: conf.dns()?,
            bandwidth: bandwidth::of_network(conf)?,
        })
    }

    /// Decodes the one key that DEL and GC need: nothing else of a config may keep them from
    /// cleaning up.
    pub fn bpf_root(conf: &NetConf) -> Result<PathBuf, Error> {
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct Root {
            bpf_root: String,
        }
        let keys: Root = conf.plugin()?;
        root(keys.bpf_root)
    }
}

impl AttachmentConf {
    /// Decodes and checks everything that concerns one attachment.
    pub fn of(request: &Request) -> Result<Self, Error> {
        let mut network = Conf::of_network(&request.conf)?;
        let runtime: RuntimeKeys = request.conf.runtime()?;
        let ports = port::mappings(&runtime.port_mappings)?;
        if let (None, Some(keys)) = (network.bandwidth, runtime.bandwidth) {
            network.bandwidth = Some(keys.limits("runtimeConfig.bandwidth.")?);
        }
        let RuntimeDns {
            servers,
            searches,
            options,
        } = runtime.dns;
        if !(servers.is_empty() && searches.is_empty() && options.is_empty()) {
            network.dns = Some(Dns {
                nameservers: servers,
                search: searches,
                options,
                domain: network.dns.map(|dns| dns.domain).unwrap_or_default(),
            });
        }
        let args = CniArgs::parse(&request.attachment.args)?;
        args.require_known(&["IP", "GATEWAY", "MAC"])?;
        let args_cni: ArgsKeys = request.conf.args_cni()?;
        let sources = [
            ("runtimeConfig.mac", runtime.mac.as_str()),
            ("args.cni.mac", &args_cni.mac),
            ("MAC of CNI_ARGS", args.get("MAC").unwrap_or_default()),
        ];
        let asked = sources.into_iter().find(|(_, text)| !text.is_empty());
        Ok(Self {
            network,
            mac: asked.map(|(key, text)| mac(key, text)).transpose()?,
            ports,
        })
    }
}

impl Keys {
    fn refuse_unsupported(&self) -> Result<(), Error> {
        let flags = [
            ("promiscMode", self.promisc_mode),
            ("forceAddress", self.force_address),
            ("preserveDefaultVlan", self.preserve_default_vlan),
            ("portIsolation", self.port_isolation),
            (
                "disableContainerInterface",
                self.disable_container_interface,
            ),
        ];
        if let Some((key, _)) = flags.into_iter().find(|(_, set)| *set) {
            return Err(Error::unsupported(key, true));
        }
        if self.vlan != 0 {
            return Err(Error::unsupported("vlan", self.vlan));
        }
        if !self.vlan_trunk.is_empty() {
            let value = Value::Array(self.vlan_trunk.clone());
            return Err(Error::unsupported("vlanTrunk", value));
        }
        // Both mean the same here: the eBPF programs do it.
        if !matches!(self.ip_masq_backend.as_str(), "" | "iptables" | "nftables") {
            return Err(Error::config(format!(
                "unknown ipmasq backend {:?}",
                self.ip_masq_backend
            ))
            .with_details(
                "ipMasqBackend must be \"iptables\" or \"nftables\", which mean the same here, or left out",
            ));
        }
        Ok(())
    }
}

/// A mode of earlier versions: who relied on it should hear why it is gone.
fn refuse_eager(conf: &NetConf) -> Result<(), Error> {
    match conf.get("bypass").and_then(Value::as_str) {
        Some("eager") => Err(Error::config(
            "invalid bypass \"eager\": this mode is gone, because it was no faster than \"learned\" and skipped the firewall; use \"learned\"",
        )),
        _ => Ok(()),
    }
}

fn root(text: String) -> Result<PathBuf, Error> {
    if text.is_empty() {
        return Ok(PathBuf::from(BPF_ROOT));
    }
    let root = PathBuf::from(text);
    if !root.is_absolute() {
        return Err(Error::config(format!(
            "invalid bpfRoot {}: give an absolute path on a bpffs",
            root.display()
        )));
    }
    Ok(one_spelling(&root))
}

/// The lock follows from how the path is written, so there has to be one way: no slash too many, and
/// none at the end.
#[must_use]
pub fn one_spelling(root: &Path) -> PathBuf {
    root.components().collect()
}

fn destination(text: &str) -> Result<IpNet, Error> {
    address::parse_cidr(text)
        .map(|net| net.trunc())
        .ok_or_else(|| {
            Error::config(format!(
                "invalid nonMasqueradeCIDRs entry {text:?}: give a prefix such as 10.0.0.0/8"
            ))
        })
}

/// Reads the MAC that a key asks for.
fn mac(key: &str, text: &str) -> Result<Mac, Error> {
    text.parse()
        .ok()
        .filter(|mac: &Mac| mac.is_unicast())
        .ok_or_else(|| {
            Error::config(format!(
                "invalid {key} {text:?}: give a unicast MAC address such as 02:00:00:00:00:01"
            ))
        })
}

#[cfg(test)]
mod tests;

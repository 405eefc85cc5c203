//! The agent's command line and environment.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use ipnet::IpNet;

use crate::kernel::TunnelOptions;

/// How pods of other nodes are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Routing {
    /// By a route where the node is on a link, else through VXLAN
    Auto,
    /// Through VXLAN, wherever the node is: for networks that drop packets with pods' addresses
    Vxlan,
    /// By what the cloud has: no routes are made here
    Cloud,
}

/// Makes a node's pods reach all others: routes, and a dataplane that stays as it was installed.
#[derive(Clone, Debug, Parser)]
#[command(version)]
pub(crate) struct Options {
    /// The name of this node's Node
    #[arg(long, env = "NODE_NAME", required_unless_present = "uninstall")]
    pub(crate) node: Option<String>,
    /// How pods of other nodes are reached
    #[arg(long, env = "UNDERPASS_ROUTING", value_enum, default_value = "auto")]
    pub(crate) routing: Routing,
    /// The UDP port of VXLAN, the same on all nodes
    #[arg(long, env = "UNDERPASS_VXLAN_PORT", default_value_t = 4789, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) vxlan_port: u16,
    /// The network identifier of VXLAN, the same on all nodes
    #[arg(long, env = "UNDERPASS_VXLAN_ID", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..1 << 24))]
    pub(crate) vxlan_id: u32,
    /// A range of the cluster, to which pods' addresses are not masqueraded; by default the ranges of all nodes
    #[arg(
        long = "cluster-cidr",
        env = "UNDERPASS_CLUSTER_CIDRS",
        value_delimiter = ',',
        value_parser = prefix
    )]
    pub(crate) cluster_cidrs: Vec<IpNet>,
    /// The MTU of pods, in bytes; by default the uplinks', and no more than that of the VXLAN device as soon as it leads to a node
    #[arg(long, env = "UNDERPASS_MTU")]
    pub(crate) mtu: Option<u32>,
    /// Further keys of our entry in the conflist, as an object of JSON such as '{"bypass": "off"}'
    #[arg(long, env = "UNDERPASS_CONFIG", value_name = "JSON")]
    pub(crate) config: Option<String>,
    /// The executable `underpass` of the same version: by default the one beside the agent's
    #[arg(long)]
    pub(crate) underpass: Option<PathBuf>,
    /// Where the runtime looks for plugins
    #[arg(long, default_value = "/opt/cni/bin")]
    pub(crate) bin_dir: PathBuf,
    /// Where the runtime looks for networks
    #[arg(long, default_value = "/etc/cni/net.d")]
    pub(crate) net_dir: PathBuf,
    /// Where this node's programs are pinned
    #[arg(long, default_value = "/sys/fs/bpf/underpass")]
    pub(crate) bpf_root: PathBuf,
    /// Where health and metrics are served
    #[arg(long, default_value = "127.0.0.1:9810")]
    pub(crate) listen: SocketAddr,
    /// How often everything is compared although nothing was heard, in seconds
    #[arg(long, default_value = "60", value_parser = seconds)]
    pub(crate) resync: Duration,
    /// How often all Nodes are listed although the watch of them goes on, in seconds
    #[arg(long, default_value = "1800", value_parser = seconds)]
    pub(crate) relist: Duration,
    /// How often leases without a pod are looked for, in seconds
    #[arg(long, default_value = "600", value_parser = seconds)]
    pub(crate) collect: Duration,
    /// Say in this node's own Node that its network is there: its condition `NetworkUnavailable` is "False" once the network is installed
    #[arg(long, env = "UNDERPASS_NODE_CONDITION")]
    pub(crate) node_condition: bool,
    /// Remove the taints with this key, whatever their effects, from this node's own Node once the network is installed
    #[arg(long, env = "UNDERPASS_STARTUP_TAINT", value_name = "KEY", value_parser = taint_key)]
    pub(crate) startup_taint: Option<String>,
    /// Remove what agents have made of this node, and end: the network and the plugin, as `underpass uninstall` does, then routes and device.
    /// Refused while containers are attached
    #[arg(long)]
    pub(crate) uninstall: bool,
}

impl Options {
    /// The name of this node's Node.
    pub(crate) fn node(&self) -> &str {
        // Only --uninstall goes without.
        self.node.as_deref().unwrap_or_default()
    }

    /// What is said of VXLAN.
    pub(crate) fn tunnel(&self) -> TunnelOptions {
        TunnelOptions {
            id: self.vxlan_id,
            port: self.vxlan_port,
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds)),
        _ => Err("it must be a whole number of seconds, at least 1".to_owned()),
    }
}

/// Takes a prefix without host bits, as `underpass install` does.
fn prefix(text: &str) -> Result<IpNet, String> {
    let prefix: IpNet = text
        .parse()
        .map_err(|_| "it must be a prefix such as 10.244.0.0/16 or fd00:244::/48".to_owned())?;
    if prefix.trunc() == prefix {
        Ok(prefix)
    } else {
        Err(format!("it has host bits: write {}", prefix.trunc()))
    }
}

/// The longest prefix of a key, in bytes (Kubernetes' rule for qualified names).
const LONGEST_PREFIX: usize = 253;

/// The longest name of a key, in bytes.
const LONGEST_NAME: usize = 63;

/// Takes a key as the API would take it for a taint: a name, and before it a DNS subdomain and `/` or nothing.
fn taint_key(text: &str) -> Result<String, String> {
    let (prefix, name) = match text.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, text),
    };
    let ends_well = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.ends_with(|c: char| c.is_ascii_alphanumeric())
    };
    let is_label = |label: &str| {
        let is_of_one = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        ends_well(label) && label.chars().all(is_of_one)
    };
    let is_of_a_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if prefix
        .is_some_and(|prefix| prefix.len() > LONGEST_PREFIX || !prefix.split('.').all(is_label))
    {
        return Err("before the / it must be a DNS subdomain, such as example.org".to_owned());
    }
    if name.len() > LONGEST_NAME || !ends_well(name) || !name.chars().all(is_of_a_name) {
        return Err(
            "its name must have at most 63 letters, digits and -_. in between, such as example.org/no-network"
                .to_owned(),
        );
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_the_cluster_has_no_host_bits() {
        let parse = |ranges: &str| {
            Options::try_parse_from(["agent", "--node", "a", "--cluster-cidr", ranges])
        };
        let options = parse("10.244.0.0/16,fd00:244::/48").expect("two ranges");
        assert_eq!(options.cluster_cidrs.len(), 2);
        for (wrong, right) in [
            ("10.244.0.1/16", "10.244.0.0/16"),
            ("fd00:244::1/48", "fd00:244::/48"),
        ] {
            let said = parse(wrong).expect_err("host bits").to_string();
            assert!(said.contains(wrong) && said.contains(right), "{said}");
        }
        assert!(parse("10.244.0.0").is_err());
    }

    #[test]
    fn a_taint_has_a_qualified_name() {
        let long = |length| "a".repeat(length);
        for key in [
            "a",
            "underpass",
            "example.org/no-network",
            "a-1.b/A_b.c-9",
            &long(63),
            &format!("{}/a", long(253)),
        ] {
            assert_eq!(taint_key(key).as_deref(), Ok(key));
        }
        for key in [
            "",
            "/a",
            "a/",
            "a/b/c",
            "-a",
            "a.",
            "Example.org/a",
            "a..b/c",
            "-a.b/c",
            "a b",
            "a=b",
            "a:NoSchedule",
            "ä",
            &long(64),
            &format!("{}/a", long(254)),
        ] {
            assert!(taint_key(key).is_err(), "{key:?}");
        }
    }
}

//! Two nodes and what flannel's daemon makes of them: routes to each other's pods, and a file for the plugin `flannel`. And the netconf
//! that leads from there to us.

use std::{fs, net::IpAddr, path::Path, process::Command, sync::Arc};

use serde_json::{Value, json};
use underpass_tests::{netfilter::Netfilter, netns::Netns, prelude::*, runtime::Conf};

/// What the daemon tells the plugin.
pub(super) const SUBNET_FILE: &str = "/run/flannel/subnet.env";
/// Where the plugin remembers what it has sent, a file for each container.
pub(super) const DATA_DIR: &str = "/run/flannel/sent";
/// Of the pods' interfaces, in bytes: what VXLAN leaves of the link's, whatever family the outer packets have.
pub(super) const MTU: u32 = 1430;
/// The network's name.
pub(super) const NAME: &str = "cbr0";
const LINK: &str = "br0";

/// How packets get from node to node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Backend {
    HostGateway,
    Vxlan,
}

/// Which plugin sends the netconf.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sender {
    /// The real one of 0.9, which knows IPv4 alone.
    Flannel,
    /// What the later ones send, with ranges of both families. The test sends it.
    Later,
}

/// Two nodes on a link, with a gateway to the world.
pub(super) struct Site {
    pub(super) firewalls: Vec<Netfilter>,
    pub(super) nodes: Vec<Arc<Node>>,
    pub(super) world: Netns,
}

impl Site {
    pub(super) fn new(backend: Backend) -> Result<Self> {
        let world = Netns::isolated("world")?;
        let mut lines = vec![
            format!("link add {LINK} type bridge"),
            format!("link set {LINK} up"),
        ];
        for family in Family::BOTH {
            let (gateway, remote) = (family.gateway(), family.remote());
            lines.push(add_address(gateway, family.link_bits(), LINK));
            lines.push(add_address(remote, family.host_bits(), "lo"));
        }
        world.ip(&lines)?;
        let mut site = Self {
            firewalls: Vec::new(),
            nodes: Vec::new(),
            world,
        };
        for (number, other) in [(1, 2), (2, 1)] {
            let node = site.join(number)?;
            for family in Family::BOTH {
                lead(&node, family, backend, number, other)?;
            }
            site.firewalls.push(Netfilter::new(&node)?);
            site.nodes.push(node);
        }
        Ok(site)
    }

    fn join(&self, number: u8) -> Result<Arc<Node>> {
        let node = Arc::new(Node::new()?);
        let port = format!("node{number}");
        self.world.cable(&port, node.netns(), Node::UPLINK, 1500)?;
        self.world
            .ip(&[format!("link set {port} up master {LINK}")])?;
        let mut lines = vec![format!("link set {} up", Node::UPLINK)];
        for family in Family::BOTH {
            let own = address(family, number);
            lines.push(add_address(own, family.link_bits(), Node::UPLINK));
            let (all, gateway) = (family.everywhere(), family.gateway());
            lines.push(format!("route add {all} via {gateway}"));
        }
        node.netns().ip(&lines)?;
        let told = format!(
            "FLANNEL_NETWORK={}\nFLANNEL_SUBNET=10.42.{number}.1/24\nFLANNEL_MTU={MTU}\nFLANNEL_IPMASQ=false\n",
            network(V4),
        );
        node.netns()
            .run(|| {
                fs::create_dir_all(Path::new(SUBNET_FILE).parent().unwrap_or(Path::new("/")))?;
                fs::write(SUBNET_FILE, told)
            })
            .context("write what the daemon writes")?;
        Ok(node)
    }

    /// A pod of a node, whose number counts from 1, in the network that `sender` would send, with these host ports.
    pub(super) fn pod(
        &self,
        sender: Sender,
        number: u8,
        name: &str,
        ports: &[(u16, u16)],
    ) -> Result<Pod> {
        let node = self.node(number);
        match sender {
            Sender::Flannel => {
                let flannel = underpass_tests::node::flannel().context("no flannel")?;
                let conf = netconf(node, "0.4.0").with_host_ports(ports);
                Pod::add_by(node, name, &conf, &flannel)
            }
            Sender::Later => {
                let conf = Conf::of(sent(node, "1.0.0", &later(node, number)));
                Pod::add(node, name, &conf.with_host_ports(ports))
            }
        }
    }

    /// A node, by its number from 1.
    pub(super) fn node(&self, number: u8) -> &Arc<Node> {
        &self.nodes[usize::from(number) - 1]
    }
}

/// The plugin's own netconf, as a runtime sends it.
pub(super) fn netconf(node: &Node, version: &str) -> Conf {
    Conf::of(json!({
        "cniVersion": version,
        "name": NAME,
        "type": "flannel",
        "subnetFile": SUBNET_FILE,
        "dataDir": DATA_DIR,
        "ipam": { "dataDir": node.data_dir() },
        "capabilities": { "portMappings": true },
        "delegate": delegate(node),
    }))
}

/// What an operator writes for us into it.
fn delegate(node: &Node) -> Value {
    let mut delegate = Conf::new(node).json().clone();
    if let Some(keys) = delegate.as_object_mut() {
        // The plugin gives these, and refuses or replaces what is there.
        for key in ["cniVersion", "name", "ipMasq", "ipam"] {
            keys.remove(key);
        }
    }
    delegate["isDefaultGateway"] = true.into();
    delegate["nonMasqueradeCIDRs"] = Family::BOTH.map(network).to_vec().into();
    delegate
}

/// What the plugin makes of it and sends, with this `ipam`.
pub(super) fn sent(node: &Node, version: &str, ipam: &Value) -> Value {
    let mut sent = delegate(node);
    sent["cniVersion"] = version.into();
    sent["name"] = NAME.into();
    sent["ipMasq"] = true.into();
    sent["mtu"] = MTU.into();
    sent["ipam"] = ipam.clone();
    sent
}

/// `ipam` as 0.9 sends it.
pub(super) fn early(node: &Node, number: u8) -> Value {
    json!({
        "type": "host-local",
        "dataDir": node.data_dir(),
        "subnet": subnet(V4, number),
        "routes": [{ "dst": network(V4) }],
    })
}

/// `ipam` as later ones send it on a node with both families.
pub(super) fn later(node: &Node, number: u8) -> Value {
    json!({
        "type": "host-local",
        "dataDir": node.data_dir(),
        "ranges": Family::BOTH.map(|family| json!([{ "subnet": subnet(family, number) }])),
        "routes": Family::BOTH.map(|family| json!({ "dst": network(family) })),
    })
}

/// All pods' addresses.
pub(super) const fn network(family: Family) -> &'static str {
    match family {
        V4 => "10.42.0.0/16",
        V6 => "fd00:42::/56",
    }
}

/// Those of a node's pods.
pub(super) fn subnet(family: Family, number: u8) -> String {
    let base = base(family, number);
    let bits = if family == V4 { 24 } else { 64 };
    format!("{base}/{bits}")
}

/// The first of them, which is the tunnel's.
fn base(family: Family, number: u8) -> IpAddr {
    match family {
        V4 => [10, 42, number, 0].into(),
        V6 => [0xfd00, 0x42, 0, u16::from(number), 0, 0, 0, 0].into(),
    }
}

/// A node's own address.
pub(super) fn address(family: Family, number: u8) -> IpAddr {
    match family {
        V4 => [192, 0, 2, 10 + number].into(),
        V6 => [0x2001, 0xdb8, 1, 0, 0, 0, 0, 0x10 + u16::from(number)].into(),
    }
}

fn add_address(address: IpAddr, bits: u8, device: &str) -> String {
    let nodad = if address.is_ipv6() { " nodad" } else { "" };
    format!("address add {address}/{bits} dev {device}{nodad}")
}

/// Leads from a node to another one's pods.
fn lead(node: &Node, family: Family, backend: Backend, number: u8, other: u8) -> Result<()> {
    let (subnet, there) = (subnet(family, other), address(family, other));
    if backend == Backend::HostGateway {
        return node
            .netns()
            .ip(&[format!("route add {subnet} via {there}")]);
    }
    let device = if family == V4 {
        "flannel.1"
    } else {
        "flannel-v6.1"
    };
    let mac = |number: u8| format!("0e:00:00:00:00:{number:02x}");
    let (own, base_there) = (address(family, number), base(family, other));
    node.netns().ip(&[
        format!("link add {device} type vxlan id 1 local {own} dev eth0 dstport 8472 nolearning"),
        format!("link set {device} address {} mtu {MTU} up", mac(number)),
        add_address(base(family, number), family.host_bits(), device),
        format!(
            "neighbour add {base_there} lladdr {} dev {device} nud permanent",
            mac(other)
        ),
        format!("route add {subnet} via {base_there} dev {device} onlink"),
    ])?;
    let mut forward = Command::new("bridge");
    forward.args(["fdb", "append", &mac(other), "dev", device]);
    forward.args(["dst", &there.to_string()]);
    node.netns().expect(&mut forward, &[]).map(drop)
}

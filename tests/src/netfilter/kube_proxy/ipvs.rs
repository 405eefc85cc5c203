//! The IPVS mode: virtual servers at addresses of a device of its own, and rules for whom they must not see by their own address.

use std::{collections::BTreeSet, fmt::Write as _, net::SocketAddr, process::Command};

use anyhow::Result;

use super::{MARK, Policy, Service};
use crate::{Family, Lab, netfilter::Transport};

/// The device that has the cluster IPs.
const DEVICE: &str = "kube-ipvs0";

/// Serves these Services, all of one family.
pub fn serve(lab: &Lab, family: Family, services: &[Service]) -> Result<()> {
    let node = lab.node.netns();
    let addresses: BTreeSet<_> = services
        .iter()
        .map(|service| service.cluster.ip())
        .collect();
    let mut lines = vec![format!("link add {DEVICE} type dummy")];
    lines.extend(
        addresses
            .iter()
            .map(|address| format!("address add {address}/{} dev {DEVICE}", family.host_bits())),
    );
    node.ip(&lines)?;
    let mut servers = String::new();
    for service in services {
        add(&mut servers, service, service.cluster)?;
        if let Some(port) = service.node_port {
            add(&mut servers, service, SocketAddr::new(family.node(), port))?;
        }
    }
    node.expect(Command::new("ipvsadm").arg("--restore"), servers.as_bytes())?;
    for (key, value) in [
        ("conntrack", "1"),
        ("conn_reuse_mode", "0"),
        ("expire_nodest_conn", "1"),
        ("expire_quiescent_template", "1"),
    ] {
        node.set_sysctl(&format!("net/ipv4/vs/{key}"), value)?;
    }
    lab.firewall.load(&rules(family, services))
}

/// A virtual server and its real ones, as `ipvsadm --restore` reads them.
fn add(servers: &mut String, service: &Service, at: SocketAddr) -> Result<()> {
    let protocol = match service.transport {
        Transport::Tcp => "-t",
        Transport::Udp => "-u",
    };
    writeln!(servers, "-A {protocol} {at} -s rr")?;
    for endpoint in &service.endpoints {
        writeln!(servers, "-a {protocol} {at} -r {endpoint} -m -w 1")?;
    }
    Ok(())
}

fn rules(family: Family, services: &[Service]) -> String {
    let ip = family.nft();
    let mut marks = String::new();
    let mut loops = String::new();
    for service in services {
        let protocol = service.transport.nft();
        if let (Some(port), Policy::Cluster) = (service.node_port, service.policy) {
            let node = family.node();
            let _ = writeln!(
                marks,
                "{ip} daddr {node} {protocol} dport {port} meta mark set meta mark or {MARK}"
            );
        }
        for endpoint in &service.endpoints {
            let (address, port) = (endpoint.ip(), endpoint.port());
            let _ = writeln!(
                loops,
                "{ip} saddr {address} {ip} daddr {address} {protocol} dport {port} masquerade"
            );
        }
    }
    format!(
        "table {ip} kube-ipvs {{
            chain prerouting {{
                type nat hook prerouting priority dstnat; policy accept;
                {marks}
            }}
            chain postrouting {{
                type nat hook postrouting priority srcnat; policy accept;
                {loops}
                meta mark and {MARK} == {MARK} masquerade fully-random
            }}
        }}"
    )
}

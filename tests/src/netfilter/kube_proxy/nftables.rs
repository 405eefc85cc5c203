//! The nftables mode: one table for each family, in which maps lead from a destination to the chain of its Service.

use std::collections::BTreeSet;

use super::{MARK, Policy, Service, chain, endpoint_chains};
use crate::Family;

pub(super) const TABLE: &str = "kube-proxy";

/// The base chains. What looks at what the client asked for is before the translation, at -100; the rest is after it.
const HOOKS: &str = "
    chain filter-prerouting-pre-dnat {
        type filter hook prerouting priority -110; policy accept;
        ct state new jump firewall-check
    }
    chain filter-output-pre-dnat {
        type filter hook output priority -110; policy accept;
        ct state new jump firewall-check
    }
    chain filter-input {
        type filter hook input priority 0; policy accept;
        ct state new jump nodeport-endpoints-check
        ct state new jump service-endpoints-check
    }
    chain filter-forward {
        type filter hook forward priority 0; policy accept;
        ct state new jump service-endpoints-check
        ct state new jump cluster-ips-check
    }
    chain filter-output {
        type filter hook output priority 0; policy accept;
        ct state new jump service-endpoints-check
        ct state new jump cluster-ips-check
    }
    chain nat-prerouting {
        type nat hook prerouting priority -100; policy accept;
        jump services
    }
    chain nat-output {
        type nat hook output priority -100; policy accept;
        jump services
    }
    chain nat-postrouting {
        type nat hook postrouting priority 100; policy accept;
        jump masquerading
    }
";

pub(super) fn table(family: Family, services: &[&Service]) -> String {
    let ip = family.nft();
    let chains: String = services
        .iter()
        .filter(|service| served(service))
        .map(|service| chains_of(service))
        .collect();
    let (maps, common) = (maps(family, services), common_chains(family));
    format!("table {ip} {TABLE} {{\n{maps}{chains}{common}{HOOKS}}}\n")
}

fn maps(family: Family, services: &[&Service]) -> String {
    let address = match family {
        Family::V4 => "ipv4_addr",
        Family::V6 => "ipv6_addr",
    };
    let port = "inet_proto . inet_service";
    let both = format!("{address} . {port}");
    // Services by TCP and UDP may share a cluster IP.
    let cluster_ips: BTreeSet<String> = services
        .iter()
        .map(|service| service.cluster.ip().to_string())
        .collect();
    let cluster_ips: Vec<String> = cluster_ips.into_iter().collect();
    let to_service = |service: &Service| {
        let to = format!("service-{}", service.key());
        served(service).then(|| (destination(service), to))
    };
    let to_external = |service: &Service| {
        let to = format!("external-{}", service.key());
        Some((node_port(service).filter(|_| served(service))?, to))
    };
    let refused = |service: &Service| {
        let to = "reject-chain".to_owned();
        (!served(service)).then(|| (destination(service), to))
    };
    let refused_outside = |service: &Service| {
        let to = "reject-chain".to_owned();
        Some((node_port(service).filter(|_| !served(service))?, to))
    };
    [
        collection("set", "cluster-ips", address, &cluster_ips),
        // Node ports are served at the node's main address only.
        collection("set", "nodeport-ips", address, &[family.node().to_string()]),
        map("service-ips", &both, services, to_service),
        map("service-nodeports", port, services, to_external),
        map("no-endpoint-services", &both, services, refused),
        map("no-endpoint-nodeports", port, services, refused_outside),
        // Sources that a load balancer serves: none here.
        map("firewall-ips", &both, services, |_| None),
    ]
    .concat()
}

/// The chains that are there without any Service.
fn common_chains(family: Family) -> String {
    let (ip, range) = (family.nft(), family.services());
    let destination = format!("{ip} daddr . meta l4proto . th dport");
    let node_port = format!("{ip} daddr @nodeport-ips meta l4proto . th dport");
    format!(
        "
    chain mark-for-masquerade {{
        meta mark set meta mark | {MARK}
    }}
    # The mark goes again, so that nothing masquerades the packet twice.
    chain masquerading {{
        meta mark & {MARK} == 0 return
        meta mark set meta mark ^ {MARK}
        masquerade fully-random
    }}
    chain services {{
        {destination} vmap @service-ips
        {node_port} vmap @service-nodeports
    }}
    chain reject-chain {{
        reject
    }}
    chain firewall-check {{
        {destination} vmap @firewall-ips
    }}
    chain service-endpoints-check {{
        {destination} vmap @no-endpoint-services
    }}
    chain nodeport-endpoints-check {{
        {node_port} vmap @no-endpoint-nodeports
    }}
    # What still has a cluster IP for its destination was sent to a port that no Service has, or to an address that none has.
    chain cluster-ips-check {{
        {ip} daddr @cluster-ips reject
        {ip} daddr {range} drop
    }}
"
    )
}

/// The chains of a Service with endpoints: one for each endpoint, one that chooses, and, where it has a node port, one for what
/// comes there.
fn chains_of(service: &Service) -> String {
    let key = service.key();
    let outside = format!("{} jump mark-for-masquerade", service.outside_cluster());
    let mut chains = endpoint_chains(service, "endpoint", "mark-for-masquerade");
    chains += &chain(&format!("service-{key}"), &[outside, choice(service)]);
    if service.node_port.is_some() {
        if service.policy == Policy::Local {
            chains += &chain(&format!("local-{key}"), &[choice(service)]);
        }
        chains += &chain(&format!("external-{key}"), &external(service));
    }
    chains
}

fn choice(service: &Service) -> String {
    let (key, all) = (service.key(), service.endpoints.len());
    let choices: Vec<String> = service
        .numbered()
        .map(|(at, _)| format!("{at} : goto endpoint-{key}-{at}"))
        .collect();
    format!("numgen random mod {all} vmap {{ {} }}", choices.join(", "))
}

fn external(service: &Service) -> Vec<String> {
    let (ip, pods, key) = (service.family().nft(), service.pods(), service.key());
    match service.policy {
        Policy::Cluster => vec![
            "jump mark-for-masquerade".to_owned(),
            format!("goto service-{key}"),
        ],
        // Pods and the node itself are inside of the cluster, wherever they ask.
        Policy::Local => vec![
            format!("{ip} saddr {pods} goto service-{key}"),
            "fib saddr type local jump mark-for-masquerade".to_owned(),
            format!("fib saddr type local goto service-{key}"),
            format!("goto local-{key}"),
        ],
    }
}

fn served(service: &Service) -> bool {
    !service.endpoints.is_empty()
}

fn destination(service: &Service) -> String {
    let (ip, port) = (service.cluster.ip(), service.cluster.port());
    format!("{ip} . {} . {port}", service.transport.nft())
}

fn node_port(service: &Service) -> Option<String> {
    let port = service.node_port?;
    Some(format!("{} . {port}", service.transport.nft()))
}

/// A map to chains, with the key and the chain that `element` finds for each Service.
fn map(
    name: &str,
    key: &str,
    services: &[&Service],
    element: impl Fn(&Service) -> Option<(String, String)>,
) -> String {
    let elements: Vec<String> = services
        .iter()
        .filter_map(|service| element(service))
        .map(|(key, to)| format!("{key} : goto {to}"))
        .collect();
    collection("map", name, &format!("{key} : verdict"), &elements)
}

fn collection(kind: &str, name: &str, key: &str, elements: &[String]) -> String {
    // nft takes no empty list of elements.
    let elements = match elements.join(", ") {
        list if list.is_empty() => list,
        list => format!("elements = {{ {list} }}"),
    };
    format!("    {kind} {name} {{\n        type {key}\n        {elements}\n    }}\n")
}

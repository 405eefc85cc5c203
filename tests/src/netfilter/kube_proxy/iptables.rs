//! The iptables mode: chains that are walked rule by rule, with an endpoint drawn by lot from rule to rule.
//!
//! Its tables are not called `nat` and `filter`: the `iptables` of Debian refuses a table that has expressions which it does not make itself, and
//! reference plugins call it beside these rules. Hooks and priorities are the same.

use super::{MARK, Policy, Service, chain, endpoint_chains};
use crate::Family;

const NAT: &str = "kube-proxy-nat";
const FILTER: &str = "kube-proxy-filter";

pub(super) const TABLES: [&str; 2] = [NAT, FILTER];

pub(super) fn tables(family: Family, services: &[&Service]) -> String {
    [nat(family, services), filter(family, services)].concat()
}

fn nat(family: Family, services: &[&Service]) -> String {
    let ip = family.nft();
    let served = || {
        services
            .iter()
            .filter(|service| !service.endpoints.is_empty())
    };
    let chains: String = served().map(|service| chains_of(service)).collect();
    let node_ports = served().filter_map(|service| {
        let port = service.node_port?;
        let (transport, key) = (service.transport.nft(), service.key());
        Some(format!("{transport} dport {port} jump KUBE-EXT-{key}"))
    });
    let cluster_ips = served()
        .map(|service| format!("{} jump KUBE-SVC-{}", service.destination(), service.key()));
    // Node ports come last: a cluster IP may be local.
    let dispatch = cluster_ips.chain([node_ports_of(family)]);
    let [node_ports, dispatch] = [
        chain("KUBE-NODEPORTS", &node_ports.collect::<Vec<_>>()),
        chain("KUBE-SERVICES", &dispatch.collect::<Vec<_>>()),
    ];
    format!(
        "table {ip} {NAT} {{
    chain KUBE-MARK-MASQ {{
        meta mark set meta mark | {MARK}
    }}
{chains}{node_ports}{dispatch}
    # The mark goes again, so that nothing masquerades the packet twice.
    chain KUBE-POSTROUTING {{
        meta mark & {MARK} != {MARK} return
        meta mark set meta mark ^ {MARK}
        masquerade fully-random
    }}
    chain PREROUTING {{
        type nat hook prerouting priority -100; policy accept;
        jump KUBE-SERVICES
    }}
    chain OUTPUT {{
        type nat hook output priority -100; policy accept;
        jump KUBE-SERVICES
    }}
    chain POSTROUTING {{
        type nat hook postrouting priority 100; policy accept;
        jump KUBE-POSTROUTING
    }}
}}
"
    )
}

/// Node ports are served at 127.0.0.1 as well, as long as nobody forbids it; the kernel has nothing alike for `::1`.
fn node_ports_of(family: Family) -> String {
    let but = match family {
        Family::V4 => "",
        Family::V6 => "ip6 daddr != ::1 ",
    };
    format!("fib daddr type local {but}jump KUBE-NODEPORTS")
}

/// The chains of a Service with endpoints: one for each endpoint, one that chooses, and, where it has a node port, one for what
/// comes there.
fn chains_of(service: &Service) -> String {
    let key = service.key();
    let outside = format!("{} jump KUBE-MARK-MASQ", service.outside_cluster());
    let mut chains = endpoint_chains(service, "KUBE-SEP", "KUBE-MARK-MASQ");
    chains += &chain(
        &format!("KUBE-SVC-{key}"),
        &[vec![outside], choice(service)].concat(),
    );
    if service.node_port.is_some() {
        if service.policy == Policy::Local {
            chains += &chain(&format!("KUBE-SVL-{key}"), &choice(service));
        }
        chains += &chain(&format!("KUBE-EXT-{key}"), &external(service));
    }
    chains
}

/// Each rule takes its share of what the rules before it left.
fn choice(service: &Service) -> Vec<String> {
    let (key, all) = (service.key(), service.endpoints.len());
    let rule = |(at, _)| match all - at {
        1 => format!("jump KUBE-SEP-{key}-{at}"),
        left => format!("numgen random mod {left} == 0 jump KUBE-SEP-{key}-{at}"),
    };
    service.numbered().map(rule).collect()
}

fn external(service: &Service) -> Vec<String> {
    let (ip, pods, key) = (service.family().nft(), service.pods(), service.key());
    match service.policy {
        Policy::Cluster => vec![
            "jump KUBE-MARK-MASQ".to_owned(),
            format!("jump KUBE-SVC-{key}"),
        ],
        // Pods and the node itself are inside of the cluster, wherever they ask.
        Policy::Local => vec![
            format!("{ip} saddr {pods} jump KUBE-SVC-{key}"),
            "fib saddr type local jump KUBE-MARK-MASQ".to_owned(),
            format!("fib saddr type local jump KUBE-SVC-{key}"),
            format!("jump KUBE-SVL-{key}"),
        ],
    }
}

fn filter(family: Family, services: &[&Service]) -> String {
    let ip = family.nft();
    let idle = || {
        services
            .iter()
            .filter(|service| service.endpoints.is_empty())
    };
    let refused = idle().map(|service| format!("{} reject", service.destination()));
    let refused_outside = idle().filter_map(|service| {
        let (transport, port) = (service.transport.nft(), service.node_port?);
        Some(format!(
            "fib daddr type local {transport} dport {port} reject"
        ))
    });
    let [refused, refused_outside] = [
        chain("KUBE-SERVICES", &refused.collect::<Vec<_>>()),
        chain(
            "KUBE-EXTERNAL-SERVICES",
            &refused_outside.collect::<Vec<_>>(),
        ),
    ];
    // The sysctl that lets node ports be served at 127.0.0.1 would let neighbours reach everything there.
    let local = match family {
        Family::V4 => {
            "ip daddr 127.0.0.0/8 ip saddr != 127.0.0.0/8 ct state != { established, related } ct status & dnat != dnat drop"
        }
        Family::V6 => "",
    };
    format!(
        "table {ip} {FILTER} {{
{refused}{refused_outside}
    # Ports of health checks: no Service here has one.
    chain KUBE-NODEPORTS {{ }}
    # Sources that a load balancer does not serve: none here.
    chain KUBE-PROXY-FIREWALL {{ }}
    chain KUBE-FIREWALL {{
        {local}
    }}
    chain KUBE-FORWARD {{
        ct state invalid drop
        meta mark & {MARK} == {MARK} accept
        ct state established,related accept
    }}
    chain INPUT {{
        type filter hook input priority 0; policy accept;
        jump KUBE-FIREWALL
        ct state new jump KUBE-PROXY-FIREWALL
        jump KUBE-NODEPORTS
        ct state new jump KUBE-EXTERNAL-SERVICES
    }}
    chain FORWARD {{
        type filter hook forward priority 0; policy accept;
        ct state new jump KUBE-PROXY-FIREWALL
        jump KUBE-FORWARD
        ct state new jump KUBE-SERVICES
        ct state new jump KUBE-EXTERNAL-SERVICES
    }}
    chain OUTPUT {{
        type filter hook output priority 0; policy accept;
        jump KUBE-FIREWALL
        ct state new jump KUBE-PROXY-FIREWALL
        ct state new jump KUBE-SERVICES
    }}
}}
"
    )
}

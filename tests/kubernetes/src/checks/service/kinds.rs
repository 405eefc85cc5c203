//! What a Service can be besides one address in front of pods, and what becomes of one while its kube-proxy is away.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use underpass_tests::{netns::Netns, prelude::*};

use super::{INSIDE, NODE_PORT, PORT, Policy, Servers, Service, Socket, by_name, serve};
use crate::{
    cluster::Cluster,
    eventually,
    pod::{Pod, Wish, talk, talk_unseen},
};

/// So many clients, each with a socket of its own, would meet both of two backends.
const CLIENTS: usize = 12;
/// Longer than three packets, in bytes.
const LARGE: usize = 5_000;
/// Addresses that lead to no machine: a Service has them as well.
const OUTER: [IpAddr; 2] = [
    IpAddr::V4(std::net::Ipv4Addr::new(198, 18, 99, 1)),
    IpAddr::V6(std::net::Ipv6Addr::new(0x2001, 0xdb8, 99, 0, 0, 0, 0, 1)),
];

/// A pod that a Service with further keys leads to, its servers, and behind it in the list two pods that may ask: on its node, and
/// behind the router.
fn web<'a>(cluster: &'a Cluster, further: &Value) -> Result<(Vec<Pod>, Service<'a>, Servers)> {
    let pods = Pod::start(
        cluster,
        &[
            Wish::new("web", "node1"),
            Wish::new("near", "node1"),
            Wish::new("far", "node3"),
        ],
    )?;
    let service = Service::with(cluster, "web", Policy::Cluster, further)?;
    let servers = serve(&pods[0])?;
    service.has(&[&pods[0]])?;
    Ok((pods, service, servers))
}

/// A Service with the affinity `ClientIP` sends all that a pod asks to one pod; without it, to both.
pub(crate) fn of_one_client(cluster: &mut Cluster) -> Result<()> {
    let wishes = [
        Wish::new("first", "node1").of_app("web"),
        Wish::new("second", "node3").of_app("web"),
        Wish::new("near", "node1"),
        Wish::new("far", "node2"),
    ];
    let pods = Pod::start(cluster, &wishes)?;
    let [first, second, near, far] = &pods[..] else {
        anyhow::bail!("four pods");
    };
    let affinity = json!({ "sessionAffinity": "ClientIP" });
    let service = Service::with(cluster, "web", Policy::Cluster, &affinity)?;
    let _servers = [by_name(first)?, by_name(second)?];
    service.has(&[first, second])?;
    for family in Family::BOTH {
        for client in [near, far] {
            let at = service.at(family)?;
            eventually(&format!("{} hears one pod at {at}", client.name), || {
                let names = names(&client.netns, at)?;
                ensure!(names.len() == 1, "{names:?}");
                Ok(())
            })?;
        }
    }
    service.patch(&json!({ "sessionAffinity": "None" }))?;
    for family in Family::BOTH {
        for client in [near, far] {
            let at = service.at(family)?;
            eventually(&format!("{} hears both pods at {at}", client.name), || {
                let names = names(&client.netns, at)?;
                ensure!(names.len() == 2, "{names:?}");
                Ok(())
            })?;
        }
    }
    service.delete()?;
    Pod::remove_all(cluster, pods)
}

/// Who answers sockets of a namespace.
pub(super) fn names(netns: &Netns, at: SocketAddr) -> Result<std::collections::BTreeSet<String>> {
    let name = |_| Socket::open(netns, at)?.hears_one();
    (0..CLIENTS).map(name).collect()
}

/// Addresses from outside of the cluster that a Service has lead to its pods, for the world and for pods.
pub(crate) fn with_outer_addresses(cluster: &mut Cluster) -> Result<()> {
    let outer = json!({ "externalIPs": OUTER.map(|ip| ip.to_string()) });
    let (pods, service, servers) = web(cluster, &outer)?;
    // The world sends what is for them to the node that has no pod of it.
    let member = cluster.member("node2")?;
    for ip in OUTER {
        let family = Family::of(ip);
        let (to, via) = (
            format!("{ip}/{}", family.host_bits()),
            member.address(family),
        );
        cluster.world.ip(&[format!("route add {to} via {via}")])?;
        let at = SocketAddr::new(ip, PORT);
        for client in [&cluster.world, &pods[1].netns, &pods[2].netns] {
            eventually(&format!("{at} is served"), || talk_unseen(client, at))?;
        }
        cluster.world.ip(&[format!("route del {to} via {via}")])?;
    }
    drop(servers);
    service.delete()?;
    Pod::remove_all(cluster, pods)
}

/// A Service without pods refuses at once, and serves when there is one.
pub(crate) fn of_nobody(cluster: &mut Cluster) -> Result<()> {
    let asks = Pod::start_one(cluster, &Wish::new("asks", "node3"))?;
    let service = Service::new(cluster, "web", Policy::Cluster)?;
    let member = cluster.member("node1")?;
    for family in Family::BOTH {
        let inside = service.at(family)?;
        let outside = SocketAddr::new(member.address(family), NODE_PORT);
        for (client, at) in [(&asks.netns, inside), (&cluster.world, outside)] {
            eventually(&format!("{at} refuses"), || tcp::is_refused(client, at))?;
        }
    }
    let web = Pod::start_one(cluster, &Wish::new("web", "node2"))?;
    let servers = serve(&web)?;
    service.has(&[&web])?;
    for family in Family::BOTH {
        let at = service.at(family)?;
        eventually(&format!("{at} is served"), || {
            talk(&asks.netns, at, asks.ip(family)?)
        })?;
    }
    drop(servers);
    service.delete()?;
    Pod::remove_all(cluster, vec![asks, web])
}

/// A Service that gives up its port of the nodes keeps its address.
pub(crate) fn node_port_closed(cluster: &mut Cluster) -> Result<()> {
    let web = Pod::start_one(cluster, &Wish::new("web", "node1"))?;
    let asks = Pod::start_one(cluster, &Wish::new("asks", "node2"))?;
    let service = Service::new(cluster, "web", Policy::Cluster)?;
    let servers = serve(&web)?;
    service.has(&[&web])?;
    let member = cluster.member("node2")?;
    let open = |family| SocketAddr::new(member.address(family), NODE_PORT);
    for family in Family::BOTH {
        let at = open(family);
        eventually("the world is served", || talk_unseen(&cluster.world, at))?;
    }
    let ports = ["TCP", "UDP"].map(|protocol| json!({ "name": protocol.to_lowercase(), "protocol": protocol, "port": PORT, "targetPort": INSIDE, "nodePort": null }));
    let closed = json!({ "type": "ClusterIP", "externalTrafficPolicy": null, "ports": ports });
    service.patch(&closed)?;
    for family in Family::BOTH {
        let at = open(family);
        eventually("the world is refused", || {
            tcp::is_refused(&cluster.world, at)
        })?;
        talk(&asks.netns, service.at(family)?, asks.ip(family)?)?;
    }
    drop(servers);
    service.delete()?;
    Pod::remove_all(cluster, vec![web, asks])
}

/// Connections by a Service go on while kube-proxy is away, and a new one learns what has changed meanwhile.
pub(crate) fn kept_by_a_new_proxy(cluster: &mut Cluster) -> Result<()> {
    let wishes = [
        Wish::new("first", "node1").of_app("web"),
        Wish::new("second", "node2").of_app("other"),
        Wish::new("asks", "node3"),
    ];
    let pods = Pod::start(cluster, &wishes)?;
    let [first, second, asks] = &pods[..] else {
        anyhow::bail!("three pods");
    };
    let service = Service::new(cluster, "web", Policy::Cluster)?;
    let servers = (serve(first)?, serve(second)?);
    service.has(&[first])?;
    let mut connections = Vec::new();
    for family in Family::BOTH {
        let at = service.at(family)?;
        eventually("it is served", || talk(&asks.netns, at, asks.ip(family)?))?;
        connections.push(tcp::Client::connect(&asks.netns, at)?);
    }
    for member in &mut cluster.members {
        member.stop_proxy()?;
    }
    let chat = |connections: &mut [tcp::Client]| -> Result<()> {
        let mut connections = connections.iter_mut();
        connections.try_for_each(|connection| connection.chat(5).map(drop))
    };
    let without = chat(&mut connections);
    let ports = json!({ "type": "ClusterIP", "externalTrafficPolicy": null, "ports": [
        { "name": "tcp", "protocol": "TCP", "port": PORT, "targetPort": INSIDE },
        { "name": "udp", "protocol": "UDP", "port": PORT, "targetPort": INSIDE },
    ] });
    let other = Service::with(cluster, "other", Policy::Cluster, &ports).map(drop);
    for member in &mut cluster.members {
        member.start_proxy()?;
    }
    without.context("while kube-proxy is away")?;
    other?;
    let other = Service::find(cluster, "other")?;
    other.has(&[second])?;
    for family in Family::BOTH {
        let at = other.at(family)?;
        eventually("the new Service is served", || {
            talk(&asks.netns, at, asks.ip(family)?)
        })?;
    }
    chat(&mut connections).context("after that")?;
    drop((servers, connections));
    other.delete()?;
    Service::find(cluster, "web")?.delete()?;
    Pod::remove_all(cluster, pods)
}

/// Datagrams that need fragments pass a Service in both directions, from pods and from the world.
pub(crate) fn large_datagrams(cluster: &mut Cluster) -> Result<()> {
    let (pods, service, servers) = web(cluster, &json!({}))?;
    let member = cluster.member("node2")?;
    for family in Family::BOTH {
        let inside = service.at(family)?;
        let outside = SocketAddr::new(member.address(family), NODE_PORT);
        let clients = [
            (&pods[1].netns, inside),
            (&pods[2].netns, inside),
            (&cluster.world, outside),
        ];
        for (client, at) in clients {
            eventually(&format!("{at} answers"), || {
                let mut socket = udp::Client::open(client, family)?;
                for _ in 0..5 {
                    socket.ask(at, LARGE)?;
                }
                Ok(())
            })?;
        }
    }
    drop(servers);
    service.delete()?;
    Pod::remove_all(cluster, pods)
}

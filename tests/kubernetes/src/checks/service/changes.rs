//! Services of which something changes: their ports, their affinity, their type, and the API server that knows of them.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use underpass_tests::{netns::Netns, patience, prelude::*, traffic};

use super::{
    INSIDE, NODE_PORT, PORT, Policy, Service, Socket, by_name, kinds::names, serve, serve_at,
};
use crate::{
    SOON,
    cluster::Cluster,
    eventually,
    pod::{Pod, Wish, named_port, talk, talk_unseen},
};

/// Another port of Services.
const ANOTHER: u16 = 81;
/// How long kube-proxy keeps a client with a pod, in seconds: the shortest that there is.
const SHORT: u16 = 1;
/// The name that stands for a Service that is elsewhere. Nobody has it.
const ELSEWHERE: &str = "elsewhere.invalid";

/// A port of a Service, by TCP and UDP.
#[derive(Clone, Copy)]
struct Port<'a> {
    at: u16,
    /// The name of the pods' port that it leads to; else it is [`INSIDE`].
    to: Option<&'a str>,
    /// The port of the nodes that leads there as well.
    node: Option<u16>,
}

impl Port<'_> {
    /// The only one of nearly all Services here.
    const USUAL: Port<'static> = Port {
        at: PORT,
        to: None,
        node: None,
    };

    fn json(self, protocol: &str) -> Value {
        let mut port = json!({
            "name": named_port(&format!("at-{}", self.at), protocol),
            "protocol": protocol,
            "port": self.at,
            "targetPort": self.to.map_or(json!(INSIDE), |name| named_port(name, protocol).into()),
        });
        if let Some(node) = self.node {
            port["nodePort"] = node.into();
        }
        port
    }
}

fn ports(of: &[Port<'_>]) -> Value {
    let by = |protocol| of.iter().map(move |port| port.json(protocol));
    by("TCP").chain(by("UDP")).collect()
}

/// What a Service has that has no port of the nodes.
fn inner(of: &[Port<'_>]) -> Value {
    json!({ "type": "ClusterIP", "externalTrafficPolicy": null, "ports": ports(of) })
}

/// A Service leads by each of its ports to the pod that has one of that name, and by one that it loses to nobody.
pub(crate) fn ports_of_different_pods(cluster: &mut Cluster) -> Result<()> {
    const OTHER_INSIDE: u16 = INSIDE + 1;
    let wishes = [
        Wish::new("first", "node1")
            .of_app("web")
            .with_named_port("first", INSIDE),
        Wish::new("second", "node3")
            .of_app("web")
            .with_named_port("second", OTHER_INSIDE),
        Wish::new("asks", "node2"),
    ];
    let pods = Pod::start(cluster, &wishes)?;
    let [first, second, asks] = &pods[..] else {
        anyhow::bail!("three pods");
    };
    let port = |at, name| Port {
        at,
        to: Some(name),
        node: None,
    };
    let both = [port(PORT, "first"), port(ANOTHER, "second")];
    let service = Service::with(cluster, "web", Policy::Cluster, &inner(&both))?;
    service.has(&[first, second])?;
    let at = |family, port| -> Result<SocketAddr> {
        Ok(SocketAddr::new(service.at(family)?.ip(), port))
    };
    let is_served = |port| {
        Family::BOTH.into_iter().try_for_each(|family| {
            let at = at(family, port)?;
            eventually(&format!("{at} is served"), || {
                talk(&asks.netns, at, asks.ip(family)?)
            })
        })
    };
    // One serves at a time, so who is served by the other port was sent to the wrong pod.
    for (pod, inside, port, other) in [
        (first, INSIDE, PORT, ANOTHER),
        (second, OTHER_INSIDE, ANOTHER, PORT),
    ] {
        let _servers = serve_at(pod, inside)?;
        is_served(port)?;
        for family in Family::BOTH {
            tcp::is_refused(&asks.netns, at(family, other)?)?;
        }
    }
    let _servers = (serve_at(first, INSIDE)?, serve_at(second, OTHER_INSIDE)?);
    service.patch(&json!({ "ports": ports(&both[..1]) }))?;
    for family in Family::BOTH {
        let at = at(family, ANOTHER)?;
        eventually(&format!("{at} leads nowhere"), || {
            tcp::refuses(&asks.netns, at)
        })?;
    }
    is_served(PORT)?;
    service.patch(&json!({ "ports": ports(&both) }))?;
    is_served(ANOTHER)?;
    is_served(PORT)?;
    service.delete()?;
    Pod::remove_all(cluster, pods)
}

/// A Service that is deleted serves nobody, and takes nothing from another one in front of the same pod; it serves again when it is
/// made again.
pub(crate) fn deleted_and_made_again(cluster: &mut Cluster) -> Result<()> {
    let web = Pod::start_one(cluster, &Wish::new("web", "node1"))?;
    let asks = Pod::start_one(cluster, &Wish::new("asks", "node3"))?;
    let _servers = serve(&web)?;
    let mut same = inner(&[Port::USUAL]);
    same["selector"] = json!({ "app": "web" });
    let other = Service::with(cluster, "other", Policy::Cluster, &same)?;
    other.has(&[&web])?;
    let is_served = |service: &Service<'_>| {
        Family::BOTH.into_iter().try_for_each(|family| {
            let at = service.at(family)?;
            eventually(&format!("{at} is served"), || {
                talk(&asks.netns, at, asks.ip(family)?)
            })
        })
    };
    is_served(&other)?;
    let connect = |family| tcp::Client::connect(&asks.netns, other.at(family)?);
    let mut connections = [connect(V4)?, connect(V6)?];
    for _ in 0..2 {
        let service = Service::new(cluster, "web", Policy::Cluster)?;
        service.has(&[&web])?;
        is_served(&service)?;
        let places = [service.at(V4)?, service.at(V6)?];
        service.delete()?;
        for at in places {
            eventually(&format!("{at} leads nowhere"), || {
                tcp::refuses(&asks.netns, at)
            })?;
        }
        for connection in &mut connections {
            connection.chat(5).context("by the other Service")?;
        }
        is_served(&other)?;
    }
    other.delete()?;
    Pod::remove_all(cluster, vec![web, asks])
}

/// With the affinity `ClientIP` and a timeout a client that was silent for longer may come to another pod, by the Service's address and
/// by a port of the nodes. A longer timeout, and none, count as soon as they are said.
pub(crate) fn affinity_ends(cluster: &mut Cluster) -> Result<()> {
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
    let lasting = |seconds: u16| {
        json!({
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": seconds } },
        })
    };
    let service = Service::with(cluster, "web", Policy::Cluster, &lasting(SHORT))?;
    let _servers = [by_name(first)?, by_name(second)?];
    service.has(&[first, second])?;
    let member = cluster.member("node2")?;
    let mut clients: Vec<(&Netns, SocketAddr)> = Vec::new();
    for family in Family::BOTH {
        let at = service.at(family)?;
        let outside = SocketAddr::new(member.address(family), NODE_PORT);
        clients.extend([
            (&near.netns, at),
            (&far.netns, at),
            (&cluster.world, outside),
        ]);
    }
    let all_hear = |pods: usize| {
        clients.iter().try_for_each(|&(client, at)| {
            eventually(&format!("{pods} answer at {at}"), || {
                let names = names(client, at)?;
                ensure!(names.len() == pods, "{names:?}");
                Ok(())
            })
        })
    };
    // Who asks on and on stays, and who pauses does not.
    all_hear(1)?;
    for &(client, at) in &clients {
        both_are_heard(client, at)?;
    }
    service.patch(&lasting(10_800))?;
    all_hear(1)?;
    service.patch(&json!({ "sessionAffinity": "None", "sessionAffinityConfig": null }))?;
    all_hear(2)?;
    service.delete()?;
    Pod::remove_all(cluster, pods)
}

/// Asks with pauses until two have answered.
fn both_are_heard(client: &Netns, at: SocketAddr) -> Result<()> {
    let pause = Duration::from_secs(SHORT.into()) + traffic::SILENCE;
    let end = Instant::now() + patience::here(SOON);
    let mut heard = BTreeSet::new();
    while heard.len() < 2 {
        ensure!(Instant::now() < end, "only {heard:?} answers at {at}");
        thread::sleep(pause);
        heard.insert(Socket::open(client, at)?.hears_one()?);
    }
    Ok(())
}

/// A Service without an address, which only names another one, gets one, a port of the nodes, and none of them again.
pub(crate) fn changes_its_type(cluster: &mut Cluster) -> Result<()> {
    let web = Pod::start_one(cluster, &Wish::new("web", "node1"))?;
    let asks = Pod::start_one(cluster, &Wish::new("asks", "node3"))?;
    let _servers = serve(&web)?;
    cluster.control.apply(&[json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": "web", "namespace": "default" },
        "spec": { "type": "ExternalName", "externalName": ELSEWHERE },
    })])?;
    let nameless = Service {
        name: "web",
        cluster,
        addresses: Vec::new(),
    };
    let mut closed = inner(&[Port::USUAL]);
    for (key, value) in [
        ("externalName", Value::Null),
        ("ipFamilyPolicy", json!("RequireDualStack")),
        ("selector", json!({ "app": "web" })),
    ] {
        closed[key] = value;
    }
    nameless.patch(&closed)?;
    let service = Service::find(cluster, "web")?;
    service.has(&[&web])?;
    let member = cluster.member("node2")?;
    let outside = |family| SocketAddr::new(member.address(family), NODE_PORT);
    let is_served = |family| {
        let at = service.at(family)?;
        eventually(&format!("{at} is served"), || {
            talk(&asks.netns, at, asks.ip(family)?)
        })
    };
    let is_closed = |family| {
        eventually("the world is refused", || {
            tcp::is_refused(&cluster.world, outside(family))
        })
    };
    for family in Family::BOTH {
        is_served(family)?;
        is_closed(family)?;
    }
    let opened = Port {
        node: Some(NODE_PORT),
        ..Port::USUAL
    };
    service.patch(&json!({ "type": "NodePort", "ports": ports(&[opened]) }))?;
    for family in Family::BOTH {
        let at = outside(family);
        eventually("the world is served", || talk_unseen(&cluster.world, at))?;
        is_served(family)?;
    }
    service.patch(&closed)?;
    for family in Family::BOTH {
        is_closed(family)?;
        is_served(family)?;
    }
    service.patch(&json!({
        "type": "ExternalName",
        "externalName": ELSEWHERE,
        "clusterIP": null,
        "clusterIPs": null,
        "ipFamilies": null,
        "ipFamilyPolicy": null,
    }))?;
    for family in Family::BOTH {
        let at = service.at(family)?;
        eventually("its address is nobody's", || tcp::refuses(&asks.netns, at))?;
    }
    service.delete()?;
    Pod::remove_all(cluster, vec![web, asks])
}

/// Services go on while the API server is away, and those that come after it are learnt.
pub(crate) fn kept_by_a_new_api_server(cluster: &mut Cluster) -> Result<()> {
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
    let _servers = (serve(first)?, serve(second)?);
    service.has(&[first])?;
    let places = [service.at(V4)?, service.at(V6)?];
    let is_served = |at: SocketAddr| talk(&asks.netns, at, asks.ip(Family::of(at.ip()))?);
    let mut connections = Vec::new();
    for at in places {
        eventually("it is served", || is_served(at))?;
        connections.push(tcp::Client::connect(&asks.netns, at)?);
    }
    let mut go_on = || -> Result<()> {
        for connection in &mut connections {
            connection.chat(5)?;
        }
        places.into_iter().try_for_each(is_served)
    };
    cluster.control.stop_server()?;
    // The checks after this one need it, whatever it comes to.
    let without = go_on();
    cluster.control.resume_server()?;
    without.context("while the API server is away")?;
    for member in &cluster.members {
        cluster.condition(&member.name, "Ready", "True")?;
    }
    let other = Service::with(cluster, "other", Policy::Cluster, &inner(&[Port::USUAL]))?;
    other.has(&[second])?;
    for family in Family::BOTH {
        let at = other.at(family)?;
        eventually("the new Service is served", || is_served(at))?;
    }
    go_on().context("after that")?;
    drop(connections);
    other.delete()?;
    Service::find(cluster, "web")?.delete()?;
    Pod::remove_all(cluster, pods)
}

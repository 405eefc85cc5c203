//! Services, by the rules of a real kube-proxy.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use underpass_tests::{netns::Netns, prelude::*, traffic};

use crate::{
    cluster::Cluster,
    eventually,
    pod::{Pod, Wish, talk, talk_unseen},
};

mod changes;
mod kinds;

pub(crate) use changes::{
    affinity_ends, changes_its_type, deleted_and_made_again, kept_by_a_new_api_server,
    ports_of_different_pods,
};
pub(crate) use kinds::{
    kept_by_a_new_proxy, large_datagrams, node_port_closed, of_nobody, of_one_client,
    with_outer_addresses,
};

/// Where pods listen.
const INSIDE: u16 = 8080;
/// The port of Services.
const PORT: u16 = 80;
/// The port of nodes that leads to a Service.
const NODE_PORT: u16 = 30_080;
/// So many connections meet each of two backends, as good as always.
const MANY: usize = 20;

/// How nodes treat what comes to their port from outside.
#[derive(Clone, Copy)]
enum Policy {
    /// It may go on to another node, and comes from this one then.
    Cluster,
    /// It stays on the node, and comes from who sent it.
    Local,
}

/// A Service in both families, by TCP and UDP, in front of the pods with its name as label.
struct Service<'a> {
    name: &'a str,
    cluster: &'a Cluster,
    addresses: Vec<IpAddr>,
}

impl<'a> Service<'a> {
    fn new(cluster: &'a Cluster, name: &'a str, policy: Policy) -> Result<Self> {
        Self::with(cluster, name, policy, &json!({}))
    }

    /// One whose specification has further keys.
    fn with(cluster: &'a Cluster, name: &'a str, policy: Policy, further: &Value) -> Result<Self> {
        let port = |protocol: &str| json!({ "name": protocol.to_lowercase(), "protocol": protocol, "port": PORT, "targetPort": INSIDE, "nodePort": NODE_PORT });
        let policy = match policy {
            Policy::Cluster => "Cluster",
            Policy::Local => "Local",
        };
        let mut service = json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": name, "namespace": "default" },
            "spec": {
                "type": "NodePort",
                "ipFamilyPolicy": "RequireDualStack",
                "externalTrafficPolicy": policy,
                "selector": { "app": name },
                "ports": [port("TCP"), port("UDP")],
            },
        });
        for (key, value) in further.as_object().into_iter().flatten() {
            service["spec"][key] = value.clone();
        }
        cluster.control.apply(&[service])?;
        Self::find(cluster, name)
    }

    /// One that is there.
    fn find(cluster: &'a Cluster, name: &'a str) -> Result<Self> {
        let service = cluster.control.get(&["service", name])?;
        let addresses = service["spec"]["clusterIPs"]
            .as_array()
            .context("no addresses")?;
        let addresses = addresses.iter().filter_map(Value::as_str);
        let addresses: Result<Vec<_>, _> = addresses.map(str::parse).collect();
        Ok(Self {
            name,
            cluster,
            addresses: addresses?,
        })
    }

    fn at(&self, family: Family) -> Result<SocketAddr> {
        let mut addresses = self.addresses.iter().copied();
        let ip = addresses
            .find(|&ip| Family::of(ip) == family)
            .with_context(|| format!("the Service has no {family:?} address"))?;
        Ok(SocketAddr::new(ip, PORT))
    }

    /// Waits until the API has these pods, and no others, behind it.
    fn has(&self, pods: &[&Pod]) -> Result<()> {
        let label = format!("--selector=kubernetes.io/service-name={}", self.name);
        let mut expected: Vec<String> = pods
            .iter()
            .flat_map(|pod| pod.addresses())
            .map(ToString::to_string)
            .collect();
        expected.sort();
        eventually("the Service has its endpoints", || {
            let slices = self.cluster.control.get(&["endpointslices", &label])?;
            let slices = slices["items"].as_array().into_iter().flatten();
            let endpoints = slices
                .filter_map(|slice| slice["endpoints"].as_array())
                .flatten();
            let mut addresses: Vec<String> = endpoints
                .filter_map(|endpoint| endpoint["addresses"][0].as_str().map(str::to_owned))
                .collect();
            addresses.sort();
            ensure!(
                addresses == expected,
                "{addresses:?} instead of {expected:?}"
            );
            Ok(())
        })
    }

    /// Changes its specification.
    fn patch(&self, changes: &Value) -> Result<()> {
        let patch = json!({ "spec": changes }).to_string();
        // The other kind of patch takes two ports with one number for the same.
        let arguments = [
            "patch",
            "service",
            self.name,
            "--type=merge",
            "--patch",
            &patch,
        ];
        self.cluster.control.kubectl(&arguments).map(drop)
    }

    fn delete(self) -> Result<()> {
        self.cluster
            .control
            .kubectl(&["delete", "service", self.name])
            .map(drop)
    }
}

/// Servers of each family, until dropped.
type Servers = Vec<(tcp::Server, udp::Server)>;

/// Servers in a pod, in both families.
fn serve(pod: &Pod) -> Result<Servers> {
    serve_at(pod, INSIDE)
}

/// The same at another port.
fn serve_at(pod: &Pod, inside: u16) -> Result<Servers> {
    let at = |family| traffic::serve(&pod.netns, pod.at(family, inside)?);
    Family::BOTH.into_iter().map(at).collect()
}

/// Pods of each node and the nodes themselves reach a pod by a Service, in both families; the pod sees theirs.
pub(crate) fn cluster_ip(cluster: &mut Cluster) -> Result<()> {
    let mut wishes = vec![Wish::new("web", "node1")];
    for member in &cluster.members {
        wishes.push(Wish::new(&format!("asks-on-{}", member.name), &member.name));
    }
    let pods = Pod::start(cluster, &wishes)?;
    let service = Service::new(cluster, "web", Policy::Cluster)?;
    let servers = serve(&pods[0])?;
    service.has(&[&pods[0]])?;
    for family in Family::BOTH {
        let at = service.at(family)?;
        for client in &pods[1..] {
            eventually(&format!("{} is served", client.name), || {
                talk(&client.netns, at, client.ip(family)?)
            })?;
        }
        for member in &cluster.members {
            talk_unseen(member.node.netns(), at)
                .with_context(|| format!("from {}", member.name))?;
        }
        talk_unseen(&pods[0].netns, at).context("from the pod behind it")?;
    }
    drop(servers);
    service.delete()?;
    Pod::remove_all(cluster, pods)
}

/// The world and pods reach a pod by each node's port.
pub(crate) fn node_port(cluster: &mut Cluster) -> Result<()> {
    let pods = Pod::start(
        cluster,
        &[
            Wish::new("web", "node1"),
            Wish::new("asks", "node1"),
            Wish::new("far", "node3"),
        ],
    )?;
    let service = Service::new(cluster, "web", Policy::Cluster)?;
    let servers = serve(&pods[0])?;
    service.has(&[&pods[0]])?;
    for family in Family::BOTH {
        for member in &cluster.members {
            let at = SocketAddr::new(member.address(family), NODE_PORT);
            let clients: [(&str, &Netns); 3] = [
                ("the world", &cluster.world),
                ("a pod beside it", &pods[1].netns),
                ("a pod behind the router", &pods[2].netns),
            ];
            for (who, client) in clients {
                let what = format!("{who} by the port of {}", member.name);
                eventually(&what, || talk_unseen(client, at))?;
            }
        }
    }
    drop(servers);
    service.delete()?;
    Pod::remove_all(cluster, pods)
}

/// With the policy Local a pod sees who in the world asks.
pub(crate) fn node_port_local(cluster: &mut Cluster) -> Result<()> {
    let web = Pod::start_one(cluster, &Wish::new("web", "node3"))?;
    let service = Service::new(cluster, "web", Policy::Local)?;
    let servers = serve(&web)?;
    service.has(&[&web])?;
    let member = cluster.member("node3")?;
    for family in Family::BOTH {
        let at = SocketAddr::new(member.address(family), NODE_PORT);
        let world = crate::cluster::router(family, member.link);
        eventually("the world is served", || talk(&cluster.world, at, world))?;
    }
    drop(servers);
    service.delete()?;
    web.remove(cluster)
}

/// Connections find another pod when the one behind a Service goes, also those of a socket that has talked to it.
pub(crate) fn moves(cluster: &mut Cluster) -> Result<()> {
    let pods = Pod::start(
        cluster,
        &[
            Wish::new("first", "node2").of_app("web"),
            Wish::new("near", "node2"),
            Wish::new("far", "node3"),
        ],
    )?;
    let [first, near, far] =
        <[Pod; 3]>::try_from(pods).map_err(|_| anyhow::anyhow!("three pods"))?;
    let service = Service::new(cluster, "web", Policy::Cluster)?;
    let before = serve(&first)?;
    service.has(&[&first])?;
    let mut sockets = Vec::new();
    for family in Family::BOTH {
        let at = service.at(family)?;
        for client in [&near, &far] {
            eventually("it is served", || {
                talk(&client.netns, at, client.ip(family)?)
            })?;
            let mut socket = udp::Client::open(&client.netns, family)?;
            socket.chat(at, MANY)?;
            sockets.push((socket, at));
        }
        // A process of a node, and a pod by another node's port.
        let member = cluster.member("node1")?;
        let outside = SocketAddr::new(member.address(family), NODE_PORT);
        for (client, at) in [(member.node.netns(), at), (&far.netns, outside)] {
            eventually(&format!("{at} is served"), || talk_unseen(client, at))?;
            let mut socket = udp::Client::open(client, family)?;
            socket.chat(at, MANY)?;
            sockets.push((socket, at));
        }
    }
    let second = Pod::start_one(cluster, &Wish::new("second", "node1").of_app("web"))?;
    let after = serve(&second)?;
    service.has(&[&first, &second])?;
    first.remove(cluster)?;
    drop(before);
    service.has(&[&second])?;
    for (socket, at) in &mut sockets {
        eventually(&format!("an old socket finds the pod behind {at}"), || {
            socket.chat(*at, MANY).map(drop)
        })?;
    }
    for family in Family::BOTH {
        let at = service.at(family)?;
        for client in [&near, &far] {
            for _ in 0..MANY {
                talk(&client.netns, at, client.ip(family)?)?;
            }
        }
    }
    drop(after);
    service.delete()?;
    Pod::remove_all(cluster, vec![second, near, far])
}

/// A socket that talks to a pod by a Service talks to another one when that pod is taken out of it, though it lives and listens.
pub(crate) fn taken_out(cluster: &mut Cluster) -> Result<()> {
    let wishes = [
        Wish::new("first", "node1").of_app("web"),
        Wish::new("second", "node2").of_app("out"),
        Wish::new("near", "node1"),
        Wish::new("far", "node3"),
    ];
    let pods = Pod::start(cluster, &wishes)?;
    let [first, second, near, far] = &pods[..] else {
        anyhow::bail!("four pods");
    };
    let service = Service::new(cluster, "web", Policy::Cluster)?;
    let _servers = [by_name(first)?, by_name(second)?];
    service.has(&[first])?;
    let mut sockets = Vec::new();
    for family in Family::BOTH {
        for client in [near, far] {
            sockets.push(Socket::open(&client.netns, service.at(family)?)?);
        }
    }
    let all_hear = |name: &str| {
        let mut sockets = sockets.iter();
        sockets.try_for_each(|socket| {
            eventually(&format!("{} hears {name}", socket.at), || {
                socket.hears(name)
            })
        })
    };
    all_hear("first")?;
    let label = |pod: &Pod, app: &str| {
        let app = format!("app={app}");
        let arguments = ["label", "pod", &pod.name, &app, "--overwrite"];
        cluster.control.kubectl(&arguments).map(drop)
    };
    label(second, "web")?;
    label(first, "out")?;
    service.has(&[second])?;
    all_hear("second")?;
    service.delete()?;
    Pod::remove_all(cluster, pods)
}

/// Servers in a pod that say its name, in both families.
fn by_name(pod: &Pod) -> Result<Vec<Named>> {
    let at = |family| Named::start(&pod.netns, pod.at(family, INSIDE)?, &pod.name);
    Family::BOTH.into_iter().map(at).collect()
}

/// A server that answers all with its name, until dropped.
struct Named(Arc<AtomicBool>);

impl Named {
    fn start(netns: &Netns, at: SocketAddr, name: &str) -> Result<Self> {
        let socket = netns.run(|| UdpSocket::bind(at))?;
        socket.set_read_timeout(Some(traffic::SILENCE))?;
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, name) = (Arc::clone(&stop), name.to_owned());
        thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                // Nobody asks for a while, or an ICMP error of an earlier answer.
                if let Ok((_, from)) = socket.recv_from(&mut [0; 64]) {
                    let _ = socket.send_to(name.as_bytes(), from);
                }
            }
        });
        Ok(Self(stop))
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A socket that always asks at the same place.
struct Socket {
    socket: UdpSocket,
    at: SocketAddr,
}

impl Socket {
    fn open(netns: &Netns, at: SocketAddr) -> Result<Self> {
        let socket = netns.run(|| UdpSocket::bind(Family::of(at.ip()).port(0)))?;
        socket.set_read_timeout(Some(traffic::SILENCE))?;
        Ok(Self { socket, at })
    }

    /// Fails unless so many answers in a row are that name.
    fn hears(&self, name: &str) -> Result<()> {
        for _ in 0..MANY {
            let said = self.hears_one()?;
            ensure!(said == name, "{said} answers");
        }
        Ok(())
    }

    /// Who answers.
    fn hears_one(&self) -> Result<String> {
        self.socket.send_to(b"who", self.at)?;
        let mut buffer = [0; 64];
        let (len, _) = self.socket.recv_from(&mut buffer)?;
        Ok(String::from_utf8_lossy(&buffer[..len]).into_owned())
    }
}

/// A pod reaches the API server as pods do, by the Service that it has made for itself.
pub(crate) fn api_server(cluster: &mut Cluster) -> Result<()> {
    let pod = Pod::start_one(cluster, &Wish::new("asks", "node3"))?;
    let service = cluster.control.get(&["service", "kubernetes"])?;
    let ip = service["spec"]["clusterIP"]
        .as_str()
        .context("no address")?;
    let at = SocketAddr::new(ip.parse()?, 443);
    eventually("the API server takes a connection", || {
        tcp::Client::try_connect(&pod.netns, at, traffic::PATIENCE).map(drop)
    })?;
    pod.remove(cluster)
}

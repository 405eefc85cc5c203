//! Pods as the API has them, and how they are seen from inside.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use serde_json::{Value, json};
use underpass_runtimes::{containerd::addresses, image};
use underpass_tests::{netns::Netns, prelude::*};

use crate::{cluster::Cluster, eventually, member::Member};

/// What a pod shall be.
#[derive(Clone, Debug)]
pub(crate) struct Wish(Value);

impl Wish {
    /// A pod that waits, on the node with that name.
    pub(crate) fn new(name: &str, node: &str) -> Self {
        Self(json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": name, "namespace": "default", "labels": { "app": name }, "annotations": {} },
            "spec": {
                // The scheduler chooses the node, so that one that is not ready gets none.
                "nodeSelector": { "kubernetes.io/hostname": node },
                "automountServiceAccountToken": false,
                "enableServiceLinks": false,
                "terminationGracePeriodSeconds": 1,
                "containers": [{
                    "name": "only",
                    "image": image::NAME,
                    "imagePullPolicy": "Never",
                    "command": ["/bin/busybox", "sleep", "1000000"],
                }],
            },
        }))
    }

    /// The same as one of those behind a Service.
    pub(crate) fn of_app(mut self, app: &str) -> Self {
        self.0["metadata"]["labels"]["app"] = app.into();
        self
    }

    /// The same with an annotation.
    pub(crate) fn annotated(mut self, key: &str, value: &str) -> Self {
        self.0["metadata"]["annotations"][key] = value.into();
        self
    }

    /// The same with a port of the node, by TCP and UDP.
    pub(crate) fn with_host_port(mut self, host: u16, inside: u16) -> Self {
        self.0["spec"]["containers"][0]["ports"] = ["TCP", "UDP"]
            .map(|protocol| json!({ "hostPort": host, "containerPort": inside, "protocol": protocol }))
            .to_vec()
            .into();
        self
    }

    /// The same with a port of one address of the node, by one protocol.
    pub(crate) fn with_host_port_at(
        mut self,
        ip: IpAddr,
        protocol: &str,
        host: u16,
        inside: u16,
    ) -> Self {
        let port = json!({ "hostIP": ip.to_string(), "hostPort": host, "containerPort": inside, "protocol": protocol });
        self.0["spec"]["containers"][0]["ports"] = json!([port]);
        self
    }

    /// The same with a port that Services find by its name and protocol (`<name>-tcp`, `<name>-udp`).
    pub(crate) fn with_named_port(mut self, name: &str, inside: u16) -> Self {
        self.0["spec"]["containers"][0]["ports"] = ["TCP", "UDP"]
            .map(|protocol| json!({ "name": named_port(name, protocol), "containerPort": inside, "protocol": protocol }))
            .to_vec()
            .into();
        self
    }

    /// The same with a server, which the kubelet asks whether it is ready.
    pub(crate) fn probed(mut self, port: u16) -> Self {
        let container = &mut self.0["spec"]["containers"][0];
        container["command"] = json!(["/bin/busybox", "httpd", "-f", "-p", port.to_string()]);
        container["readinessProbe"] = json!({ "tcpSocket": { "port": port }, "periodSeconds": 1 });
        self
    }

    /// The same as a kubelet finds it in a file: no scheduler has to choose its node.
    pub(crate) fn fixed(mut self) -> Self {
        if let Some(spec) = self.0["spec"].as_object_mut() {
            spec.remove("nodeSelector");
        }
        self
    }

    /// As the API has it.
    pub(crate) fn json(&self) -> &Value {
        &self.0
    }

    fn name(&self) -> &str {
        self.0["metadata"]["name"].as_str().unwrap_or_default()
    }
}

/// What a port is called by which a pod is asked for something, by one protocol.
pub(crate) fn named_port(name: &str, protocol: &str) -> String {
    format!("{name}-{}", protocol.to_lowercase())
}

/// A pod that runs.
#[derive(Debug)]
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) netns: Netns,
    /// The runtime's number of its container.
    pub(crate) container: String,
    addresses: Vec<IpAddr>,
}

impl Pod {
    /// Has the API know some pods, and waits until they run.
    pub(crate) fn start(cluster: &Cluster, wishes: &[Wish]) -> Result<Vec<Self>> {
        let objects: Vec<Value> = wishes.iter().map(|wish| wish.json().clone()).collect();
        cluster.control.apply(&objects)?;
        wishes
            .iter()
            .map(|wish| Self::wait(cluster, wish.name()))
            .collect()
    }

    /// As [`Self::start`], for one.
    pub(crate) fn start_one(cluster: &Cluster, wish: &Wish) -> Result<Self> {
        let mut pods = Self::start(cluster, std::slice::from_ref(wish))?;
        pods.pop().context("one pod")
    }

    /// Waits until a pod runs.
    pub(crate) fn wait(cluster: &Cluster, name: &str) -> Result<Self> {
        let mut pod = Value::Null;
        eventually(&format!("pod {name} is ready"), || {
            pod = cluster.control.get(&["pod", name])?;
            let status = &pod["status"];
            let ready = status["containerStatuses"][0]["ready"] == true;
            ensure!(ready, "{}", explain(cluster, name, status));
            Ok(())
        })?;
        let node = pod["spec"]["nodeName"]
            .as_str()
            .context("a pod on no node")?;
        let member = cluster.member(node)?;
        let id = pod["status"]["containerStatuses"][0]["containerID"].as_str();
        let id = id
            .and_then(|id| id.strip_prefix("containerd://"))
            .context("a pod without container")?;
        let texts = pod["status"]["podIPs"]
            .as_array()
            .context("a pod without addresses")?;
        let texts = texts.iter().filter_map(|entry| entry["ip"].as_str());
        let addresses: Result<_, _> = texts.map(str::parse).collect();
        Ok(Self {
            name: name.to_owned(),
            netns: member.netns_of(id, name)?,
            container: id.to_owned(),
            addresses: addresses?,
        })
    }

    /// Waits until a pod runs on a node that no API server has told about, and looks inside.
    pub(crate) fn of_runtime(member: &Member, name: &str) -> Result<Self> {
        let label = format!("labels.\"io.kubernetes.pod.name\"=={name}");
        let mut found = None;
        eventually(&format!("{name} runs"), || {
            let listed = member
                .containerd
                .ctr(&["containers", "ls", "--quiet", &label])?;
            let ids: Vec<&str> = listed.lines().collect();
            // The pod's own process, and the container's.
            ensure!(ids.len() == 2, "{ids:?}");
            let netns: Result<Vec<Netns>> =
                ids.iter().map(|id| member.netns_of(id, name)).collect();
            found = netns?.pop().map(|netns| (netns, ids[0].to_owned()));
            Ok(())
        })?;
        let (netns, container) = found.context("a namespace")?;
        Ok(Self {
            name: name.to_owned(),
            addresses: addresses(&netns)?,
            netns,
            container,
        })
    }

    /// Its addresses, as the API says.
    pub(crate) fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// Its address of a family.
    pub(crate) fn ip(&self, family: Family) -> Result<IpAddr> {
        let mut addresses = self.addresses.iter().copied();
        addresses
            .find(|&ip| Family::of(ip) == family)
            .with_context(|| format!("{} has no {family:?} address", self.name))
    }

    pub(crate) fn at(&self, family: Family, port: u16) -> Result<SocketAddr> {
        Ok(SocketAddr::new(self.ip(family)?, port))
    }

    /// Has the API forget it, and waits until the kubelet has removed it.
    pub(crate) fn remove(self, cluster: &Cluster) -> Result<()> {
        remove(cluster, &[&self.name])
    }

    /// As [`Self::remove`], for many.
    pub(crate) fn remove_all(cluster: &Cluster, pods: Vec<Self>) -> Result<()> {
        let names: Vec<String> = pods.into_iter().map(|pod| pod.name).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        remove(cluster, &names)
    }
}

/// Has the API forget pods, and waits until it has: this kubelet takes half a minute sometimes, long after the pod is gone.
pub(crate) fn remove(cluster: &Cluster, names: &[&str]) -> Result<()> {
    let delete = ["delete", "pod", "--wait=false"];
    cluster.control.kubectl(&[&delete, names].concat())?;
    eventually(&format!("{names:?} are deleted"), || {
        let pods = cluster.control.get(&["pods"])?;
        let pods = pods["items"].as_array().context("no list")?;
        let mut left = pods.iter().map(|pod| &pod["metadata"]["name"]);
        ensure!(
            !left.any(|name| names.iter().any(|deleted| name == deleted)),
            "not all are gone"
        );
        Ok(())
    })
}

/// What the API says of a pod that is not ready.
fn explain(cluster: &Cluster, name: &str, status: &Value) -> String {
    let field = format!("--field-selector=involvedObject.name={name}");
    let events = cluster.control.get(&["events", &field]).unwrap_or_default();
    let items = events["items"].as_array().into_iter().flatten();
    let messages: BTreeSet<String> = items.map(|event| event["message"].to_string()).collect();
    format!("{status} {messages:?}")
}

/// Fails unless a pod has an address of each of these ranges, and no other.
pub(crate) fn is_of_ranges(pod: &Pod, ranges: &[String]) -> Result<()> {
    let addresses = pod.addresses();
    ensure!(addresses.len() == ranges.len(), "{addresses:?}");
    for (ip, range) in addresses.iter().zip(ranges) {
        let range: IpNet = range.parse()?;
        ensure!(range.contains(ip), "{ip} is not in {range}");
    }
    Ok(())
}

/// Fails unless each of these pods reaches all others in both families, who see its own address.
pub(crate) fn all_reach_all(pods: &[Pod]) -> Result<()> {
    const PORT: u16 = 8080;
    for family in Family::BOTH {
        let mut servers = Vec::new();
        for pod in pods {
            servers.push(underpass_tests::traffic::serve(
                &pod.netns,
                pod.at(family, PORT)?,
            )?);
        }
        for from in pods {
            for to in pods {
                if from.name != to.name {
                    talk(&from.netns, to.at(family, PORT)?, from.ip(family)?)
                        .with_context(|| format!("{} to {}", from.name, to.name))?;
                }
            }
        }
        drop(servers);
    }
    Ok(())
}

/// Talks by TCP and UDP: whoever answers must see this address.
pub(crate) fn talk(from: &Netns, to: SocketAddr, expected: IpAddr) -> Result<()> {
    let seen = tcp::Client::connect(from, to)?
        .exchange(200_000, 200_000)?
        .seen
        .ip();
    ensure!(seen == expected, "by TCP {to} saw {seen}, not {expected}");
    let seen = udp::Client::open(from, Family::of(to.ip()))?
        .chat(to, 5)?
        .seen
        .ip();
    ensure!(seen == expected, "by UDP {to} saw {seen}, not {expected}");
    Ok(())
}

/// As [`talk`], whoever is seen.
pub(crate) fn talk_unseen(from: &Netns, to: SocketAddr) -> Result<()> {
    tcp::Client::connect(from, to)?.exchange(200_000, 200_000)?;
    udp::Client::open(from, Family::of(to.ip()))?.chat(to, 5)?;
    Ok(())
}

//! What must hold, in the order in which a cluster comes to be and goes.

use anyhow::Result;

use crate::{cluster::Cluster, score::Score};

mod announced;
mod deployed;
mod leaving;
mod life;
mod node;
mod readiness;
mod service;
mod traffic;

/// A check: what holds if it passes, and how to see it.
type Check = (&'static str, fn(&mut Cluster) -> Result<()>);

/// Without these none of the others can pass.
const FIRST: &[Check] = &[
    (
        "nodes have ranges of both families, and are not ready without a network",
        readiness::not_without_network,
    ),
    (
        "an agent without its role installs nothing",
        readiness::not_without_role,
    ),
    (
        "nodes are ready once the agent has installed their ranges",
        readiness::with_agent,
    ),
];

/// Each leaves the cluster as it was if it passes, but the last one.
const THEN: &[Check] = &[
    (
        "the agent's role is to list and watch nodes, and nothing else",
        readiness::role_is_small,
    ),
    (
        "with two components the agent says in its Node that there is a network, and takes a taint off",
        announced::condition_and_taint,
    ),
    (
        "the API server takes the file and each of its components, and no field that it does not know",
        deployed::fits_the_server,
    ),
    ("pods of one node reach each other", traffic::on_one_node),
    (
        "pods of all nodes reach each other, by routes and by VXLAN",
        traffic::between_nodes,
    ),
    (
        "ClusterIPs lead to pods of all nodes, and back to the pod that asks",
        service::cluster_ip,
    ),
    (
        "ports of all nodes lead to a pod, from the world and from pods",
        service::node_port,
    ),
    (
        "with the policy Local a pod sees who in the world asks",
        service::node_port_local,
    ),
    (
        "the Service of the API server is reached from pods",
        service::api_server,
    ),
    (
        "a Service's clients find the pod that takes another's place",
        service::moves,
    ),
    (
        "a Service's clients leave a pod that is taken out of it",
        service::taken_out,
    ),
    (
        "a Service with the affinity ClientIP keeps each client at one pod",
        service::of_one_client,
    ),
    (
        "a client that was silent for longer than a Service's affinity lasts comes to other pods",
        service::affinity_ends,
    ),
    (
        "a Service leads to other pods by each of its ports, and by one that it loses to nobody",
        service::ports_of_different_pods,
    ),
    (
        "a Service has addresses from outside of the cluster as well",
        service::with_outer_addresses,
    ),
    ("a Service without pods refuses at once", service::of_nobody),
    (
        "a Service that gives up its port of the nodes keeps its address",
        service::node_port_closed,
    ),
    (
        "a Service that is deleted serves nobody until it is made again, and another one of its pod goes on",
        service::deleted_and_made_again,
    ),
    (
        "a Service that named another one gets an address, a port of the nodes, and loses both",
        service::changes_its_type,
    ),
    (
        "connections by a Service outlive kube-proxy",
        service::kept_by_a_new_proxy,
    ),
    (
        "Services go on without the API server, and new ones are learnt after it",
        service::kept_by_a_new_api_server,
    ),
    (
        "datagrams that need fragments pass a Service",
        service::large_datagrams,
    ),
    ("kubelets reach their pods", node::probes),
    ("twenty pods come and go at once", node::crowd),
    (
        "a pod whose sandbox is killed gets another network",
        node::dead_sandbox,
    ),
    (
        "a pod with hostPort is reached from everywhere, until it goes",
        node::host_port,
    ),
    (
        "pods of a node share a hostPort, by address and protocol",
        node::shared_host_port,
    ),
    (
        "a pod with bandwidth annotations has these rates",
        node::bandwidth,
    ),
    ("a deleted pod gives its addresses back", node::lease),
    (
        "without the API server pods come, go and reach each other",
        life::without_api_server,
    ),
    (
        "without agents pods come, go and reach each other",
        life::without_agents,
    ),
    ("pods outlive the kubelets", life::with_another_kubelet),
    ("pods outlive containerd", life::with_another_runtime),
    (
        "a Node that is deleted loses its routes, and gets others when it comes back",
        leaving::another_range,
    ),
    (
        "status, doctor and selftest have no complaint",
        leaving::command_line,
    ),
    (
        "uninstall leaves nothing of the plugin, and the agent installs it again",
        leaving::uninstalled,
    ),
    (
        "one file makes the network, and nothing goes with it",
        deployed::by_manifest,
    ),
];

/// Runs the checks, of the later ones those that are wanted, if any are.
pub(crate) fn all(cluster: &mut Cluster, score: &mut Score, wanted: &[String]) -> Result<()> {
    for (what, check) in FIRST {
        let outcome = check(cluster);
        score.record(what, &outcome);
        outcome?;
    }
    let is_wanted =
        |what: &str| wanted.is_empty() || wanted.iter().any(|word| what.contains(word.as_str()));
    for (what, check) in THEN.iter().filter(|(what, _)| is_wanted(what)) {
        let outcome = check(cluster);
        score.record(what, &outcome);
        if outcome.is_err() {
            cluster.clear()?;
        }
    }
    Ok(())
}

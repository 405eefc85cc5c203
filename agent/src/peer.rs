//! What the agent wants to know of a Node, and what it does not believe.
//!
//! The watch is of whole Nodes, whose status lists images by the dozen; only these fields of it are kept, so a
//! thousand Nodes take less than a megabyte.

use std::borrow::Cow;
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Resource;
use kube::core::{ClusterResourceScope, ObjectMeta};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// A Node of the API, as far as it matters here.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Node {
    #[serde(deserialize_with = "few")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Spec {
    // Nodes of before Kubernetes 1.16 have this one alone.
    #[serde(rename = "podCIDR")]
    pod_cidr: Option<String>,
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Option<Vec<String>>,
    taints: Option<Vec<Value>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    addresses: Option<Vec<Address>>,
    conditions: Option<Vec<Condition>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Condition {
    r#type: String,
    status: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Address {
    r#type: String,
    address: String,
}

/// Decodes what is needed of a Node's metadata: labels, annotations and who wrote what are far larger.
fn few<'de, D: Deserializer<'de>>(metadata: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Few {
        name: Option<String>,
        uid: Option<String>,
        resource_version: Option<String>,
        creation_timestamp: Option<Time>,
    }
    let few = Few::deserialize(metadata)?;
    Ok(ObjectMeta {
        name: few.name,
        uid: few.uid,
        resource_version: few.resource_version,
        creation_timestamp: few.creation_timestamp,
        ..ObjectMeta::default()
    })
}

/// Which of a Node's addresses the other nodes reach it by.
const INTERNAL: &str = "InternalIP";

impl Resource for Node {
    type DynamicType = ();
    type Scope = ClusterResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Node".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "nodes".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// A node of the cluster: where it is, and which addresses its pods have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Its internal addresses, in the order in which the API has them.
    pub(crate) addresses: Vec<IpAddr>,
    /// The ranges of its pods, in order: the first one is of the cluster's first family.
    pub(crate) pod_cidrs: Vec<IpNet>,
    /// When it was registered, in seconds since 1970; 0 where the API does not say.
    pub(crate) registered: i64,
}

impl Peer {
    /// The first address of a family.
    pub(crate) fn address(&self, like: IpAddr) -> Option<IpAddr> {
        let same = |address: &&IpAddr| address.is_ipv4() == like.is_ipv4();
        self.addresses.iter().find(same).copied()
    }
}

/// The condition that says whether the network of pods is missing.
pub(crate) const NETWORK_UNAVAILABLE: &str = "NetworkUnavailable";

/// What of this node's own Node may be written over: kept of one Node only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Own {
    /// Another one after the Node was deleted and made again.
    pub(crate) uid: String,
    /// The ranges of its pods, in order.
    pub(crate) pod_cidrs: Vec<IpNet>,
    /// The status of [`NETWORK_UNAVAILABLE`], if somebody has set that.
    pub(crate) network_unavailable: Option<String>,
    /// All taints, as the API has them: with fields that nobody knows here.
    pub(crate) taints: Vec<Value>,
}

/// Decodes what is needed of this node's own Node; `peer` is what it says as every Node does.
pub(crate) fn own(node: &Node, peer: &Peer) -> Own {
    let mut conditions = node.status.conditions.iter().flatten();
    let condition = conditions.find(|condition| condition.r#type == NETWORK_UNAVAILABLE);
    Own {
        uid: node.metadata.uid.clone().unwrap_or_default(),
        pod_cidrs: peer.pod_cidrs.clone(),
        network_unavailable: condition.map(|condition| condition.status.clone()),
        taints: node.spec.taints.clone().unwrap_or_default(),
    }
}

/// Decodes a Node. What is wrong in it is returned beside: the rest of it counts.
pub(crate) fn peer(node: &Node) -> (Peer, Vec<String>) {
    let mut wrong = Vec::new();
    let spec = &node.spec;
    let ranges = match &spec.pod_cidrs {
        Some(ranges) if !ranges.is_empty() => ranges.clone(),
        _ => spec.pod_cidr.iter().cloned().collect(),
    };
    let pod_cidrs = ranges
        .iter()
        .filter(|range| !range.is_empty())
        .filter_map(|text| match text.parse::<IpNet>() {
            Ok(range) if is_of_pods(range) => Some(range.trunc()),
            Ok(_) => {
                wrong.push(format!("podCIDR {text} is no range that pods can have"));
                None
            }
            Err(_) => {
                wrong.push(format!("podCIDR {text:?} is no range of addresses"));
                None
            }
        })
        .collect();
    let addresses = node.status.addresses.iter().flatten();
    let addresses = addresses
        .filter(|address| address.r#type == INTERNAL)
        .filter_map(|address| match address.address.parse::<IpAddr>() {
            Ok(address) if is_of_a_node(address) => Some(address),
            _ => {
                wrong.push(format!(
                    "{INTERNAL} {:?} is no address of a node",
                    address.address
                ));
                None
            }
        })
        .collect();
    let registered = node.metadata.creation_timestamp.as_ref();
    let peer = Peer {
        addresses,
        pod_cidrs,
        registered: registered.map_or(0, |time| time.0.as_second()),
    };
    (peer, wrong)
}

/// A Node that anybody could write must not take the default route, or the loopback addresses.
fn is_of_pods(range: IpNet) -> bool {
    let shortest = if range.addr().is_ipv4() { 8 } else { 32 };
    range.prefix_len() >= shortest && is_of_a_node(range.network())
}

fn is_of_a_node(address: IpAddr) -> bool {
    !address.is_unspecified() && !address.is_loopback() && !address.is_multicast() && {
        match address {
            IpAddr::V4(address) => !address.is_link_local() && !address.is_broadcast(),
            IpAddr::V6(address) => {
                !address.is_unicast_link_local() && address.to_ipv4_mapped().is_none()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(text: &str) -> (Peer, Vec<String>) {
        peer(&serde_json::from_str(text).expect("a Node"))
    }

    #[test]
    fn a_node_has_internal_addresses_and_ranges_in_order() {
        let (peer, wrong) = decode(
            r#"{"metadata": {"name": "a"},
                "spec": {"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24", "fd00:1::/64"]},
                "status": {"addresses": [{"type": "Hostname", "address": "a"}, {"type": "InternalIP", "address": "192.0.2.1"},
                                         {"type": "ExternalIP", "address": "198.51.100.1"}, {"type": "InternalIP", "address": "2001:db8::1"}],
                           "images": [{"names": ["x"], "sizeBytes": 1}]}}"#,
        );
        assert_eq!(wrong, Vec::<String>::new());
        assert_eq!(
            peer.addresses
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>(),
            ["192.0.2.1", "2001:db8::1"]
        );
        assert_eq!(
            peer.pod_cidrs
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>(),
            ["10.1.0.0/24", "fd00:1::/64"]
        );
    }

    #[test]
    fn an_old_or_young_node_lacks_some_of_it() {
        let (peer, wrong) =
            decode(r#"{"metadata": {"name": "a"}, "spec": {"podCIDR": "10.1.0.0/24"}}"#);
        assert_eq!(
            (peer.pod_cidrs.len(), peer.addresses.len(), wrong.len()),
            (1, 0, 0)
        );
        let (peer, wrong) =
            decode(r#"{"metadata": {"name": "a"}, "spec": {}, "status": {"addresses": null}}"#);
        assert_eq!((peer, wrong.len()), (Peer::default(), 0));
    }

    #[test]
    fn a_range_that_would_take_others_traffic_is_not_believed() {
        for range in [
            "0.0.0.0/0",
            "::/0",
            "127.0.0.0/8",
            "224.0.0.0/8",
            "fe80::/64",
            "10.0.0.0/4",
            "pods",
            "::ffff:10.0.0.0/112",
        ] {
            let (peer, wrong) = decode(&format!(
                r#"{{"metadata": {{"name": "a"}}, "spec": {{"podCIDRs": ["{range}"]}}}}"#
            ));
            assert_eq!((peer.pod_cidrs.len(), wrong.len()), (0, 1), "{range}");
        }
        for address in ["127.0.0.1", "0.0.0.0", "fe80::1", "a.example"] {
            let (peer, wrong) = decode(&format!(
                r#"{{"metadata": {{"name": "a"}}, "status": {{"addresses": [{{"type": "InternalIP", "address": "{address}"}}]}}}}"#
            ));
            assert_eq!((peer.addresses.len(), wrong.len()), (0, 1), "{address}");
        }
    }
}

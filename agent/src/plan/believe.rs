//! What is believed of what Nodes say. Who may write a Node can name any range and any address.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use super::{Inputs, OnLink};
use crate::options::Routing;
use crate::peer::Peer;

/// Finds this node's Node. An error is why it is not believed: a list that lacks it may be half of one, and a Node that was
/// just registered, or registered again, has no address before a cloud's controller has seen it. Nobody knows the way to
/// such a node yet.
pub(crate) fn myself<'a>(inputs: &Inputs<'a>) -> Result<&'a Peer, String> {
    let name = inputs.own;
    let myself = inputs.nodes.get(name);
    let myself = myself.ok_or_else(|| format!("the API has no Node {name}: nothing is changed"))?;
    if myself.addresses.is_empty() && inputs.routing != Routing::Cloud {
        return Err(format!(
            "Node {name} has no InternalIP: nothing is changed until it has one"
        ));
    }
    Ok(myself)
}

/// What no range of pods may have in it.
pub(super) struct Taken<'a> {
    /// All nodes' addresses, in order, each with the time since which its Node is registered.
    nodes: Vec<(IpAddr, i64)>,
    inputs: &'a Inputs<'a>,
}

impl<'a> Taken<'a> {
    pub(super) fn new(mut nodes: Vec<(IpAddr, i64)>, inputs: &'a Inputs<'a>) -> Self {
        nodes.sort_unstable();
        Self { nodes, inputs }
    }

    /// Says what is wrong with a range of a Node.
    pub(super) fn refuse(&self, range: IpNet, peer: &Peer) -> Option<String> {
        let cluster = self.inputs.cluster;
        if !cluster.is_empty() && !cluster.iter().any(|cluster| cluster.contains(&range)) {
            return Some("which is outside of the cluster's ranges".to_owned());
        }
        let first = self
            .nodes
            .partition_point(|(node, _)| *node < range.network());
        let mut inside = self.nodes[first..]
            .iter()
            .take_while(|(node, _)| range.contains(node));
        // A Node that came later may say any address: it takes nobody's range away.
        if let Some((node, _)) = inside.find(|(_, since)| *since <= peer.registered) {
            return Some(format!("in which the node's address {node} is"));
        }
        // A small part of a large link is a common place for pods; a whole link is not.
        let is_on_link = |link: &&OnLink| range.contains(&link.net);
        let link = self.inputs.links.iter().find(is_on_link)?;
        Some(format!("in which our link {} is", link.net))
    }
}

fn overlaps(one: IpNet, other: IpNet) -> bool {
    one.contains(&other) || other.contains(&one)
}

/// Finds who has part of a range already. Those that there are do not overlap, so only its neighbours can.
pub(super) fn rival(owners: &BTreeMap<IpNet, &str>, range: IpNet) -> Option<String> {
    let before = owners.range(..=range).next_back();
    let after = owners.range(range..).next();
    let (taken, name) = before
        .into_iter()
        .chain(after)
        .find(|(taken, _)| overlaps(**taken, range))?;
    Some(format!("and Node {name} has {taken}"))
}

//! What is believed of what Nodes say. Who may write a Node can name any range and any address.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use super::{Inputs, OnLink, is_alone};
use crate::options::Routing;
use crate::peer::Peer;

/// The ranges of pods that are believed.
pub(crate) struct Believed<'a> {
    /// This node's Node.
    pub(crate) myself: &'a Peer,
    /// The ranges of its pods, in its order.
    pub(crate) own: Vec<IpNet>,
    /// What is wrong with the rest of them: there is no network then.
    pub(crate) errors: Vec<String>,
    /// Those of the other Nodes, of the older ones first, each with the Node and its name.
    pub(crate) others: Vec<(IpNet, &'a str, &'a Peer)>,
    /// What is wrong with the rest of those.
    pub(crate) remarks: Vec<String>,
}

/// Says which ranges are believed. An error is why nothing is.
pub(crate) fn believe<'a>(inputs: &Inputs<'a>) -> Result<Believed<'a>, String> {
    let myself = myself(inputs)?;
    let mut believed = Believed {
        myself,
        own: Vec::new(),
        errors: Vec::new(),
        others: Vec::new(),
        remarks: Vec::new(),
    };
    let taken = Taken::new(inputs);
    let mut owners = BTreeMap::new();
    let mut nodes: Vec<_> = inputs.nodes.iter().collect();
    // Of two Nodes with one range the older has it, on each node the same: who comes later takes nothing from anybody.
    nodes.sort_by_key(|(name, peer)| (peer.registered, *name));
    for (name, peer) in nodes {
        let is_own = name == inputs.own;
        for range in &peer.pod_cidrs {
            let refused = if is_own {
                taken.refuse_own(*range, peer)
            } else {
                taken.refuse(*range, peer)
            };
            let said = format!("Node {name} has podCIDR {range}");
            if let Some(why) = refused.or_else(|| rival(&owners, *range)) {
                let fault = format!("{said}, {why}: no route is made");
                if is_own {
                    let error = format!("{fault}, and no network installed");
                    believed.errors.push(error);
                } else {
                    believed.remarks.push(fault);
                }
                continue;
            }
            owners.insert(*range, name);
            if !is_own {
                believed.others.push((*range, name, peer));
                continue;
            }
            if let Some(why) = taken.outside(*range) {
                let remark = format!("{said}, {why}: other nodes make no route to it");
                believed.remarks.push(remark);
            }
            believed.own.push(*range);
        }
    }
    Ok(believed)
}

/// Finds this node's Node. An error is why it is not believed: a list that lacks it may be half of one, and a Node that was
/// just registered, or registered again, has no address before a cloud's controller has seen it. Nobody knows the way to
/// such a node yet.
fn myself<'a>(inputs: &Inputs<'a>) -> Result<&'a Peer, String> {
    let name = inputs.own;
    let myself = inputs.nodes.get(name);
    let myself = myself.ok_or_else(|| {
        format!("the API has no Node {name}: routes stay as they are until it has")
    })?;
    if myself.addresses.is_empty() && inputs.routing != Routing::Cloud {
        return Err(format!(
            "Node {name} has no InternalIP: routes stay as they are until it has one"
        ));
    }
    Ok(myself)
}

/// What no range of pods may have in it.
struct Taken<'a> {
    /// All nodes' addresses, in order, each with the time since which its Node is registered.
    nodes: Vec<(IpAddr, i64)>,
    inputs: &'a Inputs<'a>,
}

impl<'a> Taken<'a> {
    fn new(inputs: &'a Inputs<'a>) -> Self {
        let nodes = inputs.nodes.iter().flat_map(|(name, peer)| {
            // Ours are older than all others: nobody takes them from us.
            let since = if name == inputs.own {
                i64::MIN
            } else {
                peer.registered
            };
            peer.addresses.iter().map(move |address| (*address, since))
        });
        let mut nodes: Vec<_> = nodes.collect();
        nodes.sort_unstable();
        Self { nodes, inputs }
    }

    /// Says what is wrong with a range of another Node.
    fn refuse(&self, range: IpNet, peer: &Peer) -> Option<String> {
        self.outside(range)
            .or_else(|| self.node_in(range, peer))
            .or_else(|| self.link_in(range, |_| true))
    }

    /// Says what is wrong with a range of our own Node.
    fn refuse_own(&self, range: IpNet, myself: &Peer) -> Option<String> {
        // Another plugin may have left its pods' gateway on the node: alone, or on a bridge that has just this range.
        let is_of_pods = |link: &OnLink| is_alone(link.net) || link.is_bridge && link.net == range;
        self.node_in(range, myself)
            .or_else(|| self.link_in(range, |link| !is_of_pods(link)))
    }

    /// Says whether it is none of the cluster's.
    fn outside(&self, range: IpNet) -> Option<String> {
        let cluster = self.inputs.cluster;
        let is_inside = cluster.iter().any(|cluster| cluster.contains(&range));
        let is_outside = !cluster.is_empty() && !is_inside;
        is_outside.then(|| "which is outside of the cluster's ranges".to_owned())
    }

    /// Finds a node's address in a range of a Node.
    fn node_in(&self, range: IpNet, peer: &Peer) -> Option<String> {
        let first = self
            .nodes
            .partition_point(|(node, _)| *node < range.network());
        let mut inside = self.nodes[first..]
            .iter()
            .take_while(|(node, _)| range.contains(node));
        // A Node may say any address. One that came later takes nobody's range away, nor does any the named ranges of pods,
        // unless the address can be one: it is on our link, or ours.
        let is_on_link = |node| {
            let mut links = self.inputs.links.iter();
            links.any(|link| link.net.contains(node))
        };
        let is_named = !self.inputs.cluster.is_empty();
        let (node, _) = inside.find(|(node, since)| match since {
            &i64::MIN => true,
            since if is_on_link(node) => *since <= peer.registered,
            since => !is_named && *since < peer.registered,
        })?;
        Some(format!("in which the node's address {node} is"))
    }

    /// Finds a link of ours in a range. A small part of a large link is a common place for pods; a whole link is not.
    fn link_in(&self, range: IpNet, counts: impl Fn(&OnLink) -> bool) -> Option<String> {
        let mut links = self.inputs.links.iter();
        let link = links.find(|link| range.contains(&link.net) && counts(link))?;
        Some(format!("in which our link {} is", link.net))
    }
}

fn overlaps(one: IpNet, other: IpNet) -> bool {
    one.contains(&other) || other.contains(&one)
}

/// Finds who has part of a range already. Those that there are do not overlap, so only its neighbours can.
fn rival(owners: &BTreeMap<IpNet, &str>, range: IpNet) -> Option<String> {
    let before = owners.range(..=range).next_back();
    let after = owners.range(range..).next();
    let (taken, name) = before
        .into_iter()
        .chain(after)
        .find(|(taken, _)| overlaps(**taken, range))?;
    Some(format!("and Node {name} has {taken}"))
}

//! The cluster's Nodes, as the API last said them.
//!
//! A list that is under way counts when it is complete: what it lacks meanwhile is not gone. When the API can't be
//! reached, what was known stays.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;

use futures::{Stream, TryStreamExt as _};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::watch;

use crate::peer::{Node, Peer, peer};

/// All Nodes by name; nothing before the first whole list.
pub(crate) type Nodes = Option<Arc<BTreeMap<String, Peer>>>;

/// So many Nodes at most are listed at once: one may have 20 KiB of text, and all of an answer is in memory until it is read.
const PAGE: u32 = 100;

/// Follows the Nodes for ever.
pub(crate) async fn follow(client: Client, tell: watch::Sender<Nodes>) {
    let config = watcher::Config::default().page_size(PAGE);
    let stream = watcher(Api::<Node>::all(client), config).default_backoff();
    read(stream, tell).await;
}

async fn read(
    stream: impl Stream<Item = Result<Event<Node>, watcher::Error>>,
    tell: watch::Sender<Nodes>,
) {
    let mut stream = pin!(stream);
    let mut listed: BTreeMap<String, Peer> = BTreeMap::new();
    let mut known: BTreeMap<String, Peer> = BTreeMap::new();
    loop {
        match stream.try_next().await {
            Ok(None) => return,
            Ok(Some(Event::Init)) => listed = BTreeMap::new(),
            Ok(Some(Event::InitApply(node))) => note(&mut listed, &node),
            Ok(Some(Event::InitDone)) => {
                known = std::mem::take(&mut listed);
                publish(&tell, &known);
            }
            Ok(Some(Event::Apply(node))) => {
                note(&mut known, &node);
                publish(&tell, &known);
            }
            Ok(Some(Event::Delete(node))) => {
                known.remove(&node.name_any());
                publish(&tell, &known);
            }
            // The stream asks again by itself, later and later.
            Err(error) => {
                tracing::warn!("cannot follow the Nodes, what is known of them stays: {error}");
            }
        }
    }
}

fn note(nodes: &mut BTreeMap<String, Peer>, node: &Node) {
    let name = node.name_any();
    let (peer, wrong) = peer(node);
    // A Node is written every few minutes, and what is wrong with it stays wrong.
    if nodes.get(&name) != Some(&peer) {
        for wrong in wrong {
            tracing::warn!("Node {name}: {wrong}");
        }
    }
    nodes.insert(name, peer);
}

/// A Node changes often, and seldom what matters here.
fn publish(tell: &watch::Sender<Nodes>, nodes: &BTreeMap<String, Peer>) {
    tell.send_if_modified(|last| {
        if last.as_deref() == Some(nodes) {
            return false;
        }
        *last = Some(Arc::new(nodes.clone()));
        true
    });
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;

    fn node(name: &str, range: &str) -> Node {
        serde_json::from_value(serde_json::json!({
            "metadata": {"name": name}, "spec": {"podCIDRs": [range]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}
        }))
        .expect("a Node")
    }

    async fn after(events: Vec<Event<Node>>) -> Vec<String> {
        let (tell, nodes) = watch::channel(None);
        read(stream::iter(events.into_iter().map(Ok)), tell).await;
        let nodes: Nodes = nodes.borrow().clone();
        nodes
            .map(|nodes| nodes.keys().cloned().collect())
            .unwrap_or_default()
    }

    #[tokio::test]
    async fn a_list_counts_when_it_is_complete() {
        let list = || {
            vec![
                Event::Init,
                Event::InitApply(node("a", "10.1.0.0/24")),
                Event::InitApply(node("b", "10.2.0.0/24")),
            ]
        };
        assert_eq!(after(list()).await, Vec::<String>::new());
        let whole = [list(), vec![Event::InitDone]].concat();
        assert_eq!(after(whole.clone()).await, ["a", "b"]);
        let half_again = [
            whole.clone(),
            vec![Event::Init, Event::InitApply(node("c", "10.3.0.0/24"))],
        ]
        .concat();
        assert_eq!(after(half_again.clone()).await, ["a", "b"]);
        assert_eq!(
            after([half_again, vec![Event::InitDone]].concat()).await,
            ["c"]
        );
        let gone = [whole, vec![Event::Delete(node("b", "10.2.0.0/24"))]].concat();
        assert_eq!(after(gone).await, ["a"]);
    }
}

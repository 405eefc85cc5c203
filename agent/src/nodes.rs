//! The cluster's Nodes, as the API last said them.
//!
//! A list that is under way counts when it is complete: what it lacks meanwhile is not gone. When the API can't be
//! reached, what was known stays.

use std::collections::BTreeMap;
use std::error::Error;
use std::hash::{BuildHasher as _, RandomState};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::OptionFuture;
use futures::{Stream, TryStreamExt as _};
use kube::api::ListParams;
use kube::runtime::utils::Backoff as _;
use kube::runtime::watcher::{self, DefaultBackoff, Event, watcher};
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use crate::causes::causes;
use crate::health::Health;
use crate::peer::{Node, Own, Peer, own, peer};

/// All Nodes by name.
pub(crate) type All = BTreeMap<String, Peer>;

/// All Nodes; nothing before the first whole list.
pub(crate) type Nodes = Option<Arc<All>>;

/// So many Nodes at most are listed at once: one may have 20 KiB of text, and all of an answer is in memory until it is read.
/// Pages are of the newest version, so they are read from etcd. With `ListSemantic::Any` there are no pages, and a list may
/// be older than what is known: nodes that joined would lose their routes. `StreamingList` never ends by a server older
/// than 1.32, which takes it for a watch.
const PAGE: u32 = 100;

/// Who is told of the Nodes.
#[derive(Debug)]
pub(crate) struct Listeners {
    pub(crate) nodes: watch::Sender<Nodes>,
    /// Told of this node's own Node alone; nothing while there is none.
    pub(crate) own: watch::Sender<Option<Own>>,
}

/// How long a watch lasts, in seconds. It goes on from where it was, so that costs the API server one request. A server that went away without a
/// word (a power cut, a firewall that has forgotten the connection) is noticed five seconds after that, and never before.
const WATCH: u32 = 60;

/// Follows the Nodes for ever. `name` is that of this node's own.
///
/// About every `relist` they are listed anew. An etcd that was restored from a backup is at an earlier version than the one that the watch goes on
/// from: there it hears nothing until that comes again, and never which Nodes have gone meanwhile. No error says so.
pub(crate) async fn follow(
    client: Client,
    name: &str,
    relist: Duration,
    tell: &Listeners,
    health: &Health,
) {
    let nodes = Api::<Node>::all(client);
    let config = watcher::Config::default().page_size(PAGE).timeout(WATCH);
    let mut follower = Follower {
        name,
        tell,
        health,
        known: Known::default(),
    };
    let is_listed = async || is_listed(&nodes).await;
    loop {
        let stream = watcher(nodes.clone(), config.clone());
        follower.read(stream, scattered(relist), &is_listed).await;
    }
}

/// Asks for all pages of a list, of the names alone: a server that breaks lists off would cost the watch, which goes on.
async fn is_listed(nodes: &Api<Node>) -> kube::Result<()> {
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let list = nodes.list_metadata(&page).await?;
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(()),
        }
    }
}

/// Between three and five quarters of a time: agents that began together do not go on so.
fn scattered(time: Duration) -> Duration {
    const STEPS: u64 = 1_000;
    let random = RandomState::new().hash_one(()) % STEPS;
    let random = u32::try_from(random).unwrap_or_default();
    (time / 4 * 3).saturating_add(time / 2_000 * random)
}

/// Who reads what the API says.
struct Follower<'a> {
    name: &'a str,
    tell: &'a Listeners,
    health: &'a Health,
    known: Known,
}

impl Follower<'_> {
    /// Reads events until it is so long since the last whole list. A server that has too much to do may refuse lists, or break them off, while its watches
    /// go on: then this one does, too.
    async fn read(
        &mut self,
        stream: impl Stream<Item = Result<Event<Node>, watcher::Error>>,
        relist: Duration,
        is_listed: &impl AsyncFn() -> kube::Result<()>,
    ) {
        let mut stream = pin!(stream);
        let mut backoff = DefaultBackoff::default();
        let mut listed = Known::default();
        let mut due: Option<Instant> = None;
        let later = || Instant::now().checked_add(relist);
        // What is heard meanwhile counts.
        let mut asked = pin!(OptionFuture::default());
        loop {
            let heard = tokio::select! {
                heard = stream.try_next() => heard,
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    asked.set(Some(is_listed()).into());
                    due = None;
                    continue;
                }
                Some(answer) = &mut asked => {
                    let Err(error) = answer else {
                        return;
                    };
                    self.warn(&error, "list the Nodes anew, the watch of them goes on");
                    asked.set(OptionFuture::default());
                    due = later();
                    continue;
                }
            };
            match heard {
                Ok(None) => return,
                Ok(Some(Event::Init)) => listed = Known::default(),
                Ok(Some(Event::InitApply(node))) => {
                    let peer = self.known.judge(&node);
                    listed.put(&node, self.name, peer);
                }
                // The watch that begins there may be refused each time: no success, either.
                Ok(Some(Event::InitDone)) => {
                    asked.set(OptionFuture::default());
                    due = later();
                    self.known = std::mem::take(&mut listed);
                    self.publish();
                }
                Ok(Some(Event::Apply(node))) => {
                    backoff.reset();
                    let peer = self.known.judge(&node);
                    self.known.put(&node, self.name, peer);
                    self.publish();
                }
                Ok(Some(Event::Delete(node))) => {
                    backoff.reset();
                    self.known.forget(&node.name_any(), self.name);
                    self.publish();
                }
                // The stream asks again when it is polled: later and later. That a list has begun is no success.
                Err(error) => {
                    let said = self.warn(&error, "follow the Nodes, what is known of them stays");
                    self.health.set_deaf(said);
                    sleep(backoff.next().unwrap_or_default()).await;
                }
            }
        }
    }

    /// Counts what failed and says so. Returns what was said.
    fn warn(&self, error: &dyn Error, what: &str) -> String {
        let said = format!("cannot {what}: {}", causes(error));
        self.health.watch_failures.fetch_add(1, Ordering::Relaxed);
        tracing::warn!("{said}");
        said
    }

    fn publish(&self) {
        self.known.publish(self.tell, self.health);
    }
}

/// What is known of the Nodes.
#[derive(Debug, Default)]
struct Known {
    nodes: All,
    own: Option<Own>,
}

impl Known {
    /// Reads a Node. Says what is wrong with it unless it was known as that: one is written every few minutes, and what is wrong with it stays wrong.
    fn judge(&self, node: &Node) -> Peer {
        let name = node.name_any();
        let (peer, wrong) = peer(node);
        if self.nodes.get(&name) != Some(&peer) {
            for wrong in wrong {
                tracing::warn!("Node {name}: {wrong}");
            }
        }
        peer
    }

    fn put(&mut self, node: &Node, own_name: &str, peer: Peer) {
        let name = node.name_any();
        if name == own_name {
            self.own = Some(own(node, &peer));
        }
        self.nodes.insert(name, peer);
    }

    fn forget(&mut self, name: &str, own_name: &str) {
        self.nodes.remove(name);
        if name == own_name {
            self.own = None;
        }
    }

    /// A Node changes often, and seldom what matters here.
    fn publish(&self, tell: &Listeners, health: &Health) {
        health.assigned(self.own.as_ref().map_or(&[], |own| &own.pod_cidrs));
        tell.nodes.send_if_modified(|last| {
            if last.as_deref() == Some(&self.nodes) {
                return false;
            }
            *last = Some(Arc::new(self.nodes.clone()));
            true
        });
        tell.own.send_if_modified(|last| {
            if *last == self.own {
                return false;
            }
            last.clone_from(&self.own);
            true
        });
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures::{StreamExt as _, stream};

    use super::*;

    fn node(name: &str, range: &str) -> Node {
        serde_json::from_value(serde_json::json!({
            "metadata": {"name": name}, "spec": {"podCIDRs": [range]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}
        }))
        .expect("a Node")
    }

    /// Has a follower read these events.
    async fn read(
        relist: Duration,
        tell: &Listeners,
        events: impl Stream<Item = Result<Event<Node>, watcher::Error>>,
    ) {
        let mut follower = Follower {
            name: "b",
            tell,
            health: &Health::default(),
            known: Known::default(),
        };
        let is_listed = async || Ok(());
        follower.read(events, relist, &is_listed).await;
    }

    async fn after(events: Vec<Event<Node>>) -> Vec<String> {
        let (nodes, known) = watch::channel(None);
        let (own, known_own) = watch::channel(None);
        let tell = Listeners { nodes, own };
        let events = stream::iter(events.into_iter().map(Ok));
        read(Duration::from_hours(1), &tell, events).await;
        let nodes: Nodes = known.borrow().clone();
        let names: Vec<String> = nodes
            .map(|nodes| nodes.keys().cloned().collect())
            .unwrap_or_default();
        let is_there = names.iter().any(|name| name == "b");
        assert_eq!(known_own.borrow().is_some(), is_there);
        names
    }

    /// Reads these events, and tells whether that has ended within a time.
    async fn ends_within(
        time: Duration,
        relist: Duration,
        events: impl Stream<Item = Result<Event<Node>, watcher::Error>>,
    ) -> bool {
        let tell = Listeners {
            nodes: watch::channel(None).0,
            own: watch::channel(None).0,
        };
        let reading = read(relist, &tell, events);
        tokio::time::timeout(time, reading).await.is_ok()
    }

    fn fails() -> Result<Event<Node>, watcher::Error> {
        Err(watcher::Error::NoResourceVersion)
    }

    #[tokio::test(start_paused = true)]
    async fn watches_that_fail_do_not_put_the_next_list_off() {
        let list = [Ok(Event::Init), Ok(Event::InitDone)];
        let events = stream::iter(list).chain(stream::repeat_with(fails));
        assert!(ends_within(Duration::from_hours(1), Duration::from_mins(30), events).await);
    }

    #[tokio::test(start_paused = true)]
    async fn lists_whose_watches_fail_are_asked_for_later_and_later() {
        let lists = Cell::new(0);
        let begin = || {
            lists.set(lists.get() + 1);
            stream::iter([Ok(Event::Init), Ok(Event::InitDone), fails()])
        };
        let events = stream::repeat_with(begin).flatten();
        assert!(!ends_within(Duration::from_mins(1), Duration::from_hours(1), events).await);
        assert!((3..=8).contains(&lists.get()), "{} lists", lists.get());
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

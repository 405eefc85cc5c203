//! The installation: plugin and network are there once there are routes, and say what the Nodes say.
//!
//! On a node without a network routes come first: what a runtime sees it uses. Where there is one, it learns of a new
//! node before the routes do, as what pods send to that node's must not be masqueraded.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::health::{Health, Trouble};
use crate::nodes::Nodes;
use crate::options::Options;
use crate::peer::Peer;
use crate::plan::{self, Inputs, OnLink};
use crate::verbs::{Failed, Verbs};
use crate::{SETTLE, Said, every};

/// How long routes wait for the network to know what is new.
const HEAD_START: Duration = Duration::from_secs(5);

/// What became of the routes, for who installs the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Routed {
    /// The MTU of pods in bytes, where it is not the uplinks' and nobody has named one.
    mtu: Option<u32>,
    /// The prefixes that were on this node's links, as far as they matter to what is believed of Nodes.
    links: Arc<[OnLink]>,
}

impl Routed {
    /// Of all prefixes on this node's `links` those are left out that each container of others brings and takes: what is news here is a reason
    /// to install.
    pub(crate) fn new(mtu: Option<u32>, links: &[OnLink]) -> Self {
        let links = links.iter().filter(|link| link.matters_to_nodes());
        Self {
            mtu,
            links: links.copied().collect(),
        }
    }
}

/// The network of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Network {
    /// The node's ranges.
    pub(crate) ranges: Vec<IpNet>,
    /// Those of the cluster.
    pub(crate) cluster: BTreeSet<IpNet>,
    /// The MTU of pods in bytes, where it is not the uplinks'.
    pub(crate) mtu: Option<u32>,
}

impl Network {
    /// Finds the network, if the node has ranges, and others know the way to it. An error is what is wrong with them.
    fn new(
        options: &Options,
        nodes: &BTreeMap<String, Peer>,
        routed: &Routed,
    ) -> Result<Option<Self>, String> {
        let believed = plan::believe(&Inputs {
            own: options.node(),
            nodes,
            links: &routed.links,
            routing: options.routing,
            cluster: &options.cluster_cidrs,
        });
        // Of a node that the API does not know, or not yet, the network is what it was.
        let Ok(believed) = believed else {
            return Ok(None);
        };
        if !believed.errors.is_empty() {
            return Err(believed.errors.join("; "));
        }
        if believed.own.is_empty() {
            return Ok(None);
        }
        let cluster = if options.cluster_cidrs.is_empty() {
            let others = believed.others.iter().map(|(range, ..)| *range);
            believed.own.iter().copied().chain(others).collect()
        } else {
            options.cluster_cidrs.iter().copied().collect()
        };
        Ok(Some(Self {
            ranges: believed.own,
            cluster,
            mtu: options.mtu.or(routed.mtu),
        }))
    }
}

/// Installs plugin and network when the Nodes have become others, and puts back what somebody removed. Routes go by
/// the Nodes that `pass` gets.
pub(crate) async fn keep(
    options: &Options,
    verbs: &Verbs,
    mut nodes: watch::Receiver<Nodes>,
    pass: watch::Sender<Nodes>,
    health: &Health,
    mut routed: watch::Receiver<Option<Routed>>,
) {
    let mut again = every(options.resync);
    let mut installed: Option<Network> = None;
    let mut last = Said::default();
    let mut upgrade = Upgrade::new(options.resync);
    // With an upgrade in it a command keeps all calls of the plugin waiting, as that one does, and Nodes can change all the time.
    let mut refused: Option<Network> = None;
    let mut retry = Retry::new(options.resync / 2, LONGEST_WITHOUT);
    loop {
        tokio::select! {
            changed = nodes.changed() => if changed.is_err() { return },
            changed = routed.changed() => {
                if changed.is_err() { return }
                refused = None;
            }
            _ = again.tick() => {}
        }
        let Some(routed) = routed.borrow_and_update().clone() else {
            give(&pass, &nodes.borrow_and_update());
            continue;
        };
        sleep(SETTLE).await;
        let all = nodes.borrow_and_update().clone();
        let Some(known) = &all else { continue };
        // Who compares the routes says why there is none.
        let network = Network::new(options, known, &routed).unwrap_or_else(|why| {
            health.set_trouble(Some(Trouble::Outdated(why)));
            None
        });
        let Some(network) = network else {
            give(&pass, &all);
            continue;
        };
        if installed.as_ref() == Some(&network) {
            give(&pass, &all);
        }
        if refused.as_ref() != Some(&network) {
            retry.reset();
        } else if !retry.is_due() {
            give(&pass, &all);
            continue;
        }
        let tested = installed.as_ref().map(|installed| &installed.ranges);
        let is_tested = tested == Some(&network.ranges);
        let outcome = install(verbs, &network, is_tested, &all, &mut nodes, &pass).await;
        let failure = outcome.as_ref().err().map(|failed| failed.why.clone());
        let trouble = outcome.as_ref().ok().and_then(|said| noted(said));
        last.tell("install", outcome);
        if let Some(why) = failure {
            let trouble = if is_tested {
                Trouble::Unkept
            } else {
                Trouble::Outdated
            };
            health.set_trouble(Some(trouble(why)));
            refused = Some(network);
            retry.later();
            continue;
        }
        refused = None;
        let ranges = network.ranges.clone();
        installed = Some(network);
        // Nothing more is announced that no pod gets to.
        let is_hidden = matches!(trouble, Some(Trouble::Hidden(_)));
        health.set_trouble(trouble);
        if upgrade.is_due() {
            upgrade.note(beside(verbs.upgrade(), &mut nodes, &pass).await);
        }
        health
            .installed
            .send_replace((!is_hidden).then_some(ranges));
    }
}

/// Finds what is wrong though `install` has done its work: it begins lines about that with words of their own.
fn noted(said: &str) -> Option<Trouble> {
    if let Some(line) = said.lines().find(|line| line.starts_with("hidden by ")) {
        return Some(Trouble::Hidden(line.to_owned()));
    }
    let mut left = said
        .lines()
        .filter_map(|line| line.strip_prefix("left behind: "));
    let first = left.next()?;
    Some(Trouble::LeftBehind(match left.count() {
        0 => first.to_owned(),
        more => format!("{first}; and {more} more, which `underpass status` names"),
    }))
}

/// How long to wait at most before a network is tried again that could not be installed, where neither it nor this node's links have changed.
const LONGEST_WITHOUT: Duration = Duration::from_mins(5);

/// How long to wait at most before an upgrade is tried again.
const LONGEST_WAIT: Duration = Duration::from_hours(1);

/// When something that failed is tried again: later and later.
struct Retry {
    due: Instant,
    first: Duration,
    wait: Duration,
    longest: Duration,
}

impl Retry {
    fn new(first: Duration, longest: Duration) -> Self {
        Self {
            due: Instant::now(),
            first,
            wait: first,
            longest,
        }
    }

    fn is_due(&self) -> bool {
        self.due <= Instant::now()
    }

    fn later(&mut self) {
        self.due = Instant::now() + self.wait;
        self.wait = self.longest.min(self.wait * 2);
    }

    fn reset(&mut self) {
        *self = Self::new(self.first, self.longest);
    }
}

/// The upgrade of the programs to those of this version. Until it is done those that are there go on, and it is tried again: it may wait half
/// a minute for a call that hangs, and keeps all later ones waiting meanwhile.
struct Upgrade {
    is_done: bool,
    retry: Retry,
    last: Said,
}

impl Upgrade {
    fn new(wait: Duration) -> Self {
        Self {
            is_done: false,
            retry: Retry::new(wait, LONGEST_WAIT),
            last: Said::default(),
        }
    }

    fn is_due(&self) -> bool {
        !self.is_done && self.retry.is_due()
    }

    fn note(&mut self, outcome: Result<String, Failed>) {
        self.is_done = outcome.is_ok();
        self.retry.later();
        self.last.tell("upgrade", outcome);
    }
}

/// Runs the command with what `all` the Nodes say. Routes wait for it, but not for ever: from then on they go by the Nodes as they come.
async fn install(
    verbs: &Verbs,
    network: &Network,
    is_tested: bool,
    all: &Nodes,
    nodes: &mut watch::Receiver<Nodes>,
    pass: &watch::Sender<Nodes>,
) -> Result<String, Failed> {
    let mut install = pin!(verbs.install(network, is_tested));
    if let Ok(outcome) = timeout(HEAD_START, &mut install).await {
        give(pass, all);
        return outcome;
    }
    give(pass, all);
    beside(install, nodes, pass).await
}

/// Waits for a command, while routes go by the Nodes as they come.
async fn beside(
    command: impl Future<Output = Result<String, Failed>>,
    nodes: &mut watch::Receiver<Nodes>,
    pass: &watch::Sender<Nodes>,
) -> Result<String, Failed> {
    let mut command = pin!(command);
    let mut is_news = false;
    let outcome = loop {
        tokio::select! {
            outcome = &mut command => break outcome,
            changed = nodes.changed() => if changed.is_err() { break command.await },
        }
        give(pass, &nodes.borrow_and_update());
        is_news = true;
    };
    if is_news {
        // The network has yet to learn of them.
        nodes.mark_changed();
    }
    outcome
}

/// Has routes go by these Nodes.
fn give(pass: &watch::Sender<Nodes>, nodes: &Nodes) {
    pass.send_if_modified(|last| {
        let is_same = match (&*last, nodes) {
            (Some(last), Some(nodes)) => Arc::ptr_eq(last, nodes),
            (last, nodes) => last.is_none() && nodes.is_none(),
        };
        if !is_same {
            last.clone_from(nodes);
        }
        !is_same
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An agent without a network would try at once to install it, again and again.
    #[test]
    fn containers_of_others_are_no_news() {
        let link = |net: &str, device| {
            let net: IpNet = net.parse().expect("a network");
            OnLink {
                net: net.trunc(),
                own: net.addr(),
                device,
                mtu: 1500,
                is_bridge: false,
            }
        };
        let (uplink, own) = (link("192.0.2.1/24", 2), link("fe80::1/64", 2));
        let before = Routed::new(Some(1450), &[uplink, own]);
        for (net, is_news) in [
            ("fe80::2/64", false),
            ("fe80::2/128", false),
            ("10.9.0.1/24", true),
            ("2001:db8:9::1/64", true),
            // A range of pods could have it inside.
            ("169.254.3.1/16", true),
        ] {
            let after = Routed::new(Some(1450), &[uplink, own, link(net, 3)]);
            assert_eq!(after != before, is_news, "{net}");
        }
        assert_ne!(Routed::new(Some(1400), &[uplink, own]), before);
    }

    #[test]
    fn what_is_wrong_all_the_same_is_found_in_what_is_said() {
        let done = "unchanged   /opt/cni/bin/underpass\n";
        let hidden = "hidden by /etc/cni/net.d/05-other.conflist: mv it";
        let left = "left behind: veth1 leads to a container; recreate it\n";
        assert_eq!(noted(done), None);
        assert_eq!(noted("it may be hidden by somebody\n"), None);
        // That no pod gets to the network is the worse of two.
        let of = |said: &str| Some(Trouble::Hidden(said.to_owned()));
        assert_eq!(noted(&format!("{done}{left}{hidden}\n")), of(hidden));
        let of = |said: &str| Some(Trouble::LeftBehind(said.to_owned()));
        let first = "veth1 leads to a container; recreate it";
        assert_eq!(noted(&format!("{left}{done}")), of(first));
        let more = format!("{first}; and 1 more, which `underpass status` names");
        assert_eq!(
            noted(&format!("{left}left behind: veth2\n{done}")),
            of(&more)
        );
    }
}

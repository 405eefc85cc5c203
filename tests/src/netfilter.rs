//! The node's own firewall, as kube-proxy or an operator would set it up: it drops what connection tracking calls INVALID, lets pass what
//! belongs to something known, and says no to the rest but for what begins in an orderly way. Tests add counters, translations and drops.

pub mod kube_proxy;
mod timers;

use std::{
    env,
    net::{IpAddr, SocketAddr},
    process::Command,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use self::kube_proxy::{Mode, Service};
use crate::{Family, Node, patience};

pub use timers::LONGEST;

const TABLE: &str = "inet lab";
const STRICT: &str = include_str!("netfilter/strict.nft");

/// The variable by which INVALID packets alone fail no test.
const INVALID: &str = "UNDERPASS_TEST_INVALID";

/// How often a flow may be asked about again at most: once in a tick of the programs, which is never shorter.
const TICK: Duration = Duration::from_millis(600);

/// A transport protocol that nftables translates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Transport {
    /// Its name in nftables expressions.
    #[must_use]
    pub const fn nft(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// Whether connection tracking takes TCP of which it did not see all.
const LIBERAL: &str = "net/netfilter/nf_conntrack_tcp_be_liberal";

/// Whether connection tracking takes up TCP in its middle.
const LOOSE: &str = "net/netfilter/nf_conntrack_tcp_loose";

/// Firewall rules of a node. A test in which they met an INVALID packet fails when this is dropped.
#[derive(Debug)]
pub struct Netfilter {
    node: Arc<Node>,
    /// Who looked at INVALID packets already, or does not mind them.
    settled: AtomicBool,
}

impl Netfilter {
    /// The strict firewall beside kube-proxy's rules, and connection tracking with a short memory.
    pub fn new(node: &Arc<Node>) -> Result<Self> {
        static RULES: LazyLock<String> = LazyLock::new(|| {
            let services = kube_proxy::elsewhere();
            let rules = |mode| {
                Family::BOTH
                    .map(|family| kube_proxy::rules(mode, family, &services))
                    .concat()
            };
            STRICT.to_owned() + &kube_proxy::usual().map(rules).unwrap_or_default()
        });
        let netfilter = Self {
            node: Arc::clone(node),
            settled: AtomicBool::new(false),
        };
        // The rules first: they load connection tracking, which has the timers.
        netfilter.load(&RULES)?;
        timers::shorten(node.netns())?;
        Ok(netfilter)
    }

    /// No rules at all.
    #[must_use]
    pub fn none(node: &Arc<Node>) -> Self {
        Self {
            node: Arc::clone(node),
            settled: AtomicBool::new(true),
        }
    }

    /// Says whether connection tracking takes TCP of which it did not see all. The programs learn of it with the next ADD, or `load`.
    pub fn set_liberal(&self, liberal: bool) -> Result<()> {
        let value = if liberal { "1" } else { "0" };
        self.node.netns().set_sysctl(LIBERAL, value)
    }

    /// Has connection tracking take up no TCP in its middle.
    pub fn know_openings_only(&self) -> Result<()> {
        self.node.netns().set_sysctl(LOOSE, "0")
    }

    /// Loads rules.
    pub fn load(&self, rules: &str) -> Result<()> {
        self.node.netns().nft(rules)
    }

    /// Counts forwarded packets that match an expression, under a name, whatever becomes of them. Several expressions may share a name.
    pub fn count_forwarded(&self, name: &str, expression: &str) -> Result<()> {
        self.load(&format!(
            "add counter {TABLE} seen_{name}
             add rule {TABLE} seen {expression} counter name seen_{name}"
        ))
    }

    /// Packets counted under a name.
    pub fn counted(&self, name: &str) -> Result<u64> {
        self.counter(&format!("seen_{name}"))
    }

    fn counter(&self, name: &str) -> Result<u64> {
        counter(&self.node, name)
    }

    /// Fails unless these packets are the first two to four of a flow: those of its opening, of which there is at least one in each
    /// direction.
    pub fn expect_opening(&self, name: &str) -> Result<()> {
        self.expect_between(name, 2, 4)
    }

    /// Fails unless these packets are the opening of a flow and what connection tracking was fed with since: at most one in each
    /// direction and tick.
    pub fn expect_fed(&self, name: &str, since: Instant) -> Result<()> {
        let ticks = since.elapsed().as_millis() / TICK.as_millis() + 1;
        self.expect_between(name, 2, 4 + 2 * u64::try_from(ticks)?)
    }

    fn expect_between(&self, name: &str, least: u64, most: u64) -> Result<()> {
        let counted = self.counted(name)?;
        ensure!(
            (least..=most).contains(&counted),
            "the firewall should have seen {least} to {most} packets of {name}, it saw {counted}"
        );
        Ok(())
    }

    /// Fails if fewer packets than `least` were counted.
    pub fn expect_many(&self, name: &str, least: u64) -> Result<()> {
        let counted = self.counted(name)?;
        ensure!(
            counted >= least,
            "the firewall should have seen at least {least} packets of {name}, it saw {counted}"
        );
        Ok(())
    }

    /// Fails if any packet of the node was INVALID for connection tracking.
    pub fn expect_no_invalid(&self) -> Result<()> {
        self.settled.store(true, Ordering::Relaxed);
        let invalid = match self.node.invalid.get() {
            Some(invalid) => *invalid,
            None => self.counter("invalid")?,
        };
        if invalid == 0 {
            return Ok(());
        }
        let suspects = ["suspects4", "suspects6"].map(|set| {
            let mut list = Command::new("nft");
            list.args(["list", "set", "inet", "lab", set]);
            self.node.netns().expect(&mut list, &[]).unwrap_or_default()
        });
        let elements: Vec<&str> = suspects
            .iter()
            .filter_map(|set| set.split_once("elements =")?.1.split('}').next())
            .collect();
        bail!(
            "{invalid} packets were INVALID for connection tracking, source, destination, protocol and ports: {}",
            elements.join("").trim()
        )
    }

    /// For tests that send what no connection tracking can know: INVALID packets are dropped, and that is right.
    pub fn tolerate_invalid(&self) {
        self.settled.store(true, Ordering::Relaxed);
    }

    /// Drops forwarded packets that match an expression, also of flows that were allowed.
    pub fn drop_forwarded(&self, expression: &str) -> Result<()> {
        self.load(&format!("insert rule {TABLE} forward {expression} drop"))
    }

    /// Lets forwarded packets pass that match an expression, however their flow began.
    pub fn accept_forwarded(&self, expression: &str) -> Result<()> {
        self.load(&format!("insert rule {TABLE} forward {expression} accept"))
    }

    /// A Service: what is sent to `service` goes to `backend`.
    pub fn service(
        &self,
        transport: Transport,
        service: SocketAddr,
        backend: SocketAddr,
    ) -> Result<()> {
        let family = Family::of(service.ip()).nft();
        let transport = transport.nft();
        self.load(&format!(
            "add rule {TABLE} prerouting {family} daddr {} {transport} dport {} dnat {family} to {backend}",
            service.ip(),
            service.port(),
        ))
    }

    /// Has kube-proxy serve these Services in this mode, and no others.
    pub fn proxy(&self, mode: Mode, services: &[Service]) -> Result<()> {
        kube_proxy::prepare(self.node.netns(), mode)?;
        // Each family at once, but not both: kube-proxy does not either.
        for family in Family::BOTH {
            let rules = kube_proxy::rules(mode, family, services);
            self.load(&(kube_proxy::removal(family) + &rules))?;
        }
        Ok(())
    }

    /// Has kube-proxy in its nftables mode take this for the node's primary address: it serves node ports there, too.
    pub fn serve_node_ports_at(&self, address: IpAddr) -> Result<()> {
        self.load(&kube_proxy::primary_address(address))
    }

    /// What connection tracking knows, a line for each entry: of a family, and with all these words in it.
    pub fn entries(&self, family: Family, words: &[&str]) -> Result<Vec<String>> {
        let family = conntrack_name(family);
        let listed = self.node.netns().expect(
            Command::new("conntrack").args(["-L", "-f", family, "-o", "extended"]),
            &[],
        )?;
        let has = |line: &str, word: &&str| line.split_whitespace().any(|part| part == *word);
        Ok(listed
            .lines()
            .filter(|line| words.iter().all(|word| has(line, word)))
            .map(str::to_owned)
            .collect())
    }

    /// Deletes what connection tracking knows of a protocol, as kube-proxy does when an endpoint goes.
    pub fn delete_entries(&self, family: Family, protocol: &str) -> Result<()> {
        let family = conntrack_name(family);
        let mut delete = Command::new("conntrack");
        delete.args(["-D", "-f", family, "-p", protocol]);
        // It fails where there is nothing to delete.
        self.node.netns().output(&mut delete, &[]).map(drop)
    }

    /// Waits until connection tracking has forgotten all that has these words, without anybody's help.
    pub fn outlast(&self, family: Family, words: &[&str]) -> Result<()> {
        let end = Instant::now() + patience::here(3 * LONGEST);
        loop {
            let left = self.entries(family, words)?;
            if left.is_empty() {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "connection tracking still knows {left:#?}"
            );
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Keeps how many packets were INVALID so far: the test is over, and one that is on its way to a pod that goes finds no flow any more.
pub(crate) fn end(node: &Node) {
    // Where the firewall is another one there is no counter, and nobody asks.
    if node.invalid.get().is_none()
        && let Ok(invalid) = counter(node, "invalid")
    {
        let _ = node.invalid.set(invalid);
    }
}

fn counter(node: &Node, name: &str) -> Result<u64> {
    let text = node.netns().expect(
        Command::new("nft").args(["--json", "list", "counter", "inet", "lab", name]),
        &[],
    )?;
    let json: Value = serde_json::from_str(&text).context("read the JSON of nft")?;
    json["nftables"]
        .as_array()
        .into_iter()
        .flatten()
        .find_map(|object| object["counter"]["packets"].as_u64())
        .with_context(|| format!("nft lists no counter {name}"))
}

/// What `conntrack -f` calls a family.
const fn conntrack_name(family: Family) -> &'static str {
    match family {
        Family::V4 => "ipv4",
        Family::V6 => "ipv6",
    }
}

impl Drop for Netfilter {
    fn drop(&mut self) {
        if self.settled.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = self.expect_no_invalid() {
            // A test that returns an error is not panicking.
            let is_only_said = thread::panicking() || env::var(INVALID).as_deref() == Ok("print");
            assert!(
                is_only_said,
                "{error:#} (if the test has an error of its own, {INVALID}=print shows it)"
            );
            anstream::eprintln!("{error:#}");
        }
    }
}

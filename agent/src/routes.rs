//! The loop of the routes: what the kernel has is compared with what the Nodes say, and made the same.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::health::Health;
use crate::install::Routed;
use crate::kernel::events::Events;
use crate::kernel::{Kernel, Notes, Seen};
use crate::nodes::{All, Nodes};
use crate::options::Options;
use crate::plan::{Desired, OnLink, Planner};
use crate::{SETTLE, every};

/// How long the kernel may take to say what there is, and so much longer for each thing that it is to have: where many pods come and go at once, a request waits for theirs,
/// and a large cluster is thousands.
const PATIENCE: Duration = Duration::from_mins(1);
const FOR_EACH: Duration = Duration::from_millis(100);

/// And no longer than this: a lost answer would not be noticed sooner.
const LONGEST: Duration = Duration::from_mins(5);

/// Compares whenever Nodes or kernel may have changed. `routed` is told when all was right that is this node's own. An
/// error is the end: who starts us anew has new sockets.
pub(crate) async fn keep(
    options: &Options,
    kernel: &Kernel,
    mut nodes: watch::Receiver<Nodes>,
    events: &Events,
    health: &Health,
    routed: watch::Sender<Option<Routed>>,
) -> anyhow::Result<()> {
    let mut resync = every(options.resync);
    let mut kept = Routes {
        options,
        kernel,
        events,
        health,
        routed,
        planner: Planner::default(),
        remarks: Vec::new(),
        failures: Vec::new(),
    };
    loop {
        let over = kernel.away.is_over_at();
        tokio::select! {
            () = sleep_until(over.unwrap_or_else(Instant::now)), if over.is_some() => {}
            changed = nodes.changed() => if changed.is_err() { return Ok(()) },
            () = events.any.notified() => {}
            _ = resync.tick() => {}
        }
        sleep(SETTLE).await;
        let all = nodes.borrow_and_update().clone();
        if let Some(all) = all {
            kept.compare(&all).await?;
        }
    }
}

/// The routes, from one comparison to the next.
struct Routes<'a> {
    options: &'a Options,
    kernel: &'a Kernel,
    events: &'a Events,
    health: &'a Health,
    routed: watch::Sender<Option<Routed>>,
    planner: Planner,
    /// What was remarked last on the plan.
    remarks: Vec<String>,
    /// What the last comparison could not do.
    failures: Vec<String>,
}

impl Routes<'_> {
    /// Makes the kernel have what is desired.
    async fn compare(&mut self, all: &Arc<All>) -> anyhow::Result<()> {
        let begun = Instant::now();
        let Some(seen) = self.look().await? else {
            return Ok(());
        };
        let links = seen.on_link();
        let Some(desired) = self.decide(all, &links) else {
            return Ok(());
        };
        self.events.attend_to(desired.ranges());
        let done = self.apply(&desired, &seen).await?;
        self.tell(&desired, &done);
        self.count(all, &desired, &done, begun.elapsed());
        // A node that can't be reached must not be one that has no network, and any Node can say what no route leads to.
        if done.errors.is_empty() {
            let mtu = timeout(PATIENCE, self.mtu(&desired, &seen)).await;
            match mtu.context("the kernel does not answer")? {
                Ok(mtu) => self.pass_on(Routed::new(mtu, &links)),
                Err(error) => self.fail(&error),
            }
        }
        Ok(())
    }

    /// Finds the MTU of pods, where it is not the uplinks' and nobody has named one.
    async fn mtu(&self, desired: &Desired, seen: &Seen) -> anyhow::Result<Option<u32>> {
        let routing = self.options.routing;
        match desired.mtu(routing, None) {
            Some(largest) if self.options.mtu.is_none() => {
                let world = self.kernel.way_out(seen, largest).await?;
                Ok(desired.mtu(routing, world))
            }
            _ => Ok(None),
        }
    }

    /// Says that something could not be read.
    fn fail(&self, error: &anyhow::Error) {
        self.health.failures.fetch_add(1, Ordering::Relaxed);
        tracing::warn!("{error:#}");
    }

    /// Sees what there is. Where that fails the next comparison has to do.
    async fn look(&self) -> anyhow::Result<Option<Seen>> {
        let answer = timeout(PATIENCE, self.kernel.look()).await;
        match answer.context("the kernel does not answer")? {
            Ok(seen) => Ok(Some(seen)),
            Err(error) => {
                self.fail(&error);
                Ok(None)
            }
        }
    }

    /// Plans; nothing, where our own Node is not believed and never was: then nothing is changed.
    fn decide(&mut self, all: &Arc<All>, links: &[OnLink]) -> Option<Desired> {
        match self.planner.plan(self.options, all, links) {
            Ok(desired) => Some(desired),
            Err(why) => {
                self.remark(std::slice::from_ref(&why));
                self.health.wants(vec![why]);
                None
            }
        }
    }

    async fn apply(&self, desired: &Desired, seen: &Seen) -> anyhow::Result<Notes> {
        let many = u32::try_from(desired.len()).unwrap_or(u32::MAX);
        let limit = PATIENCE.saturating_add(FOR_EACH.saturating_mul(many));
        let limit = limit.min(LONGEST);
        let answer = timeout(limit, self.kernel.apply(desired, seen)).await;
        let mut done = answer.context("the kernel does not answer")?;
        let errors = desired.errors.iter().cloned();
        done.errors.extend(errors.map(anyhow::Error::msg));
        Ok(done)
    }

    /// Says what was changed, what could not be, and what is wrong with the plan: none of it twice.
    fn tell(&mut self, desired: &Desired, done: &Notes) {
        for change in &done.changes {
            tracing::info!("{change}");
        }
        // What one Node says that is wrong stays wrong, and is tried at each comparison.
        let said = done.failures().chain(&done.warnings);
        let said: Vec<String> = said.map(|error| format!("{error:#}")).collect();
        for failure in said
            .iter()
            .filter(|failure| !self.failures.contains(*failure))
        {
            tracing::warn!("{failure}");
        }
        self.health.wants([&said[..], &desired.remarks].concat());
        self.failures = said;
        self.remark(&desired.remarks);
    }

    /// Says what is wrong with the plan, but for what was said last: with a wrong setting that is a sentence for each node.
    fn remark(&mut self, remarks: &[String]) {
        let last: HashSet<&String> = self.remarks.iter().collect();
        for remark in remarks.iter().filter(|remark| !last.contains(remark)) {
            tracing::warn!("{remark}");
        }
        self.remarks = remarks.to_vec();
    }

    fn count(&self, all: &All, desired: &Desired, done: &Notes, took: Duration) {
        let health = self.health;
        let took = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        health.nodes.store(all.len() as u64, Ordering::Relaxed);
        health.syncs.fetch_add(1, Ordering::Relaxed);
        health
            .changes
            .fetch_add(done.changes.len() as u64, Ordering::Relaxed);
        health.last_us.store(took, Ordering::Relaxed);
        health.longest_us.fetch_max(took, Ordering::Relaxed);
        let missing = done.missing.len() + done.unrouted + desired.unrouted;
        health.missing.store(missing as u64, Ordering::Relaxed);
        health
            .broken
            .store(done.errors.len() as u64, Ordering::Relaxed);
        let remarks = desired.remarks.len() + desired.errors.len();
        health.remarks.store(remarks as u64, Ordering::Relaxed);
        if done.failures().next().is_some() {
            health.failures.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Tells who installs the network, if it is news.
    fn pass_on(&self, now: Routed) {
        let now = Some(now);
        self.routed.send_if_modified(|routed| {
            let is_news = *routed != now;
            *routed = now;
            is_news
        });
    }
}

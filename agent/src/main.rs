//! The agent of a cluster's node. The Kubernetes API is the only engine, and the kernel the only state: what should
//! be is computed from all Nodes, compared with what is, and the difference is made good. Whatever happens, an event
//! only says that it is time to compare.
//!
//! Without the agent ADD, DEL and traffic go on: nothing is withdrawn when it stops.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Parser as _;
use ipnet::IpNet;
use kube::{Client, Config};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::health::Health;
use crate::kernel::events::{self, Events};
use crate::kernel::{Kernel, TunnelOptions};
use crate::nodes::Nodes;
use crate::options::Options;
use crate::plan::Inputs;
use crate::verbs::Verbs;

mod health;
mod kernel;
mod nodes;
mod options;
mod peer;
mod plan;
mod verbs;

/// How long to wait for more of the same before comparing: a device that is made is five events.
const SETTLE: Duration = Duration::from_millis(200);

/// How long the kernel may take for all routes of a cluster.
const PATIENCE: Duration = Duration::from_mins(1);

/// How long the API server may be silent in the middle of an answer. A watch that has nothing to say ends before
/// that, after 290 s.
const SILENCE: Duration = Duration::from_mins(6);

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_target(false)
        .init();
    let options = Options::parse();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let outcome = runtime
        .context("cannot start")
        .and_then(|runtime| runtime.block_on(run(options)));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> anyhow::Result<()> {
    let verbs = Verbs::find(&options)?;
    let mut api = Config::infer().await.context(
        "cannot find the API server: neither KUBECONFIG nor a service account says where it is",
    )?;
    // Longer than a watch is silent: what is silent for longer is dead.
    api.read_timeout = Some(SILENCE);
    let client = Client::try_from(api).context("cannot talk to the API server")?;
    let events = events::listen()?;
    let tunnel = TunnelOptions {
        id: options.vxlan_id,
        port: options.vxlan_port,
    };
    let kernel = Kernel::open(tunnel, Arc::clone(&events.device))?;
    let health = Arc::new(Health::default());
    health::serve(options.listen, Arc::clone(&health), verbs.clone()).await?;
    let (tell, nodes) = watch::channel(None);
    let (routed, is_routed) = watch::channel(false);

    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        () = nodes::follow(client, tell) => anyhow::bail!("the Nodes can't be followed any more"),
        outcome = keep_routes(&options, &kernel, nodes.clone(), &events, &health, routed) => outcome?,
        () = keep_installed(&options, &verbs, nodes, &health, is_routed) => {}
        () = keep_uplinks(&verbs, &events) => {}
        () = keep_collected(&options, &verbs) => {}
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    // What is half installed would stay so until the next agent.
    verbs.finish().await;
    tracing::info!("stopped; routes and network stay");
    Ok(())
}

/// Compares what the kernel has with what the Nodes say, whenever one of them may have changed. `routed` is told when
/// everything was right for the first time. An error is the end: who starts us anew has new sockets.
async fn keep_routes(
    options: &Options,
    kernel: &Kernel,
    mut nodes: watch::Receiver<Nodes>,
    events: &Events,
    health: &Health,
    routed: watch::Sender<bool>,
) -> anyhow::Result<()> {
    let mut resync = every(options.resync);
    let mut remarks = Vec::new();
    loop {
        tokio::select! {
            changed = nodes.changed() => if changed.is_err() { return Ok(()) },
            () = events.any.notified() => {}
            _ = resync.tick() => {}
        }
        sleep(SETTLE).await;
        let Some(all) = nodes.borrow_and_update().clone() else {
            continue;
        };
        let begun = Instant::now();
        let answer = timeout(PATIENCE, kernel.on_link()).await;
        let links = match answer.context("the kernel does not answer")? {
            Ok(links) => links,
            Err(error) => {
                health.failures.fetch_add(1, Ordering::Relaxed);
                tracing::warn!("{error:#}");
                continue;
            }
        };
        let inputs = Inputs {
            own: &options.node,
            nodes: &all,
            links: &links,
            routing: options.routing,
            cluster: &options.cluster_cidrs,
        };
        let Some(desired) = plan::plan(&inputs) else {
            tracing::warn!("the API has no Node {}: nothing is changed", options.node);
            continue;
        };
        let answer = timeout(PATIENCE, kernel.apply(&desired)).await;
        let (changes, errors) = answer.context("the kernel does not answer")?;
        for change in &changes {
            tracing::info!("{change}");
        }
        for error in &errors {
            tracing::warn!("{error:#}");
        }
        if desired.remarks != remarks {
            for remark in &desired.remarks {
                tracing::warn!("{remark}");
            }
            remarks = desired.remarks;
        }
        let took = begun.elapsed().as_micros();
        health.nodes.store(all.len() as u64, Ordering::Relaxed);
        health.syncs.fetch_add(1, Ordering::Relaxed);
        health
            .changes
            .fetch_add(changes.len() as u64, Ordering::Relaxed);
        health
            .last_us
            .store(u64::try_from(took).unwrap_or(u64::MAX), Ordering::Relaxed);
        if errors.is_empty() {
            routed.send_if_modified(|routed| !std::mem::replace(routed, true));
        } else {
            health.failures.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Installs plugin and network, once there are routes and the node's ranges are known, and again when these or the
/// cluster's change. The network comes last: what a runtime sees it uses.
async fn keep_installed(
    options: &Options,
    verbs: &Verbs,
    mut nodes: watch::Receiver<Nodes>,
    health: &Health,
    mut is_routed: watch::Receiver<bool>,
) {
    if is_routed.wait_for(|is_routed| *is_routed).await.is_err() {
        return;
    }
    let mut again = every(options.resync);
    let mut tested = Vec::new();
    let mut last = Said::default();
    let mut is_upgraded = false;
    loop {
        tokio::select! {
            changed = nodes.changed() => if changed.is_err() { return },
            _ = again.tick() => {}
        }
        sleep(SETTLE).await;
        let Some(all) = nodes.borrow_and_update().clone() else {
            continue;
        };
        let Some(own) = all
            .get(&options.node)
            .filter(|own| !own.pod_cidrs.is_empty())
        else {
            tracing::warn!(
                "Node {} has no podCIDRs yet: the network is installed when it has",
                options.node
            );
            continue;
        };
        let cluster: BTreeSet<IpNet> = if options.cluster_cidrs.is_empty() {
            let ranges = all.values().flat_map(|peer| peer.pod_cidrs.iter().copied());
            ranges.collect()
        } else {
            options.cluster_cidrs.iter().copied().collect()
        };
        match verbs
            .install(&own.pod_cidrs, &cluster, tested == own.pod_cidrs)
            .await
        {
            Ok(said) => last.tell("install", said),
            Err(error) => {
                tracing::warn!("{error:#}");
                continue;
            }
        }
        tested.clone_from(&own.pod_cidrs);
        if !is_upgraded {
            match verbs.upgrade().await {
                Ok(said) => {
                    Said::default().tell("upgrade", said);
                    is_upgraded = true;
                }
                // The programs that are there go on, and it is tried again.
                Err(error) => tracing::warn!("{error:#}"),
            }
        }
        health.is_ready.store(true, Ordering::Relaxed);
    }
}

/// Has uplinks looked at when devices or addresses change.
async fn keep_uplinks(verbs: &Verbs, events: &Events) {
    let mut last = Said::default();
    loop {
        events.devices.notified().await;
        sleep(SETTLE).await;
        match verbs.apply().await {
            Ok(said) => last.tell("apply", said),
            Err(error) => tracing::warn!("{error:#}"),
        }
    }
}

/// Has the leases looked at that no pod has.
async fn keep_collected(options: &Options, verbs: &Verbs) {
    let mut last = Said::default();
    let mut again = every(options.collect);
    loop {
        again.tick().await;
        match verbs.collect().await {
            Ok(said) => last.tell("gc", said),
            Err(error) => tracing::warn!("{error:#}"),
        }
    }
}

fn every(period: Duration) -> tokio::time::Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// What a command said last.
#[derive(Debug, Default)]
struct Said(String);

impl Said {
    /// Logs what a command says, a line each, without what it said the last time: that all is as it was is not worth a
    /// line each minute.
    fn tell(&mut self, verb: &str, said: String) {
        let is_news = |line: &&str| self.0.lines().all(|old| old != *line);
        said.lines()
            .filter(is_news)
            .for_each(|line| tracing::info!("{verb}: {line}"));
        self.0 = said;
    }
}

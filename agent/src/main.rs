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
use kube::Client;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::health::Health;
use crate::kernel::events::{self, Events};
use crate::kernel::{Kernel, TunnelOptions};
use crate::nodes::Nodes;
use crate::options::Options;
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
    let client = Client::try_default().await.context(
        "cannot find the API server: neither KUBECONFIG nor a service account says where it is",
    )?;
    let (handle, events) = events::listen()?;
    let tunnel = TunnelOptions {
        id: options.vxlan_id,
        port: options.vxlan_port,
    };
    let kernel = Kernel::new(handle, tunnel);
    let health = Arc::new(Health::default());
    health::serve(options.listen, Arc::clone(&health), verbs.clone()).await?;
    let (tell, nodes) = watch::channel(None);

    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        () = nodes::follow(client, tell) => anyhow::bail!("the Nodes can't be followed any more"),
        () = keep_routes(&options, &kernel, nodes.clone(), &events, &health) => {}
        () = keep_installed(&options, &verbs, nodes, &health) => {}
        () = keep_uplinks(&verbs, &events) => {}
        () = keep_collected(&options, &verbs) => {}
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    tracing::info!("stopped; routes and network stay");
    Ok(())
}

/// Compares what the kernel has with what the Nodes say, whenever one of them may have changed.
async fn keep_routes(
    options: &Options,
    kernel: &Kernel,
    mut nodes: watch::Receiver<Nodes>,
    events: &Events,
    health: &Health,
) {
    let mut resync = every(options.resync);
    let mut remarks = Vec::new();
    loop {
        tokio::select! {
            changed = nodes.changed() => if changed.is_err() { return },
            () = events.any.notified() => {}
            _ = resync.tick() => {}
        }
        sleep(SETTLE).await;
        let Some(all) = nodes.borrow_and_update().clone() else {
            continue;
        };
        let begun = Instant::now();
        let links = match kernel.on_link().await {
            Ok(links) => links,
            Err(error) => {
                health.failures.fetch_add(1, Ordering::Relaxed);
                tracing::warn!("{error:#}");
                continue;
            }
        };
        let Some(desired) = plan::plan(&options.node, &all, &links, options.routing) else {
            tracing::warn!("the API has no Node {}: nothing is changed", options.node);
            continue;
        };
        let (changes, errors) = kernel.apply(&desired).await;
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
        if !errors.is_empty() {
            health.failures.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Installs plugin and network, once the node's ranges are known, and again when they or the cluster's change.
async fn keep_installed(
    options: &Options,
    verbs: &Verbs,
    mut nodes: watch::Receiver<Nodes>,
    health: &Health,
) {
    let mut again = every(options.resync);
    let mut tested = Vec::new();
    let mut last = Said::default();
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
        let is_first = !health.is_ready.load(Ordering::Relaxed);
        match verbs
            .install(&own.pod_cidrs, &cluster, tested == own.pod_cidrs)
            .await
        {
            Ok(said) => {
                last.tell("install", said);
                tested.clone_from(&own.pod_cidrs);
            }
            Err(error) => {
                tracing::warn!("{error:#}");
                continue;
            }
        }
        if is_first {
            match verbs.upgrade().await {
                Ok(said) => Said::default().tell("upgrade", said),
                // The programs that are there go on.
                Err(error) => tracing::warn!("{error:#}"),
            }
            health.is_ready.store(true, Ordering::Relaxed);
        }
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

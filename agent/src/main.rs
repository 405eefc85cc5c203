//! The agent of a cluster's node. The Kubernetes API is the only engine, and the kernel the only state: what should
//! be is computed from all Nodes, compared with what is, and the difference is made good. Whatever happens, an event
//! only says that it is time to compare.
//!
//! Without the agent ADD, DEL and traffic go on: nothing is withdrawn when it stops.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser as _;
use kube::config::KubeConfigOptions;
use kube::{Client, Config};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::health::Health;
use crate::kernel::Kernel;
use crate::kernel::events::{self, Events};
use crate::nodes::Listeners;
use crate::options::Options;
use crate::verbs::Verbs;

mod announce;
mod causes;
mod health;
mod install;
mod kernel;
mod nodes;
mod options;
mod peer;
mod plan;
mod routes;
mod uninstall;
mod verbs;

/// How long to wait for more of the same before comparing: a device that is made is five events.
const SETTLE: Duration = Duration::from_millis(200);

/// How long the API server may be silent in the middle of an answer. A watch that has nothing to say ends before
/// that, after a minute.
const SILENCE: Duration = Duration::from_secs(90);

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
    if options.uninstall {
        return uninstall::run(&options, &verbs).await;
    }
    let mut api = find_api().await.context(
        "cannot find the API server: neither KUBECONFIG nor a service account says where it is",
    )?;
    // Longer than a watch is silent: what is silent for longer is dead.
    api.read_timeout = Some(SILENCE);
    // Whoever asks waits longer after each refusal. A server that asks for an hour's patience would be asked after an hour.
    api.default_retry = false;
    let client = Client::try_from(api).context("cannot talk to the API server")?;
    let mut sockets = JoinSet::new();
    let events = events::listen(&mut sockets)?;
    let kernel = Kernel::open(options.tunnel(), Arc::clone(&events.device), &mut sockets)?;
    let health = Arc::new(Health::default());
    health::serve(options.listen, Arc::clone(&health), verbs.clone()).await?;
    let (tell, nodes) = watch::channel(None);
    let (tell_own, own) = watch::channel(None);
    let tell = Listeners {
        nodes: tell,
        own: tell_own,
    };
    let (pass, passed) = watch::channel(None);
    let (routed, is_routed) = watch::channel(None);

    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let outcome = tokio::select! {
        () = nodes::follow(client.clone(), options.node(), tell, &health) => Err(anyhow::anyhow!("the Nodes can't be followed any more")),
        outcome = routes::keep(&options, &kernel, passed, &events, &health, routed) => outcome,
        () = install::keep(&options, &verbs, nodes, pass, &health, is_routed) => Ok(()),
        () = announce::keep(&options, client, own, &health) => Ok(()),
        () = keep_uplinks(&options, &verbs, &events) => Ok(()),
        () = keep_collected(&options, &verbs) => Ok(()),
        // Who starts us anew has new ones.
        _ = sockets.join_next() => Err(anyhow::anyhow!("a socket of the kernel's has ended")),
        _ = interrupt.recv() => Ok(()),
        _ = terminate.recv() => Ok(()),
    };
    // What is half installed would stay so until the next agent.
    verbs.finish().await;
    outcome?;
    tracing::info!("stopped; routes and network stay");
    Ok(())
}

/// Finds the API server. A file in somebody's home, whose rights are that person's, is not looked for.
async fn find_api() -> anyhow::Result<Config> {
    if std::env::var_os("KUBECONFIG").is_some_and(|files| !files.is_empty()) {
        return Ok(Config::from_kubeconfig(&KubeConfigOptions::default()).await?);
    }
    Ok(Config::incluster()?)
}

/// Has uplinks and tunnels looked at when devices or addresses change, and now and then: what could not be done is
/// tried again.
async fn keep_uplinks(options: &Options, verbs: &Verbs, events: &Events) {
    let mut last = Said::default();
    let mut resync = every(options.resync);
    resync.tick().await;
    loop {
        tokio::select! {
            () = events.devices.notified() => sleep(SETTLE).await,
            _ = resync.tick() => {}
        }
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

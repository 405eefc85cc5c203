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
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::health::{Health, Trouble};
use crate::kernel::Kernel;
use crate::kernel::events::{self, Events};
use crate::nodes::Listeners;
use crate::options::Options;
use crate::verbs::{Failed, Verbs};

mod announce;
mod causes;
mod credentials;
mod folders;
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
    let client = credentials::client().await?;
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
        () = nodes::follow(client.clone(), options.node(), options.relist, &tell, &health) => Ok(()),
        outcome = routes::keep(&options, &kernel, passed, &events, &health, routed) => outcome,
        () = install::keep(&options, &verbs, nodes, pass, &health, is_routed) => Ok(()),
        () = announce::keep(&options, client, own, &health) => Ok(()),
        () = keep_uplinks(&options, &verbs, &events) => Ok(()),
        () = keep_collected(&options, &verbs) => Ok(()),
        lost = folders::await_loss(&options) => Err(anyhow::anyhow!(
            "the folder {} is not the host's any more: somebody has removed or renamed it there; whoever starts this container anew mounts the one of now",
            lost.display()
        )),
        _ = sockets.join_next() => Err(anyhow::anyhow!("a netlink socket that tells of changes on the node has ended: whoever starts this container anew opens another")),
        _ = interrupt.recv() => Ok(()),
        _ = terminate.recv() => Ok(()),
    };
    if let Err(error) = &outcome {
        health.set_trouble(Some(Trouble::Ended(format!("{error:#}"))));
        if verbs.are_busy() {
            tracing::error!(
                "nothing is looked after any more, and the command that runs is brought to its end: {error:#}"
            );
        }
    }
    // What is half installed would stay so until the next agent.
    verbs.finish().await;
    outcome?;
    tracing::info!("stopped; routes and network stay");
    Ok(())
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
        last.tell("apply", verbs.apply().await);
    }
}

/// Has the leases looked at that no pod has.
async fn keep_collected(options: &Options, verbs: &Verbs) {
    let mut last = Said::default();
    let mut again = every(options.collect);
    loop {
        again.tick().await;
        last.tell("gc", verbs.collect().await);
    }
}

fn every(period: Duration) -> tokio::time::Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// What a command said last.
#[derive(Debug, Default)]
struct Said {
    text: String,
    complaint: String,
}

impl Said {
    /// Logs what a command says, a line each, and why it failed if it did, without what it said the last time: neither that all is as it
    /// was is worth a line each minute, nor that something is still wrong.
    fn tell(&mut self, verb: &str, outcome: Result<String, Failed>) {
        let (text, complaint) = match outcome {
            Ok(text) => (text, String::new()),
            Err(Failed { said, why }) => (said, why),
        };
        let is_news = |line: &&str| self.text.lines().all(|old| old != *line);
        text.lines()
            .filter(is_news)
            .for_each(|line| tracing::info!("{verb}: {line}"));
        if complaint != self.complaint && !complaint.is_empty() {
            tracing::warn!("{complaint}");
        }
        *self = Self { text, complaint };
    }
}

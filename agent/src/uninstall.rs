//! The way back: what the agent has made of a node goes, and nothing else.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::kernel::Kernel;
use crate::options::Options;
use crate::plan::Desired;
use crate::verbs::{Failed, Verbs};

/// Removes network and plugin, then routes and device. Changes nothing while containers are attached, or another agent
/// runs on this node.
pub(crate) async fn run(options: &Options, verbs: &Verbs) -> anyhow::Result<()> {
    // An agent that runs would make it all again.
    let _alone = TcpListener::bind(options.listen).await.with_context(|| {
        format!(
            "{} is in use, so an agent may run on this node: end it first, or say what it was started with by --listen",
            options.listen
        )
    })?;
    let outcome = verbs.uninstall().await;
    let said = match &outcome {
        Ok(said) | Err(Failed { said, .. }) => said,
    };
    for line in said.lines() {
        tracing::info!("uninstall: {line}");
    }
    if let Err(failed) = outcome {
        bail!("{}", failed.why);
    }
    let mut sockets = JoinSet::new();
    let kernel = Kernel::open(options.tunnel(), Arc::default(), &mut sockets)?;
    let seen = kernel.look().await?;
    let notes = kernel.apply(&Desired::default(), &seen).await;
    for change in &notes.changes {
        tracing::info!("{change}");
    }
    for error in notes.failures() {
        tracing::warn!("{error:#}");
    }
    if notes.failures().next().is_some() {
        bail!("routes or the device are left: repeat the command");
    }
    Ok(())
}

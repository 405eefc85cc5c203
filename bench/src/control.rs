//! Calls: how long a runtime waits for them, from starting the process to reaping it.

use std::{fs, sync::Arc, time::Instant};

use anstream::eprintln;
use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::Value;
use underpass_tests::{Family, Node, netns::Netns, node, world::World};

use crate::{
    Settings,
    plugin::{Network, Plugin},
    sample::Summary,
};

mod crowd;
mod floor;
mod memory;
mod series;

/// Everything about calls.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    pub(crate) calls: Vec<Call>,
    pub(crate) series: series::Series,
    pub(crate) memory: Vec<memory::Memory>,
    /// Bytes of our executable.
    pub(crate) binary: u64,
}

/// One verb of one caller, with so many containers on the node.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Call {
    /// A plugin, or `ip` for what the kernel and a process cost by themselves.
    pub(crate) caller: &'static str,
    pub(crate) verb: &'static str,
    pub(crate) containers: usize,
    /// Milliseconds.
    pub(crate) ms: Summary,
    pub(crate) samples: Vec<f64>,
}

/// Times all calls.
pub(crate) fn measure(settings: &Settings) -> Result<Outcome> {
    let begin = Instant::now();
    let mut calls = Vec::new();
    let mut memory = Vec::new();
    let mut crowds = crowd::empty()?;
    for &containers in &settings.containers {
        // The reference takes longer the more there is; its way to a thousand would fill the hour.
        crowds.retain(|crowd| containers <= 250 || crowd.is_ours());
        eprintln!(
            "calls: {containers} containers on each node, after {} s",
            begin.elapsed().as_secs()
        );
        for crowd in &mut crowds {
            crowd.fill(containers - 1)?;
        }
        calls.append(&mut crowd::attach_and_detach(
            &crowds,
            containers,
            settings.calls,
        )?);
        if let Some(own) = crowds.iter().find(|crowd| crowd.is_ours()) {
            calls.append(&mut own.look(containers, settings.calls * 5)?);
            memory.push(memory::Memory::of(own.node(), containers)?);
        }
    }
    eprintln!("calls: many at once, after {} s", begin.elapsed().as_secs());
    Ok(Outcome {
        calls,
        series: series::measure(settings.series)?,
        memory,
        binary: fs::metadata(node::plugin())
            .context("look at the plugin's executable")?
            .len(),
    })
}

impl Call {
    fn new(
        caller: &'static str,
        verb: &'static str,
        containers: usize,
        samples: Vec<f64>,
    ) -> Result<Self> {
        Ok(Self {
            caller,
            verb,
            containers,
            ms: Summary::of(&samples).context("no calls were asked for")?,
            samples,
        })
    }
}

/// A node with an uplink and a network of one plugin. Its containers have IPv4 alone: with IPv6 the reference would also wait for
/// its addresses, which is no matter of speed.
struct Site {
    node: Arc<Node>,
    network: Network,
    /// Its link is the way out that masquerade is about.
    _world: World,
}

impl Site {
    fn new(plugin: Plugin) -> Result<Self> {
        let node = Node::new()?;
        let world = World::around(&node, 1500)?;
        Ok(Self {
            network: plugin.network(&node, &[Family::V4]),
            node: Arc::new(node),
            _world: world,
        })
    }

    /// Makes a container's namespace.
    fn container(&self, name: &str) -> Result<Netns> {
        self.node.netns().sibling(name)
    }

    /// Attaches a container: milliseconds, and the result.
    fn add(&self, container: &Netns) -> Result<(f64, Value)> {
        let done = self.network.add(&self.node, container)?;
        Ok((done.elapsed.as_secs_f64() * 1e3, done.stdout))
    }

    /// Detaches a container as runtimes do, with its result: milliseconds.
    fn del(&self, container: &Netns, result: &Value) -> Result<f64> {
        let done = self.network.after(result).del(&self.node, container)?;
        Ok(done.elapsed.as_secs_f64() * 1e3)
    }
}

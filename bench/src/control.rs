//! Calls: how long a runtime waits for them, from starting the process to reaping it.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
    time::Instant,
};

use anstream::eprintln;
use anyhow::{Context as _, Result};
use serde::Serialize;
use underpass_tests::{Family, Node, netns::Netns, node, wire::Wire, world::World};

use crowd::Crowd;

use crate::{
    Settings,
    plugin::{Mapping, Network, Plugin},
    sample::Summary,
};

pub(crate) mod crowd;
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
    let mut groups = vec![crowd::empty()?];
    for &containers in &settings.containers {
        let is_large = containers > LARGE;
        if is_large {
            let own = groups.into_iter().flatten().filter(Crowd::is_ours);
            groups = own.map(|crowd| vec![crowd]).collect();
        }
        let mut kept = Vec::new();
        for mut group in groups {
            eprintln!(
                "calls: {containers} containers on each node, after {} s",
                begin.elapsed().as_secs()
            );
            for crowd in &mut group {
                crowd.fill(containers - 1)?;
            }
            calls.append(&mut crowd::attach_and_detach(
                &group,
                containers,
                settings.calls,
            )?);
            if let Some(own) = group.iter().find(|crowd| crowd.is_the_usual()) {
                calls.append(&mut own.look(containers, settings.calls * 5)?);
                memory.push(memory::Memory::of(own.node(), containers)?);
                if settings.containers.last() == Some(&containers) {
                    memory.push(memory::Memory::with_flows(own.node(), containers, FLOWS)?);
                }
            }
            if !is_large {
                kept.push(group);
            }
        }
        groups = kept;
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

/// On nodes with more containers than these ours alone is measured, as the references take longer the more there is, and its way to a thousand would fill the
/// hour; and one node after the other, as some of what the kernel keeps is for all namespaces of the machine.
const LARGE: usize = 250;

/// Flows of a busy node.
const FLOWS: u32 = 250_000;

/// The first host port that a container gets; each gets the next two.
const FIRST_PORT: u16 = 2_000;

/// Whether containers have host ports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ports {
    None,
    /// One for TCP, one for UDP.
    Two,
}

/// A node with an uplink and a network of one plugin. Its containers have IPv4 alone: with IPv6 the reference would also wait for
/// its addresses, which is no matter of speed.
struct Site {
    node: Arc<Node>,
    network: Network,
    ports: Ports,
    /// The next container's first host port.
    next: AtomicU16,
    /// Its link is the way out that masquerade is about.
    _world: World,
}

impl Site {
    fn new(plugin: Plugin, ports: Ports) -> Result<Self> {
        let node = Node::new()?;
        let world = World::beyond(&node, Wire::Ethernet, 1500)?;
        Ok(Self {
            network: plugin.network(&node, &[Family::V4]),
            ports,
            next: AtomicU16::new(FIRST_PORT),
            node: Arc::new(node),
            _world: world,
        })
    }

    /// Makes a container's namespace.
    fn container(&self, name: &str) -> Result<Netns> {
        self.node.netns().sibling(name)
    }

    /// Attaches a container: milliseconds, and the network with what later calls are given.
    fn add(&self, container: &Netns) -> Result<(f64, Network)> {
        let network = match self.ports {
            Ports::None => self.network.clone(),
            Ports::Two => {
                let host = self.next.fetch_add(2, Ordering::Relaxed);
                self.network.with_ports(&[
                    Mapping {
                        protocol: "tcp",
                        host,
                        container: 80,
                    },
                    Mapping {
                        protocol: "udp",
                        host: host + 1,
                        container: 53,
                    },
                ])
            }
        };
        let done = network.add(&self.node, container)?;
        Ok((
            done.elapsed.as_secs_f64() * 1e3,
            network.after(&done.stdout),
        ))
    }

    /// Detaches a container as runtimes do, with its result: milliseconds.
    fn del(&self, container: &Netns, attached: &Network) -> Result<f64> {
        let done = attached.del(&self.node, container)?;
        Ok(done.elapsed.as_secs_f64() * 1e3)
    }
}

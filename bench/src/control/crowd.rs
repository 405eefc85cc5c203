//! Nodes that fill up, and calls on them in turn.

use anyhow::{Context as _, Result};
use underpass_tests::{Node, netns::Netns};

use super::{Call, Ports, Site, floor};
use crate::plugin::{Network, Plugin};

/// Ours with two host ports for each container.
pub(crate) const OWN_WITH_PORTS: &str = "learned, 2 ports";

/// `bridge` with masquerade, and `portmap` with as many.
pub(crate) const PORTMAP: &str = "bridge portmap";

/// A node of one plugin with the containers that were attached so far.
pub(super) struct Crowd {
    plugin: Plugin,
    site: Site,
    /// How many they are.
    residents: usize,
    /// The last one. A handle of each would be a file for each, which every process that is started here has to close: some 0.3 µs each.
    last: Option<(Netns, Network)>,
}

/// A node without containers for each plugin.
pub(super) fn empty() -> Result<Vec<Crowd>> {
    [
        (Plugin::Learned, Ports::None),
        (Plugin::Ptp, Ports::None),
        (Plugin::PtpMasquerade, Ports::None),
        (Plugin::BridgeMasquerade, Ports::None),
        (Plugin::Learned, Ports::Two),
        (Plugin::BridgeMasquerade, Ports::Two),
    ]
    .into_iter()
    .map(|(plugin, ports)| {
        Ok(Crowd {
            plugin,
            site: Site::new(plugin, ports)?,
            residents: 0,
            last: None,
        })
    })
    .collect()
}

impl Crowd {
    /// Its name in tables.
    const fn name(&self) -> &'static str {
        match (self.site.ports, self.plugin) {
            (Ports::None, plugin) => plugin.name(),
            (Ports::Two, Plugin::Learned) => OWN_WITH_PORTS,
            (Ports::Two, _) => PORTMAP,
        }
    }

    pub(super) const fn is_ours(&self) -> bool {
        self.plugin.is_ours()
    }

    /// Whether it is ours without host ports.
    pub(super) const fn is_the_usual(&self) -> bool {
        self.is_ours() && matches!(self.site.ports, Ports::None)
    }

    pub(super) fn node(&self) -> &Node {
        &self.site.node
    }

    /// Attaches containers until there are so many.
    pub(super) fn fill(&mut self, containers: usize) -> Result<()> {
        while self.residents < containers {
            let container = self
                .site
                .container(&format!("resident{}", self.residents))?;
            let (_, attached) = self.site.add(&container)?;
            self.last = Some((container, attached));
            self.residents += 1;
        }
        Ok(())
    }

    /// CHECK of one container, STATUS and VERSION.
    pub(super) fn look(&self, containers: usize, calls: usize) -> Result<Vec<Call>> {
        let Site { node, network, .. } = &self.site;
        let last = self.last.as_ref();
        let (container, checked) = last.context("CHECK needs a container on the node")?;
        let [mut check, mut status, mut version] = [const { Vec::new() }; 3];
        for _ in 0..calls {
            for (times, done) in [
                (&mut check, checked.call(node, "CHECK", Some(container))?),
                (&mut status, network.call(node, "STATUS", None)?),
                (&mut version, network.call(node, "VERSION", None)?),
            ] {
                times.push(done.elapsed.as_secs_f64() * 1e3);
            }
        }
        let name = self.name();
        Ok(vec![
            Call::new(name, "CHECK", containers, check)?,
            Call::new(name, "STATUS", containers, status)?,
            Call::new(name, "VERSION", containers, version)?,
        ])
    }
}

/// ADD and DEL of one more container, on one node after the other, again and again; and what `ip` needs to make and delete a veth pair.
pub(super) fn attach_and_detach(
    crowds: &[Crowd],
    containers: usize,
    calls: usize,
) -> Result<Vec<Call>> {
    let mut times = vec![(Vec::new(), Vec::new()); crowds.len()];
    let (mut creations, mut deletions) = (Vec::new(), Vec::new());
    for round in 0..calls {
        for (crowd, (adds, dels)) in crowds.iter().zip(&mut times) {
            let site = &crowd.site;
            let container = site.container(&format!("guest{containers}x{round}"))?;
            let (add, attached) = site
                .add(&container)
                .with_context(|| format!("with {}", crowd.name()))?;
            adds.push(add);
            dels.push(site.del(&container, &attached)?);
            container.unlink()?;
        }
        if let Some(own) = crowds.iter().find(|crowd| crowd.is_the_usual()) {
            let container = own.site.container(&format!("bare{containers}x{round}"))?;
            let (create, delete) = floor::veth(own.node(), &container)?;
            creations.push(create);
            deletions.push(delete);
            container.unlink()?;
        }
    }
    let mut all = Vec::new();
    if !creations.is_empty() {
        all.push(Call::new(floor::NAME, "ADD", containers, creations)?);
        all.push(Call::new(floor::NAME, "DEL", containers, deletions)?);
    }
    for (crowd, (adds, dels)) in crowds.iter().zip(times) {
        let name = crowd.name();
        all.push(Call::new(name, "ADD", containers, adds)?);
        all.push(Call::new(name, "DEL", containers, dels)?);
    }
    Ok(all)
}

//! A pod with one container, made by the CRI.

use anyhow::Result;

use super::Containerd;
use crate::{
    Cage, Cri, Running,
    cri::{self, PortMapping, Protocol},
    image,
};

/// A pod. It outlives the daemon, and is removed by whoever made it.
#[derive(Debug)]
pub struct Pod {
    cri: Cri,
    name: String,
    id: String,
    container: String,
}

/// A port of the node that leads to one of a pod.
#[must_use]
pub fn port(protocol: Protocol, host: u16, inside: u16) -> PortMapping {
    PortMapping {
        protocol: protocol.into(),
        container_port: inside.into(),
        host_port: host.into(),
    }
}

impl Pod {
    /// Starts a pod and a container in it.
    pub fn start(
        containerd: &Containerd,
        name: &str,
        ports: Vec<PortMapping>,
        command: &[&str],
    ) -> Result<Self> {
        let cri = containerd.cri();
        let config = cri::pod_config(name, containerd.cage().cgroup(), ports);
        let id = cri.run_pod(&config)?;
        let container = cri.run_container(&id, &config, image::NAME, command)?;
        Ok(Self {
            cri,
            name: name.to_owned(),
            id,
            container,
        })
    }

    /// Looks inside.
    pub fn running(&self, cage: &Cage) -> Result<Running<'_>> {
        let status = self.cri.pod(&self.id)?;
        let netns = cage.netns_of(status.pid, &self.name)?;
        let exec = |command: &[&str]| self.cri.exec(&self.container, command);
        Ok(Running::new(netns, status.addresses, Box::new(exec)))
    }

    /// Stops and removes it.
    pub fn remove(self) -> Result<()> {
        self.cri.stop_pod(&self.id)?;
        self.cri.remove_pod(&self.id)
    }
}

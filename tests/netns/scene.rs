//! A container that talks to the world and serves a port of the node: both ways across an uplink.

use std::net::{IpAddr, SocketAddr};

use underpass_tests::{netns::Netns, prelude::*, runtime::Conf, traffic::serve};

const PORT: u16 = 443;
const HOST: u16 = 8080;
const INSIDE: u16 = 80;

/// A server in the world, a container with a host port, and a server in it.
pub(crate) struct Scene {
    _servers: [(tcp::Server, udp::Server); 2],
    pub(crate) pod: Pod,
    pub(crate) lab: Lab,
    remote: SocketAddr,
    served: SocketAddr,
}

/// Where a client is, whom it talks to, and as whom that must see it.
pub(crate) type Way<'a> = (&'a Netns, SocketAddr, IpAddr);

impl Scene {
    /// With a container of this network.
    pub(crate) fn set(family: Family, lab: Lab, conf: Conf) -> Result<Self> {
        let pod = lab.pod_with("a", &conf.with_host_port(HOST, INSIDE))?;
        let remote = family.remote_at(PORT);
        Ok(Self {
            _servers: [
                serve(lab.world.netns(), remote)?,
                serve(pod.netns(), family.port(INSIDE))?,
            ],
            pod,
            lab,
            remote,
            served: SocketAddr::new(family.node(), HOST),
        })
    }

    /// From the container to the world, masqueraded, and from the world to the host port.
    pub(crate) fn ways(&self, family: Family) -> [Way<'_>; 2] {
        [
            (self.pod.netns(), self.remote, family.node()),
            (self.lab.world.netns(), self.served, family.gateway()),
        ]
    }
}

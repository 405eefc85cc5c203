//! A node on which everything is loaded that a host port needs, and a server's command.

use serde_json::json;
use underpass_runtimes::Cage;
use underpass_tests::{leak::Traces, prelude::*};

/// The node's port of the container's own server, which speaks HTTP.
pub(crate) const WEB: u16 = 8080;
/// Where that listens.
pub(crate) const WEB_INSIDE: u16 = 80;
/// The node's port, by TCP and UDP, of the servers that a test puts into the container's namespace.
pub(crate) const ECHO: u16 = 9000;
/// Where those listen.
pub(crate) const ECHO_INSIDE: u16 = 90;

/// A node and its world, before any runtime has done anything.
pub(crate) struct Scene {
    pub(crate) lab: Lab,
    before: Traces,
}

impl Scene {
    pub(crate) fn set() -> Result<Self> {
        let lab = Lab::new()?;
        // All that is loaded once is loaded, and the network is known.
        lab.pod_with("first", &lab.conf().with_host_port(WEB, WEB_INSIDE))?
            .del()?;
        let before = Traces::of(&lab.node)?;
        Ok(Self { lab, before })
    }

    /// A place for a runtime.
    pub(crate) fn cage(&self) -> Result<Cage> {
        Cage::on(&self.lab.node)
    }

    /// Fails if any attachment has left a trace on the node.
    pub(crate) fn is_clean(&self) -> Result<()> {
        self.before.expect_same(&self.lab.node)
    }

    /// Fails unless this many containers have their traces on the node: a test that finds none later has looked for the right thing.
    pub(crate) fn has(&self, containers: usize) -> Result<()> {
        let now = Traces::of(&self.lab.node)?;
        let devices = now.devices.difference(&self.before.devices).count();
        let owners = now.registry.owners.len();
        ensure!(
            (devices, owners) == (containers, containers),
            "{devices} devices and {owners} owners of map entries, for {containers} containers"
        );
        let leases = now.leases.difference(&self.before.leases).count();
        ensure!(
            (leases > 0) == (containers > 0),
            "{leases} leases, for {containers} containers"
        );
        Ok(())
    }
}

/// The command of a container that serves its name by HTTP.
pub(crate) fn server(name: &str) -> [String; 4] {
    let script = format!(
        "/bin/busybox mkdir -p /www && echo {name} >/www/index.html && \
         exec /bin/busybox httpd -f -p {WEB_INSIDE} -h /www"
    );
    ["/bin/busybox", "sh", "-c", &script].map(str::to_owned)
}

/// Port mappings as a network has them whose runtime has no words for host ports.
pub(crate) fn port_mappings() -> serde_json::Value {
    let mapping = |host, inside, protocol| json!({ "hostPort": host, "containerPort": inside, "protocol": protocol });
    json!([
        mapping(WEB, WEB_INSIDE, "tcp"),
        mapping(ECHO, ECHO_INSIDE, "tcp"),
        mapping(ECHO, ECHO_INSIDE, "udp"),
    ])
}

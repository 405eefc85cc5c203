//! Which of several containers serves a host port: the newest that asked for it and is still there.
//!
//! Every write leaves the maps in a state that a repeated call can go on from, so a call may be
//! killed between any two.

use std::{cmp::Reverse, collections::BTreeSet};

use underpass_abi::{
    endpoint::Owner,
    port::{HostPort, PortTarget, ShadowedPort},
};
use underpass_dataplane::{Error, Maps, port::HostPorts};
use underpass_netlink::{Netlink, link::By};

/// The maps, as far as this matters.
pub(super) trait Table {
    /// Finds who serves a port.
    fn server(&self, port: &HostPort) -> Result<Option<PortTarget>, Error>;
    /// Lists all ports and who serves them.
    fn serving(&self) -> Result<Vec<(HostPort, PortTarget)>, Error>;
    /// Lists all older mappings.
    fn shadowed(&self) -> Result<Vec<(ShadowedPort, PortTarget)>, Error>;
    /// Sends a port to a container, whoever served it.
    fn serve(&mut self, port: HostPort, target: &PortTarget) -> Result<(), Error>;
    /// Gives a port back to the host.
    fn close(&mut self, port: &HostPort) -> Result<(), Error>;
    /// Keeps a mapping for later.
    fn shadow(&mut self, port: HostPort, target: &PortTarget) -> Result<(), Error>;
    /// Forgets a mapping that was kept for later.
    fn forget(&mut self, key: &ShadowedPort) -> Result<(), Error>;
    /// Tells whether an attachment is still there.
    fn is_alive(&self, owner: Owner) -> Result<bool, Error>;
}

/// Gives a port to a target, from now on. Its serial is raised above that of the mapping that it
/// replaces.
pub(super) fn claim(
    table: &mut impl Table,
    port: HostPort,
    mut target: PortTarget,
) -> Result<(), Error> {
    if let Some(older) = table.server(&port)? {
        target.serial = target.serial.max(older.serial.saturating_add(1));
        if older.owner != target.owner && table.is_alive(older.owner)? {
            table.shadow(port, &older)?;
        }
    }
    table.serve(port, &target)
}

/// Lists who serves a port, or would.
pub(super) fn owners(table: &impl Table) -> Result<BTreeSet<Owner>, Error> {
    let serving = table.serving()?.into_iter().map(|(_, target)| target.owner);
    let shadowed = table.shadowed()?.into_iter().map(|(key, _)| key.owner);
    Ok(serving.chain(shadowed).collect())
}

/// Takes all ports from owners. Those that they serve go to the newest of the older owners that is
/// still there.
pub(super) fn release(table: &mut impl Table, owners: &BTreeSet<Owner>) -> Result<(), Error> {
    let (own, mut others): (Vec<_>, Vec<_>) = table
        .shadowed()?
        .into_iter()
        .partition(|(key, _)| owners.contains(&key.owner));
    others.sort_unstable_by_key(|(_, target)| Reverse(target.serial));
    for (port, target) in table.serving()? {
        if owners.contains(&target.owner) {
            pass_on(table, &port, &others)?;
        } else if let Some((key, _)) = others
            .iter()
            .find(|(key, _)| key.port == port && key.owner == target.owner)
        {
            // Kept for later by a claim that was killed before it took the port.
            table.forget(key)?;
        }
    }
    own.iter().try_for_each(|(key, _)| table.forget(key))
}

/// Gives a port to the first of the heirs that is alive, the newest of which comes first.
fn pass_on(
    table: &mut impl Table,
    port: &HostPort,
    heirs: &[(ShadowedPort, PortTarget)],
) -> Result<(), Error> {
    for (key, target) in heirs.iter().filter(|(key, _)| key.port == *port) {
        let alive = table.is_alive(key.owner)?;
        if alive {
            table.serve(*port, target)?;
        }
        table.forget(key)?;
        if alive {
            return Ok(());
        }
    }
    table.close(port)
}

/// The pinned maps.
pub(super) struct Pinned<'a> {
    pub(super) ports: HostPorts,
    pub(super) maps: &'a Maps,
    /// A socket in the node's namespace.
    pub(super) node: &'a Netlink,
}

impl Table for Pinned<'_> {
    fn server(&self, port: &HostPort) -> Result<Option<PortTarget>, Error> {
        self.ports.server(port)
    }

    fn serving(&self) -> Result<Vec<(HostPort, PortTarget)>, Error> {
        self.ports.serving()
    }

    fn shadowed(&self) -> Result<Vec<(ShadowedPort, PortTarget)>, Error> {
        self.ports.shadowed()
    }

    fn serve(&mut self, port: HostPort, target: &PortTarget) -> Result<(), Error> {
        self.ports.serve(port, target)
    }

    fn close(&mut self, port: &HostPort) -> Result<(), Error> {
        self.ports.close(port)
    }

    fn shadow(&mut self, port: HostPort, target: &PortTarget) -> Result<(), Error> {
        self.ports.shadow(port, target)
    }

    fn forget(&mut self, key: &ShadowedPort) -> Result<(), Error> {
        self.ports.forget(key)
    }

    fn is_alive(&self, owner: Owner) -> Result<bool, Error> {
        match self.maps.attachment(owner)? {
            Some(record) => Ok(self.node.link(By::Index(record.ifindex))?.is_some()),
            None => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests;

//! `underpass gc --orphans`: what lost DELs have left goes, although no runtime says who is alive.
//!
//! An attachment that the maps know is dead when its device is gone. A lease that no attachment in the maps has is
//! an orphan if an ADD of this plugin took it on this node, its container has no device here, and it is older than
//! a grace period. An ADD may be under way between its lease and its device, for longer than any grace; so all calls that
//! were there when the orphans were found have ended before the first of them is freed.

use std::{collections::BTreeSet, io, net::IpAddr, path::Path, time::Duration};

use underpass_abi::endpoint::{Attachment as Record, Owner};
use underpass_cni::{Error as CniError, NetConf};
use underpass_dataplane::{Maps, Pins, lock};
use underpass_ipam::{Home, find_orphans, free_orphans};
use underpass_netlink::Netlink;

use super::{Failure, folders::NetDir, networks::Networks};
use crate::{
    error::Error,
    identity::{Alias, Identity, host_name, network_id},
    reap::{Reaped, reap},
    step::{endpoint, lease},
};

/// Who is attached, as far as anybody on the node knows.
struct Attached {
    /// The owners that the maps know, and those that aliases of devices name.
    owners: BTreeSet<Owner>,
    /// The names of all devices.
    names: BTreeSet<String>,
}

impl Attached {
    fn look(node: &Netlink, root: &Path) -> Result<Self, Error> {
        let links = node.links()?;
        let mut owners: BTreeSet<Owner> = links
            .iter()
            .filter_map(Alias::of)
            .map(|alias| alias.owner)
            .collect();
        if let Some(maps) = Maps::open_existing(&Pins::at(root))? {
            let known = maps.attachments()?.into_iter();
            owners.extend(known.map(|(owner, _)| owner));
        }
        Ok(Self {
            owners,
            names: links.into_iter().map(|link| link.name).collect(),
        })
    }

    /// Tells whether the container has that interface by any sign: an attachment of ours, host ports of ours at
    /// another plugin's, or a device of the name that ours would have.
    fn has(&self, identity: &Identity) -> bool {
        let owner = identity.owner();
        [owner, identity.chained_owner()]
            .iter()
            .any(|owner| self.owners.contains(owner))
            || self.names.contains(&host_name(owner))
    }
}

pub(super) fn run(
    root: &Path,
    net_dir: &NetDir,
    grace: Duration,
    out: &mut impl io::Write,
) -> Result<(), Failure> {
    let networks = Networks::read(net_dir, root)?;
    let confs: Vec<&NetConf> = networks.ours.iter().map(|network| &network.conf).collect();
    let node = Netlink::open()?;
    let mut errors = Vec::new();
    let reaped = dead(&node, root, &confs)?;
    let mut lines = describe(&reaped, &confs);
    errors.extend(reaped.errors);
    if let Err(error) = orphans(&node, root, &confs, grace, &mut lines) {
        errors.push(error);
    }
    if lines.is_empty() {
        lines.push("nothing to free".to_owned());
    }
    for line in lines {
        writeln!(out, "{line}")?;
    }
    errors.extend(networks.finish().err());
    Ok(Error::collect(errors)?)
}

/// Takes away attachments whose devices are gone.
fn dead(node: &Netlink, root: &Path, confs: &[&NetConf]) -> Result<Reaped, Error> {
    match Maps::open_existing(&Pins::at(root))? {
        Some(mut maps) => reap(node, &mut maps, &node.indices()?, confs),
        None => Ok(Reaped::default()),
    }
}

/// Frees leases that no attachment has, and says which. Holds no maps open while it waits for calls.
fn orphans(
    node: &Netlink,
    root: &Path,
    confs: &[&NetConf],
    grace: Duration,
    lines: &mut Vec<String>,
) -> Result<(), Error> {
    let home = Home::current().map_err(|error| {
        CniError::io("cannot tell this network namespace from others", &error)
            .with_details("mount a procfs at /proc")
    })?;
    let identity = |conf: &NetConf, container: &str, ifname: &str| Identity {
        network: conf.name.clone(),
        container: container.to_owned(),
        ifname: ifname.to_owned(),
    };
    let attached = Attached::look(node, root)?;
    let mut errors = Vec::new();
    let mut found = Vec::new();
    for conf in confs {
        let is_attached =
            |container: &str, ifname: &str| attached.has(&identity(conf, container, ifname));
        let orphans = match lease::is_built_in(conf) {
            Ok(true) => find_orphans(conf, home, grace, is_attached).map_err(Error::from),
            Ok(false) => continue,
            Err(error) => Err(error),
        };
        match orphans {
            Ok(orphans) if orphans.is_empty() => {}
            Ok(orphans) => found.push((conf, orphans)),
            Err(error) => errors.push(error),
        }
    }
    if !found.is_empty() {
        lock::await_calls(root, || {})?;
        let attached = Attached::look(node, root)?;
        for (conf, orphans) in found {
            let is_attached =
                |container: &str, ifname: &str| attached.has(&identity(conf, container, ifname));
            let mut freed = Vec::new();
            if let Err(error) = free_orphans(conf, home, &orphans, is_attached, &mut freed) {
                errors.push(error.into());
            }
            lines.extend(freed.iter().map(ToString::to_string));
        }
    }
    Error::collect(errors)
}

fn describe(reaped: &Reaped, confs: &[&NetConf]) -> Vec<String> {
    let name = |id: u32| {
        let known = confs.iter().find(|conf| network_id(&conf.name) == id);
        known.map_or_else(|| format!("#{id:08x}"), |conf| conf.name.clone())
    };
    let attachment = |record: &Record| {
        let addresses = endpoint::addresses(record).map(|addr| IpAddr::from(addr).to_string());
        let addresses: Vec<String> = addresses.collect();
        format!(
            "attachment to network {} at {}",
            name(record.network),
            addresses.join(" and ")
        )
    };
    let attachments = reaped.attachments.iter().map(|record| {
        let ports = match record.port_count {
            0 => String::new(),
            count => format!(", with host ports ({count} entries)"),
        };
        format!("{}{ports}: its device is gone", attachment(record))
    });
    let ports = reaped.ports.iter().map(|record| {
        format!(
            "host ports ({} entries) of the {}: its device is gone",
            record.port_count,
            attachment(record)
        )
    });
    let leases = reaped.leases.iter().map(ToString::to_string);
    attachments.chain(ports).chain(leases).collect()
}

//! `underpass apply`: what the node changed behind our back is put right, without a call of the runtime.

use std::{collections::BTreeSet, io, net::IpAddr, path::Path};

use underpass_dataplane::{Maps, Pins, policy::Rules};
use underpass_netlink::Netlink;

use super::{
    Failure,
    folders::NetDir,
    networks::{Network, Networks},
};
use crate::{
    change::Change,
    conf::Conntrack,
    error::Error,
    glob::Glob,
    identity::network_id,
    no_masquerade,
    reap::reap,
    repair::{forget_devices, repair, uplinks},
    step::{endpoint, sysctl::be_liberal_again},
};

pub(super) fn run(root: &Path, net_dir: &NetDir, out: &mut impl io::Write) -> Result<(), Failure> {
    let networks = Networks::read(net_dir, root)?;
    let maps = Maps::open_existing(&Pins::at(root)).map_err(Error::from)?;
    let Some(mut maps) = maps else {
        writeln!(
            out,
            "nothing is loaded at {}: the first ADD or `underpass load` puts the node right",
            root.display()
        )?;
        return Ok(networks.finish()?);
    };
    let mut patterns: Vec<Option<Vec<Glob>>> = Vec::new();
    for network in &networks.ours {
        let asked = uplinks(&network.conf, &network.decoded, &maps)?;
        if !patterns.contains(&asked) {
            patterns.push(asked);
        }
    }
    let patterns: Vec<Option<&[Glob]>> = patterns.iter().map(Option::as_deref).collect();
    let node = Netlink::open()?;
    let mut changes = forget_devices(&mut maps, None, &node)?;
    let freed = free_ports(&node, &mut maps, &mut changes);
    // The rules of now follow from it.
    let tracked = track(&maps, &networks.ours, &mut changes);
    let outcome = repair(&node, &mut maps, &patterns, Rules::known, &mut changes);
    let refresh = |network: &Network| {
        no_masquerade::refresh(&maps, &network.conf.name, &network.decoded, &mut changes)
    };
    let refreshed = Error::collect(
        networks
            .ours
            .iter()
            .map(refresh)
            .filter_map(Result::err)
            .collect(),
    );
    for change in &changes {
        writeln!(out, "{change}")?;
    }
    let outcomes = [freed, tracked, outcome, refreshed];
    if changes.is_empty() && outcomes.iter().all(Result::is_ok) {
        writeln!(out, "nothing to change")?;
    }
    let outcomes = outcomes.into_iter().chain([networks.finish()]);
    Ok(Error::collect(outcomes.filter_map(Result::err).collect())?)
}

/// Takes their host ports from containers whose devices are gone: the DEL was lost, or went to a plugin of the same name that is not ours. All else that they
/// have is of no harm, and is left to ADD and GC.
fn free_ports(node: &Netlink, maps: &mut Maps, changes: &mut Vec<Change>) -> Result<(), Error> {
    let reaped = reap(node, maps, &node.indices()?, &[])?;
    changes.extend(reaped.ports.iter().map(|record| Change::HostPorts {
        addresses: endpoint::addresses(record).map(IpAddr::from).collect(),
        count: record.port_count,
    }));
    Error::collect(reaped.errors)
}

/// Has connection tracking be what a network asks for, where it has containers: those of others' interfaces have never asked.
fn track(maps: &Maps, networks: &[Network], changes: &mut Vec<Change>) -> Result<(), Error> {
    let mut asking = networks
        .iter()
        .filter(|network| network.decoded.conntrack == Conntrack::Liberal)
        .map(|network| network_id(&network.conf.name))
        .peekable();
    if asking.peek().is_none() {
        return Ok(());
    }
    let interfaces = maps.interfaces()?;
    let attached: BTreeSet<u32> = interfaces.iter().map(|record| record.network).collect();
    if asking.any(|network| attached.contains(&network)) {
        be_liberal_again(changes)?;
    }
    Ok(())
}

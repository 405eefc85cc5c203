//! STATUS: whether an ADD would work now. 50 says that it would not, 51 that the network's containers
//! suffer besides. What an ADD does not fail on is no error: a runtime takes any for a node that can
//! run nothing, and the ADD that mends it never comes. Polled every few seconds: reads a little,
//! changes nothing.

use std::{
    collections::HashSet,
    hash::{BuildHasher as _, Hasher as _, RandomState},
    net::IpAddr,
    path::Path,
};

use tracing::warn;
use underpass_abi::endpoint::{Attachment as Record, Owner, device};
use underpass_cni::{Error as CniError, NetworkRequest};
use underpass_dataplane::{Maps, Pins, attach, kernel, object, policy::Stack};
use underpass_ipam::store::Store;
use underpass_netlink::{Netlink, link::By};

use crate::{
    conf::{Bypass, Conf},
    error::Error,
    finding::{Finding, Findings},
    identity::{Alias, Identity, network_id},
    left_behind::{left_behind, unknown_to},
    reap,
    rehearsal::accept,
    step::{endpoint, lease, link},
    uplink::{Uplinks, reconcile},
};

/// The first kernel whose verifier takes the programs.
pub(crate) const OLDEST: (u32, u32) = (5, 10);

/// Says whether the network is able to serve.
pub(super) fn status(request: &NetworkRequest) -> Result<(), CniError> {
    let conf = Conf::of_network(&request.conf)?;
    if kernel::version() < OLDEST {
        return Err(CniError::not_available(format!(
            "Linux {} is too old: boot {}.{} or newer",
            kernel::release(),
            OLDEST.0,
            OLDEST.1
        )));
    }
    let driver =
        link::driver(conf.device).map_err(|error| CniError::not_available(error.to_string()))?;
    let pins = Pins::at(&conf.bpf_root);
    ready(&conf.bpf_root, &request.conf.name)?;
    admits(&pins, &conf).map_err(|error| CniError::not_available(error.to_string()))?;
    // No reason to send no containers here.
    if conf.bypass == Bypass::Learned
        && let Some(remark) = Stack::look().remark()
    {
        warn!("{remark}");
    }
    let name = &request.conf.name;
    let sample = lease::status(request, |store| {
        // What can't be seen counts as living.
        dead_leases(&pins, name, store).unwrap_or_default()
    })?;
    Ok(accept(name, &conf, driver, sample)?)
}

/// Fails where the first ADD would: where the programs can't be loaded (a kernel whose programs may be interrupted in their middle, a control
/// group with too little memory), and while the containers of another root have the uplinks. Whoever has containers attached has been through that.
fn admits(pins: &Pins, conf: &Conf) -> Result<(), Error> {
    let maps = Maps::open_existing(pins)?;
    match &maps {
        None => object::require_first_load()?,
        Some(maps) if maps.has_attachments()? => return Ok(()),
        Some(_) => {}
    }
    // Most nodes have one root, and are looked at no further.
    if pins.beside().is_empty() {
        return Ok(());
    }
    let node = Netlink::open()?;
    let uplinks = Uplinks::look(&node, maps.as_ref(), conf.uplinks.as_deref())?;
    reconcile::require_free(&node, pins, &uplinks)
}

/// Lists the addresses that the network has leased to attachments whose devices are gone.
fn dead_leases(pins: &Pins, network: &str, store: &Store) -> Result<HashSet<IpAddr>, Error> {
    let Some(maps) = Maps::open_existing(pins)? else {
        return Ok(HashSet::new());
    };
    let devices = Netlink::open()?.indices()?;
    let dead = reap::dead(&maps, &devices)?.into_iter();
    let ours = dead.filter(|(_, record)| record.network == network_id(network));
    Ok(ours
        .flat_map(|(owner, record)| leased_to(owner, &record, network, store))
        .collect())
}

/// Lists the addresses of an attachment that are leased to it: after a GC of an IPAM alone another one may have them.
fn leased_to(owner: Owner, record: &Record, network: &str, store: &Store) -> Vec<IpAddr> {
    let is_its = |address: &IpAddr| {
        let lease = store.owner(*address).ok().flatten();
        lease.is_some_and(|lease| {
            let identity = Identity {
                network: network.to_owned(),
                container: lease.container_id,
                ifname: lease.ifname.unwrap_or_default(),
            };
            identity.owner() == owner
        })
    };
    let addresses = endpoint::addresses(record).map(IpAddr::from);
    addresses.filter(is_its).collect()
}

/// Says whether the network is able to serve, apart from addresses.
pub(super) fn ready(bpf_root: &Path, network: &str) -> Result<(), CniError> {
    let pins = Pins::at(bpf_root);
    if let Err(error) = pins.require_bpffs() {
        let id = network_id(network);
        let suffering = left_behind(bpf_root, None, |alias| alias.network == id);
        let suffering = suffering.unwrap_or_default();
        return Err(if suffering.is_empty() {
            CniError::not_available(error.to_string())
        } else {
            CniError::limited_connectivity(format!("{error}; {suffering}"))
        });
    }
    let wrong = existing(&pins, network_id(network))
        .map_err(|error| CniError::not_available(error.to_string()))?;
    for finding in wrong.iter() {
        warn!("{finding}");
    }
    Ok(())
}

/// Says what is wrong with the programs of the network's containers, of uplinks and of the loopback device.
fn existing(pins: &Pins, network: u32) -> Result<Findings, Error> {
    let is_of_network = |alias: &Alias| alias.network == network;
    // Nothing loaded is how every boot begins: the first ADD does it. But then there are no containers.
    let Some(maps) = Maps::open_existing(pins)? else {
        return left_behind(pins.root(), None, is_of_network);
    };
    let known = maps.devices()?;
    let indices = known.iter().map(|(index, _)| *index).collect();
    let mut findings = unknown_to(&maps, &indices, is_of_network)?;
    if !maps.has_attachments()? {
        return Ok(findings);
    }
    let node = Netlink::open()?;
    // Uplinks that are new or have changed are the next ADD's business: a network that is not ready
    // for them would never see that ADD.
    let (pods, others): (Vec<_>, Vec<_>) = known
        .into_iter()
        .filter(|(_, entry)| entry.flags & device::POD == 0 || entry.network == network)
        .map(|(index, entry)| (index, entry.flags))
        .partition(|(_, flags)| flags & device::POD != 0);
    let devices: Vec<_> = others
        .into_iter()
        .chain(some_of(pods, turn()))
        .map(|(index, flags)| (index, attach::places(flags)))
        .collect();
    for (index, place) in attach::missing(&node, pins, &devices)? {
        // A device that is gone took its filters along.
        if let Some(link) = node.link(By::Index(index))? {
            findings.push(Finding::NotAttached {
                place,
                device: link.name,
            });
        }
    }
    Ok(findings)
}

/// Containers whose programs one STATUS looks at. Each look is a question to the kernel under its one lock for all
/// that concerns devices, and a runtime asks every few seconds: with a thousand containers these would be two
/// thousand. The next one looks at others; CHECK and `underpass status` look at all.
const SOME: usize = 64;

/// A number by chance: one that follows from the time could be the same whenever a runtime asks.
fn turn() -> usize {
    let number = RandomState::new().build_hasher().finish();
    usize::try_from(number >> 32).unwrap_or_default()
}

/// As many as are looked at, from another place each turn.
fn some_of<T>(mut all: Vec<T>, turn: usize) -> Vec<T> {
    if all.len() > SOME {
        let first = turn % all.len().div_ceil(SOME) * SOME;
        all.rotate_left(first);
        all.truncate(SOME);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_looked_at_in_turn() {
        for all in [0, 1, SOME, SOME + 1, 1_000] {
            let turns = all.div_ceil(SOME);
            let mut seen: Vec<_> = (0..turns)
                .flat_map(|turn| some_of((0..all).collect(), turn))
                .collect();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), all, "{turns} turns");
            assert!(some_of((0..all).collect(), turns + 1).len() <= SOME);
        }
    }
}

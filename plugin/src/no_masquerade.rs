//! Destinations that see containers' own addresses, as the network's config says them now: a node that joins a cluster does not
//! wait for the next ADD of all others.

use std::collections::BTreeSet;

use ipnet::IpNet;
use underpass_dataplane::{Maps, lock::Lock};

use crate::{
    change::Change,
    conf::{Conf, Masquerade},
    error::Error,
    identity::network_id,
    plan::never_masqueraded,
};

/// Has the programs go by what the config says, and notes what changed. Where it says nothing, what ADD found in the leases stays; where
/// no container is attached there is nothing, until an ADD.
pub(crate) fn refresh(
    maps: &Maps,
    name: &str,
    conf: &Conf,
    changes: &mut Vec<Change>,
) -> Result<(), Error> {
    let (Masquerade::On, Some(said)) = (conf.masquerade, &conf.non_masquerade) else {
        return Ok(());
    };
    let network = network_id(name);
    let wanted: BTreeSet<IpNet> = never_masqueraded(said.clone()).into_iter().collect();
    let known = || -> Result<BTreeSet<IpNet>, Error> {
        Ok(maps.no_masquerade(network)?.into_iter().collect())
    };
    if known()? == wanted {
        return Ok(());
    }
    // An ADD or DEL may be at it.
    let _lock = Lock::acquire(maps.pins().root())?;
    let mut attached = maps.attachments()?.into_iter();
    if attached.all(|(_, record)| record.network != network) {
        return Ok(());
    }
    let known = known()?;
    let missing: Vec<IpNet> = wanted.difference(&known).copied().collect();
    let surplus: Vec<IpNet> = known.difference(&wanted).copied().collect();
    maps.add_no_masquerade(network, &missing)?;
    maps.remove_no_masquerade(network, &surplus)?;
    maps.raise_epoch()?;
    for (nets, is_kept) in [(missing, true), (surplus, false)] {
        if !nets.is_empty() {
            changes.push(Change::Masquerade {
                network: name.to_owned(),
                nets,
                is_kept,
            });
        }
    }
    Ok(())
}

//! Uplinks and the loopback device, as they are, against what the programs know of them and where the
//! programs sit.

use underpass_abi::endpoint::{self, Device as Known, device};
use underpass_dataplane::{
    Changed, Maps,
    attach::{load_and_attach, missing, places},
    lock::Lock,
};
use underpass_netlink::{
    Netlink,
    link::{By, Device},
};

use super::{Uplink, Uplinks};
use crate::{
    error::Error,
    finding::{Finding, Findings},
    glob::Glob,
};

/// Brings the uplinks up to date, if they are not. Returns what there is now.
pub(crate) fn repair<'a>(
    node: &Netlink,
    maps: &mut Maps,
    patterns: Option<&'a [Glob]>,
) -> Result<Uplinks<'a>, Error> {
    let lock = Lock::acquire(maps.pins().root())?;
    let found = Uplinks::find(node, maps, patterns)?;
    if uplinks(&lock, node, maps, &found.list)? == Changed::Yes {
        maps.raise_epoch()?;
    }
    Ok(found)
}

/// Compares the programs and map entries of the uplinks with what they have to be.
pub(crate) fn verify(
    node: &Netlink,
    maps: &Maps,
    uplinks: &[Uplink],
    findings: &mut Findings,
) -> Result<(), Error> {
    for uplink in uplinks {
        if maps.device(uplink.index)? != Some(uplink.device) {
            findings.push(Finding::OtherUplink(uplink.name.clone()));
        }
        let places = places(uplink.device.flags);
        let missing = missing(node, maps.pins(), &[(uplink.index, places)])?;
        findings.extend(Finding::not_attached(missing, &uplink.name));
    }
    Ok(())
}

/// Makes the programs know the uplinks as they are now, and sit on all of them. One that went away
/// meanwhile is forgotten. The caller raises the epoch when this returns [`Changed::Yes`], after
/// everything else that it changes.
pub(crate) fn uplinks(
    lock: &Lock,
    netlink: &Netlink,
    maps: &mut Maps,
    uplinks: &[Uplink],
) -> Result<Changed, Error> {
    let mut changed = Changed::No;
    for uplink in uplinks {
        match self::uplink(lock, netlink, maps, uplink) {
            Ok(Changed::No) => {}
            Ok(Changed::Yes) => changed = Changed::Yes,
            Err(_) if netlink.link(By::Index(uplink.index))?.is_none() => {
                maps.remove_device(uplink.index)?;
                changed = Changed::Yes;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(changed)
}

fn uplink(
    lock: &Lock,
    netlink: &Netlink,
    maps: &mut Maps,
    uplink: &Uplink,
) -> Result<Changed, Error> {
    let mut changed = Changed::No;
    if maps.device(uplink.index)? != Some(uplink.device) {
        maps.set_device(uplink.index, uplink.device)?;
        changed = Changed::Yes;
    }
    let places = places(uplink.device.flags);
    if !missing(netlink, maps.pins(), &[(uplink.index, places)])?.is_empty() {
        let device = Device {
            index: uplink.index,
            name: uplink.name.clone(),
        };
        load_and_attach(lock, netlink, maps.pins(), &device, places)?;
        changed = Changed::Yes;
    }
    Ok(changed)
}

/// Makes the program for processes of the host sit on the loopback device, and the maps know of it.
/// The caller raises the epoch, if anything changed, after everything else that it changes.
pub(crate) fn loopback(lock: &Lock, netlink: &Netlink, maps: &mut Maps) -> Result<Changed, Error> {
    let wanted = Known {
        // Never a way of the bypass.
        flags: device::LOOPBACK | device::LAYER3,
        ..Known::default()
    };
    let mut changed = Changed::No;
    if maps.device(endpoint::LOOPBACK)? != Some(wanted) {
        maps.set_device(endpoint::LOOPBACK, wanted)?;
        changed = Changed::Yes;
    }
    let places = places(wanted.flags);
    if !missing(netlink, maps.pins(), &[(endpoint::LOOPBACK, places)])?.is_empty() {
        let device = Device {
            index: endpoint::LOOPBACK,
            name: "lo".to_owned(),
        };
        load_and_attach(lock, netlink, maps.pins(), &device, places)?;
        changed = Changed::Yes;
    }
    Ok(changed)
}

//! Uplinks and the loopback device, as they are, against what the programs know of them and where the
//! programs sit.

use underpass_abi::endpoint::{self, Device as Known, device, role};
use underpass_dataplane::{
    Changed, Maps, Pins,
    attach::{detach, load_and_attach, missing, places},
    layout,
    lock::Lock,
};
use underpass_netlink::{
    Netlink,
    link::{By, Device, Link},
};

use super::{Uplink, Uplinks};
use crate::{
    change::Change,
    error::Error,
    finding::{Finding, Findings},
    glob::Glob,
};

/// Brings the uplinks up to date, if they are not, and notes what that changed. Returns what there is now.
pub(crate) fn repair<'a>(
    node: &Netlink,
    maps: &mut Maps,
    patterns: Option<&'a [Glob]>,
    changes: &mut Vec<Change>,
) -> Result<Uplinks<'a>, Error> {
    let lock = Lock::acquire(maps.pins().root())?;
    let found = Uplinks::find(node, maps, patterns)?;
    let more = uplinks(&lock, node, maps, &found)?;
    if !more.is_empty() {
        maps.raise_epoch()?;
    }
    changes.extend(more);
    Ok(found)
}

/// What is not as it has to be.
#[derive(Default)]
pub(crate) struct Deviations {
    /// What has become of the node since the last change of ours.
    pub(crate) of_node: Findings,
    /// What was there and is not any more: somebody has taken it away.
    pub(crate) taken_away: Findings,
}

impl Deviations {
    /// Tells whether all is as it has to be.
    pub(crate) fn is_empty(&self) -> bool {
        self.of_node.is_empty() && self.taken_away.is_empty()
    }
}

/// Compares the programs and map entries of the uplinks, and the tunnels that containers are kept out of, with what
/// they have to be.
pub(crate) fn verify(
    node: &Netlink,
    maps: &Maps,
    uplinks: &Uplinks<'_>,
) -> Result<Deviations, Error> {
    let mut found = Deviations::default();
    if maps.state()?.tunnels != uplinks.tunnels {
        found.of_node.push(Finding::OtherTunnels);
    }
    for device in &uplinks.parts {
        found
            .of_node
            .push(Finding::PartOfUplink(device.name.clone()));
    }
    for uplink in &uplinks.list {
        let known = maps.device(uplink.index)?;
        if known != Some(uplink.device) {
            found
                .of_node
                .push(Finding::OtherUplink(uplink.name.clone()));
        }
        let places = places(uplink.device.flags);
        let missing = missing(node, maps.pins(), &[(uplink.index, places)])?;
        // A new uplink has had none.
        let kind = if known.is_some() {
            &mut found.taken_away
        } else {
            &mut found.of_node
        };
        kind.extend(Finding::not_attached(missing, &uplink.name));
    }
    Ok(found)
}

/// Makes the programs know the uplinks and the tunnels as they are now, and sit on all uplinks, and on no part of one. One that went away
/// meanwhile is forgotten. The caller raises the epoch when this returns any change, after everything
/// else that it changes.
pub(crate) fn uplinks(
    lock: &Lock,
    netlink: &Netlink,
    maps: &mut Maps,
    uplinks: &Uplinks<'_>,
) -> Result<Vec<Change>, Error> {
    let mut changes = Vec::new();
    if maps.set_tunnels(lock, uplinks.tunnels)? == Changed::Yes {
        changes.push(Change::Tunnels);
    }
    for Uplink {
        index,
        name,
        device: wanted,
        ..
    } in &uplinks.list
    {
        let device = Device {
            index: *index,
            name: name.clone(),
        };
        match bring_up_to_date(lock, netlink, maps, &device, *wanted) {
            Ok(more) => changes.extend(more),
            Err(_) if netlink.link(By::Index(*index))?.is_none() => {
                maps.remove_device(*index)?;
                changes.push(Change::Forgotten(*index));
            }
            Err(error) => return Err(error),
        }
    }
    // At no time is there a way without programs.
    for device in &uplinks.parts {
        let kind = maps.device(device.index)?.map_or(0, |known| known.flags);
        detach(netlink, maps.pins(), device, places(kind))?;
        maps.remove_device(device.index)?;
        changes.push(Change::Detached(device.name.clone()));
    }
    Ok(changes)
}

/// Describes the host's end of a container of another plugin that is behind a bridge which is an uplink: what it sends there leaves by it.
pub(crate) fn at_uplink(entry: Known, host: &Link) -> Known {
    Known {
        flags: entry.flags | device::AT_UPLINK,
        ..at_bridge(entry, host)
    }
}

/// Describes the port of a bridge, which takes what is for it, whichever address it has itself.
pub(crate) fn at_bridge(entry: Known, host: &Link) -> Known {
    let mac = host.mac.0;
    Known {
        own_mac: [0, 2, 4].map(|at| u16::from_ne_bytes([mac[at], mac[at + 1]])),
        ..entry
    }
}

/// Makes the programs know that the containers behind a bridge are at an uplink now.
fn put_at_uplink(netlink: &Netlink, maps: &mut Maps, bridge: u32) -> Result<(), Error> {
    for (_, record) in maps.attachments()? {
        if record.role != role::CHAINED || record.via != bridge {
            continue;
        }
        let entry = maps.device(record.ifindex)?;
        let host = netlink.link(By::Index(record.ifindex))?;
        if let Some((entry, host)) = entry.zip(host) {
            maps.set_device(record.ifindex, at_uplink(entry, &host))?;
        }
    }
    Ok(())
}

/// Fails while the containers of another root have one of the uplinks, as [`uplinks`] does, and changes nothing.
pub(crate) fn require_free(
    netlink: &Netlink,
    pins: &Pins,
    uplinks: &Uplinks<'_>,
) -> Result<(), Error> {
    for uplink in &uplinks.list {
        let device = Device {
            index: uplink.index,
            name: uplink.name.clone(),
        };
        let missing = missing(
            netlink,
            pins,
            &[(uplink.index, places(uplink.device.flags))],
        )?;
        layout::require_free(netlink, pins, &device, &missing)?;
    }
    Ok(())
}

/// Makes the program for processes of the host sit on the loopback device, and the maps know of it.
/// The caller raises the epoch, if anything changed, after everything else that it changes.
pub(crate) fn loopback(
    lock: &Lock,
    netlink: &Netlink,
    maps: &mut Maps,
) -> Result<Vec<Change>, Error> {
    let wanted = Known {
        // Never a way of the bypass.
        flags: device::LOOPBACK | device::LAYER3,
        ..Known::default()
    };
    let device = Device {
        index: endpoint::LOOPBACK,
        name: "lo".to_owned(),
    };
    bring_up_to_date(lock, netlink, maps, &device, wanted)
}

fn bring_up_to_date(
    lock: &Lock,
    netlink: &Netlink,
    maps: &mut Maps,
    device: &Device,
    wanted: Known,
) -> Result<Vec<Change>, Error> {
    let mut changes = Vec::new();
    let places = places(wanted.flags);
    let missing = missing(netlink, maps.pins(), &[(device.index, places)])?;
    layout::require_free(netlink, maps.pins(), device, &missing)?;
    let before = maps.device(device.index)?;
    if before != Some(wanted) {
        // First, as a call that is killed in between is repeated.
        if before.is_some_and(|before| before.is_way()) {
            put_at_uplink(netlink, maps, device.index)?;
        }
        maps.set_device(device.index, wanted)?;
        changes.push(Change::of_device(&device.name, before.as_ref(), &wanted));
    }
    if !missing.is_empty() {
        load_and_attach(lock, netlink, maps.pins(), device, places)?;
        changes.push(Change::Attached {
            device: device.name.clone(),
            programs: missing.iter().map(|(_, place)| place.program).collect(),
        });
    }
    Ok(changes)
}

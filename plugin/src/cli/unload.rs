//! `underpass unload`: the end of a node's dataplane. The next ADD loads it again.

use std::{io, path::Path};

use underpass_abi::endpoint::device;
use underpass_dataplane::{Maps, Pins, attach, lock::Lock};
use underpass_netlink::{
    Mac, Netlink,
    link::{By, Device},
};

use super::Failure;
use crate::{error::Error, step::xdp};

pub(super) fn run(root: &Path, force: bool, out: &mut impl io::Write) -> Result<(), Failure> {
    let pins = Pins::at(root);
    if !pins.are_complete() {
        writeln!(out, "nothing is loaded at {}", root.display())?;
        return Ok(());
    }
    let _lock = Lock::acquire(root)?;
    let maps = Maps::open(&pins)?;
    let attached = maps.attachments()?.len();
    if attached > 0 && !force {
        return Err(Failure::InUse(attached));
    }
    for name in detach(&maps)? {
        writeln!(out, "detached from {name}")?;
    }
    pins.remove()?;
    writeln!(out, "removed the pins at {}", pins.folder().display())?;
    Ok(())
}

/// Takes the programs off every device that the maps know; returns the devices' names.
fn detach(maps: &Maps) -> Result<Vec<String>, Error> {
    let node = Netlink::open()?;
    let mut names = Vec::new();
    for (index, entry) in maps.devices()? {
        let Some(link) = node.link(By::Index(index))? else {
            continue;
        };
        // Called in another namespace than the node's, the number would mean another device.
        // A container of another plugin is known with the MAC of its bridge.
        let bridge = match link.controller {
            Some(index) if entry.flags & device::FOREIGN != 0 => node.link(By::Index(index))?,
            _ => None,
        };
        let mac = bridge.map_or(link.mac, |bridge| bridge.mac);
        if mac != Mac(entry.mac) {
            continue;
        }
        let from_xdp = xdp::detach(&node, maps.pins(), &link)?;
        let device = Device::from(&link);
        let places = attach::places(entry.flags);
        if attach::detach(&node, maps.pins(), &device, places)? || from_xdp {
            names.push(device.name);
        }
    }
    Ok(names)
}

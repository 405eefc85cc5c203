//! Whether an install could cost the containers that are there something.

use std::path::Path;

use underpass_cni::{Code, Error as CniError};
use underpass_dataplane::{Error as Dataplane, Maps, Pins, netkit};
use underpass_netlink::{Netlink, filter::Direction, link::By};

use crate::{
    cli::{Failure, doctor::some, status::devices_left_behind},
    error::Error,
};

/// Whether this executable can serve the containers that are attached.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Able {
    /// It can.
    Now,
    /// It can when its own programs have taken over.
    AfterUpgrade,
}

/// Refuses a node whose containers this executable could not serve. In the place of the one that serves them it would fail every
/// ADD, or take the uplinks from them.
pub(super) fn able(root: &Path, may_upgrade: bool) -> Result<Able, Failure> {
    let pins = Pins::at(root);
    for layout in pins.layouts()?.iter().filter(|layout| layout.is_other()) {
        let attached = layout.attachments()?;
        if attached > 0 {
            return Err(CniError::new(
                Code::Io,
                format!(
                    "containers are attached ({attached}) to programs of layout {} at {}, which this executable does not know: drain the node and run `underpass unload`, then install; nothing was changed",
                    layout.number(),
                    layout.folder().display()
                ),
            )
            .into());
        }
    }
    match Maps::open_existing(&pins) {
        Err(Dataplane::OtherLayout { .. }) if may_upgrade => Ok(Able::AfterUpgrade),
        answer => {
            if answer?.is_none() {
                spares_those_of_before(root, &pins)?;
            }
            Ok(Able::Now)
        }
    }
}

/// Refuses to load anything where containers have outlived what was loaded: they go on with that, until what is loaded next takes the uplinks
/// from it. To lose masquerade and host ports they should be moved first, which takes somebody who knows; `load` is for who does not mind.
fn spares_those_of_before(root: &Path, pins: &Pins) -> Result<(), Failure> {
    let node = Netlink::open().map_err(Error::from)?;
    let mut devices = Vec::new();
    for device in devices_left_behind(root, None)? {
        // After `unload --force` they have nothing to lose.
        if is_served(&node, &device)? {
            devices.push(device);
        }
    }
    if devices.is_empty() {
        return Ok(());
    }
    // Where there is none, theirs may be below what was mounted, or nowhere: that comes first.
    pins.require_bpffs()?;
    // An ADD may have loaded meanwhile, and made one of them.
    if Maps::open_existing(pins)?.is_some() {
        return Ok(());
    }
    Err(Failure::Outlived {
        root: root.to_owned(),
        devices: some(devices.iter().map(String::as_str)),
    })
}

/// Whether a program still runs at the host's end of a container's pair.
fn is_served(node: &Netlink, device: &str) -> Result<bool, Error> {
    let Some(link) = node.link(By::Name(device))? else {
        return Ok(false);
    };
    let places = [Direction::Ingress, Direction::Egress].map(|direction| (link.index, direction));
    let filters = node.filter_programs(&places)?;
    let has_filter = filters.iter().any(Option::is_some);
    Ok(has_filter || link.is_netkit() && !netkit::programs(link.index)?.is_empty())
}

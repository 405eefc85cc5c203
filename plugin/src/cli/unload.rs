//! `underpass unload`: the end of a node's dataplane, of whatever layout. The next ADD loads it again.

use std::{io, path::Path};

use underpass_dataplane::{
    Pins,
    layout::Layout,
    lock::{self, Alone, Lock},
    upgrade,
};
use underpass_netlink::Netlink;

use super::Failure;

pub(super) fn run(root: &Path, force: bool, out: &mut impl io::Write) -> Result<(), Failure> {
    let pins = Pins::at(root);
    if let Err(error) = upgrade::settle(&pins) {
        tracing::warn!("an upgrade was killed, and can't be ended: {error}");
    }
    let layouts = pins.layouts()?;
    if layouts.is_empty() {
        writeln!(out, "nothing is loaded at {}", root.display())?;
        return Ok(());
    }
    unused(&layouts, force)?;
    // An ADD under way writes to the maps that it has opened: behind others of the same name the container would have no network.
    let _alone = await_calls(root, force, out)?;
    let lock = Lock::acquire(root)?;
    let layouts = pins.layouts()?;
    unused(&layouts, force)?;
    let node = Netlink::open()?;
    let links = node.links()?;
    for layout in layouts {
        for name in layout.detach(&node, &links)? {
            writeln!(out, "detached from {name}")?;
        }
        let folder = layout.folder().to_owned();
        layout.remove()?;
        writeln!(out, "removed the pins at {}", folder.display())?;
    }
    Ok(pins.tidy(&lock)?)
}

/// Refuses what containers are attached by, unless that is forced.
fn unused(layouts: &[Layout], force: bool) -> Result<(), Failure> {
    let mut attached = 0;
    for layout in layouts {
        attached += layout.attachments()?;
    }
    if attached > 0 && !force {
        return Err(Failure::InUse(attached));
    }
    Ok(())
}

/// Waits for the calls that are under way, and says so; later ones wait until what is returned is dropped. Where it is forced, one that hangs is not waited for
/// in the end, and there is nothing to drop.
pub(super) fn await_calls(
    root: &Path,
    force: bool,
    out: &mut impl io::Write,
) -> Result<Option<Alone>, Failure> {
    let mut said = Ok(());
    let say = || said = writeln!(out, "waiting for calls that are under way");
    let alone = match lock::alone(root, say) {
        Err(error) if force => {
            tracing::warn!("a call is under way: {error}");
            None
        }
        alone => Some(alone?),
    };
    said?;
    Ok(alone)
}

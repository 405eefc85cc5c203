//! XDP, where the network asks for it: the program on the uplinks whose drivers run it, and containers
//! that take frames from there. All of it is help that nobody depends on: what XDP does not take, or
//! where it can't be had, the programs at tc do as always.

use std::os::fd::AsFd as _;

use tracing::{debug, warn};
use underpass_abi::{endpoint::device, map};

use super::link::Pair;
use crate::{
    conf::Xdp,
    datapath::{Maps, Pins, feature, lock::Lock, object},
    error::Error,
    ethtool,
    netlink::{
        Netlink,
        link::{Device, Link},
        xdp::{Attached, XdpMode},
    },
    netns::Netns,
    plan::Plan,
    uplink::Uplink,
};

/// The first kernel whose veths take frames without an XDP program of their own (commit d3256efd8e8b).
const VETH_TAKES_FRAMES: (u32, u32) = (5, 13);

/// Has the container take frames. Its end of the pair exists.
pub(crate) fn apply_pod(
    netns: &Netns,
    maps: &Maps,
    plan: &Plan,
    pair: &Pair,
    xdp: Xdp,
) -> Result<(), Error> {
    if !takes_frames(xdp, plan.flags, feature::version()) {
        return Ok(());
    }
    let name = &pair.pod.name;
    if let Err(error) = netns.run(|| ethtool::switch_gro_on(name))? {
        warn!("{name} takes no frames from XDP: its GRO cannot be switched on: {error}");
        return Ok(());
    }
    if let Err(error) = maps.add_xdp_pod(pair.host.index) {
        warn!("{name} takes no frames from XDP: {error}");
    }
    Ok(())
}

/// Whether a container with such flags can: not one on a netkit, nor one whose queue shapes what it
/// gets.
fn takes_frames(xdp: Xdp, flags: u32, kernel: (u32, u32)) -> bool {
    match xdp {
        Xdp::Off => return false,
        Xdp::Generic => {}
        Xdp::Native if kernel >= VETH_TAKES_FRAMES => {}
        Xdp::Native => {
            warn!(
                "xdp is of no use here: veths take frames from Linux {}.{} on, and this is {}",
                VETH_TAKES_FRAMES.0,
                VETH_TAKES_FRAMES.1,
                feature::release()
            );
            return false;
        }
    }
    flags & (device::NETKIT | device::SHAPED) == 0
}

/// The container against the map.
pub(crate) fn verify_pod(
    maps: &Maps,
    here: &Link,
    xdp: Xdp,
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    let flags = maps.device(here.index)?.map_or(0, |known| known.flags);
    if takes_frames(xdp, flags, feature::version()) && !maps.is_xdp_pod(here.index)? {
        wrong.push(format!(
            "the map XDP_PODS does not have {}: XDP sends it nothing",
            here.name
        ));
    }
    Ok(())
}

/// Puts the program onto the uplinks that have none, as far as their drivers can. It stays there as the
/// programs at tc do: until the node's dataplane is unloaded.
pub(crate) fn apply_uplinks(
    node: &Netlink,
    pins: &Pins,
    uplinks: &[Uplink],
    xdp: Xdp,
) -> Result<(), Error> {
    let mode = match xdp {
        Xdp::Off => return Ok(()),
        Xdp::Native => XdpMode::Native,
        Xdp::Generic => XdpMode::Generic,
    };
    let mut without = Vec::new();
    for uplink in uplinks {
        if uplink.device.flags & device::LAYER3 != 0 || ours(pins, &uplink.xdp)?.is_some() {
            continue;
        }
        match uplink.xdp.first() {
            None => without.push(uplink),
            Some(other) => warn!(
                "{} keeps the XDP program of somebody else, number {}: what it would take is left to tc",
                uplink.name, other.program
            ),
        }
    }
    if without.is_empty() {
        return Ok(());
    }
    let lock = Lock::acquire(pins.root())?;
    object::load_missing(&lock, pins, [map::FROM_WIRE_XDP])?;
    let program = pins.program_fd(map::FROM_WIRE_XDP)?;
    for uplink in without {
        let device = Device {
            index: uplink.index,
            name: uplink.name.clone(),
        };
        match node.attach_xdp(&device, mode, program.as_fd()) {
            Ok(()) => debug!("{} runs {} XDP", uplink.name, mode.name()),
            // Another ADD was faster.
            Err(error) if error.is_busy() => {}
            Err(error) => warn!(
                "{} stays without XDP, what it would take is left to tc: {error}",
                uplink.name
            ),
        }
    }
    Ok(())
}

/// How a device with these programs runs ours, if it does.
pub(crate) fn ours(pins: &Pins, programs: &[Attached]) -> Result<Option<XdpMode>, Error> {
    if programs.is_empty() || !pins.has_program(map::FROM_WIRE_XDP) {
        return Ok(None);
    }
    let ours = pins.program(map::FROM_WIRE_XDP)?.id();
    let found = programs.iter().find(|attached| attached.program == ours);
    Ok(found.map(|attached| attached.mode))
}

/// Takes our program off a device. Returns whether it was there.
pub(crate) fn revert(node: &Netlink, pins: &Pins, link: &Link) -> Result<bool, Error> {
    let Some(mode) = ours(pins, &link.xdp)? else {
        return Ok(false);
    };
    let device = Device {
        index: link.index,
        name: link.name.clone(),
    };
    let program = pins.program_fd(map::FROM_WIRE_XDP)?;
    node.detach_xdp(&device, mode, program.as_fd())?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_veths_of_newer_kernels_take_frames() {
        let (old, new) = ((5, 10), (6, 1));
        assert!(takes_frames(Xdp::Native, device::POD, new));
        assert!(!takes_frames(Xdp::Native, device::POD, old));
        assert!(takes_frames(Xdp::Generic, device::POD, old));
        assert!(!takes_frames(Xdp::Off, device::POD, new));
        for flag in [device::NETKIT, device::SHAPED] {
            assert!(!takes_frames(Xdp::Native, device::POD | flag, new));
        }
    }
}

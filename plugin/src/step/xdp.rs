//! XDP, where the network asks for it: the program on the uplinks whose drivers run it, and containers
//! that take frames from there. All of it is help that nobody depends on: what XDP does not take, or
//! where it can't be had, the programs at tc do as always.

use std::os::fd::AsFd as _;

use tracing::{debug, warn};
use underpass_abi::{endpoint::device, map};
use underpass_dataplane::{Pins, kernel, lock::Lock, object};
use underpass_netlink::{
    Netlink, ethtool,
    link::Device,
    xdp::{Attached, XdpMode},
};

use super::{Attachment, Inspection, Interface, Step};
use crate::{
    conf::Xdp,
    error::Error,
    finding::{Finding, Findings},
    uplink::Uplink,
};

/// Takes what the network asks for, as far as this kernel has it.
pub(crate) fn usable(asked: Xdp) -> Option<XdpMode> {
    let mode = mode(asked)?;
    let (major, minor) = since(mode);
    if kernel::version() >= (major, minor) {
        return Some(mode);
    }
    warn!(
        "xdp {:?} is of no use here, what it would take is left to tc: it needs Linux {major}.{minor}, and this is {}",
        mode.name(),
        kernel::release()
    );
    None
}

const fn mode(asked: Xdp) -> Option<XdpMode> {
    match asked {
        Xdp::Off => None,
        Xdp::Native => Some(XdpMode::Native),
        Xdp::Generic => Some(XdpMode::Generic),
    }
}

/// The first kernel on which containers take frames: by veths that need no XDP program of their own
/// (commit d3256efd8e8b), or by generic XDP with a device map whose entries can have programs (commit
/// 2ea5eabaf04a).
const fn since(mode: XdpMode) -> (u32, u32) {
    match mode {
        XdpMode::Native => (5, 13),
        XdpMode::Generic => (5, 15),
    }
}

/// Has the container take frames. Its end of the pair exists.
pub(crate) struct ContainerFrames;

impl Step<Interface> for ContainerFrames {
    fn name(&self) -> &'static str {
        "container XDP"
    }

    fn apply(&self, attachment: &mut Attachment<'_, Interface>) -> Result<(), Error> {
        let Interface {
            plan,
            container,
            netns,
            xdp,
            ..
        } = &attachment.made;
        if xdp.is_none() || !takes_frames(plan.flags) {
            return Ok(());
        }
        let name = &container.name;
        if let Err(error) = netns.run(|| ethtool::switch_gro_on(name))? {
            warn!("{name} takes no frames from XDP: its GRO cannot be switched on: {error}");
            return Ok(());
        }
        if let Err(error) = attachment.maps.add_xdp_pod(attachment.host.index) {
            warn!("{name} takes no frames from XDP: {error}");
        }
        Ok(())
    }

    /// Looks for the container in the map. That it is not there is no fault: it was attached before its network had XDP, or could not be taken in.
    fn verify(
        &self,
        inspection: &Inspection<'_, Interface>,
        _: &mut Findings,
    ) -> Result<(), Error> {
        let (Some(loaded), Some(_)) = (&inspection.loaded, inspection.found.xdp) else {
            return Ok(());
        };
        let (maps, host) = (&loaded.maps, &inspection.host);
        let flags = maps.device(host.index)?.map_or(0, |known| known.flags);
        if takes_frames(flags) && !maps.is_xdp_pod(host.index)? {
            warn!("{}", Finding::NotInXdp(host.name.clone()));
        }
        Ok(())
    }
}

/// Not a container on a netkit, nor one whose queue shapes what it gets, nor one that may change its
/// MAC: a frame has the one that it began with.
const fn takes_frames(flags: u32) -> bool {
    flags & (device::NETKIT | device::SHAPED | device::CHECK_MAC) == device::CHECK_MAC
}

/// Puts the program onto the uplinks that have none, as far as their drivers can. It stays there as the
/// programs at tc do: until the node's dataplane is unloaded.
pub(crate) struct UplinkProgram;

impl Step<Interface> for UplinkProgram {
    fn name(&self) -> &'static str {
        "uplink XDP"
    }

    fn apply(&self, attachment: &mut Attachment<'_, Interface>) -> Result<(), Error> {
        match attachment.made.xdp {
            Some(mode) => {
                let pins = attachment.maps.pins();
                attach(attachment.node, pins, &attachment.uplinks.list, mode)
            }
            None => Ok(()),
        }
    }

    /// Finds nothing: no container depends on it, and `underpass status` shows where it is.
    fn verify(&self, _: &Inspection<'_, Interface>, _: &mut Findings) -> Result<(), Error> {
        Ok(())
    }
}

fn attach(node: &Netlink, pins: &Pins, uplinks: &[Uplink], mode: XdpMode) -> Result<(), Error> {
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

/// Says how a device with these programs runs ours, if it does.
pub(crate) fn ours(pins: &Pins, programs: &[Attached]) -> Result<Option<XdpMode>, Error> {
    if programs.is_empty() || !pins.has_program(map::FROM_WIRE_XDP) {
        return Ok(None);
    }
    let ours = pins.program(map::FROM_WIRE_XDP)?.id();
    let found = programs.iter().find(|attached| attached.program == ours);
    Ok(found.map(|attached| attached.mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_veths_with_a_fixed_mac_take_frames() {
        let plain = device::POD | device::CHECK_MAC | device::BYPASS;
        assert!(takes_frames(plain));
        assert!(!takes_frames(plain | device::NETKIT));
        assert!(!takes_frames(plain | device::SHAPED));
        assert!(!takes_frames(device::POD | device::BYPASS));
    }

    #[test]
    fn off_is_never_of_use() {
        assert_eq!(usable(Xdp::Off), None);
    }
}

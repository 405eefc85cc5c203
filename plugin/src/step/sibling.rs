//! Which host veths the programs take for those of one container: those with the same number of a network
//! namespace.

use underpass_abi::endpoint::Device;
use underpass_dataplane::Maps;
use underpass_netlink::{Netlink, link::By};

use crate::error::Error;

/// Takes the number `netns` from devices that do not lead to the network namespace that the host veth
/// `host` leads to. A number that is free again is given to the next namespace that is made, while the
/// devices of the one that had it may still be known: their DEL was lost, or somebody moved the
/// container's end elsewhere.
///
/// `known` are the devices and the numbers of their namespaces as they were at a time since the caller holds the namespace: nobody else's can have got
/// its number since then.
pub(super) fn disown(
    maps: &mut Maps,
    node: &Netlink,
    host: u32,
    netns: u32,
    known: &[(u32, u32)],
) -> Result<(), Error> {
    let namesakes: Vec<u32> = known
        .iter()
        .filter(|(index, number)| *index != host && *number == netns)
        .map(|(index, _)| *index)
        .collect();
    if namesakes.is_empty() {
        return Ok(());
    }
    let here = leads_to(node, host)?;
    for index in namesakes {
        let Some(device) = maps.device(index)?.filter(|device| device.netns == netns) else {
            continue;
        };
        if here.is_none() || leads_to(node, index)? != here {
            maps.set_device(index, Device { netns: 0, ..device })?;
        }
    }
    Ok(())
}

/// Where the other end of a pair is, as the kernel numbers it for the node.
fn leads_to(node: &Netlink, index: u32) -> Result<Option<i32>, Error> {
    Ok(node
        .link(By::Index(index))?
        .and_then(|link| link.peer_netns))
}

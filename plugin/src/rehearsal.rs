//! Whether every ADD of a network would be refused on this node, and why: what an ADD asks before it makes anything, asked
//! ahead of it. Whoever asks changes nothing.

use std::{net::IpAddr, path::PathBuf};

use ipnet::IpNet;
use underpass_cni::{Error as CniError, NetConf};
use underpass_netlink::{Netlink, link::Driver};

use crate::{
    conf::{AttachmentConf, Conf, masquerade::KEY},
    error::Error,
    identity::Identity,
    plan::{LeaseResult, Plan},
    step::{lease, link},
    uplink::{
        Uplinks,
        overlap::{Overlap, overlaps},
    },
};

/// Fails as every ADD would, except for want of addresses. IPAM plugins of others are looked for in `folders`, and not called.
pub(crate) fn rehearse(conf: &NetConf, decoded: &Conf, folders: &[PathBuf]) -> Result<(), Error> {
    let driver = link::driver(decoded.device)?;
    let sample = lease::sample(conf, folders)?;
    accept(&conf.name, decoded, driver, sample)
}

/// Fails as every ADD would that is given such addresses.
pub(crate) fn accept(
    network: &str,
    conf: &Conf,
    driver: Driver,
    sample: LeaseResult,
) -> Result<(), Error> {
    let identity = Identity {
        network: network.to_owned(),
        container: "any".to_owned(),
        ifname: "eth0".to_owned(),
    };
    // The MTU of the uplinks is theirs, and no matter of the config.
    let asked = AttachmentConf {
        network: conf.clone(),
        mac: None,
        ports: Vec::new(),
    };
    Plan::new(identity, &asked, sample, driver, None, "")?;
    match conf.masquerade_addresses.as_slice() {
        [] => Ok(()),
        asked => require_local(&Netlink::open()?, asked),
    }
}

/// Finds what the network's ranges cover and the link of one of its uplinks has already.
pub(crate) fn covered(
    conf: &NetConf,
    uplinks: &Uplinks<'_>,
    node: &Netlink,
) -> Result<Vec<Overlap>, Error> {
    let pools = lease::pools(conf)?;
    if pools.is_empty() {
        return Ok(Vec::new());
    }
    let covers = |address| pools.iter().any(|pool| pool.range_of(address).is_some());
    overlaps(node, &uplinks.list, covers)
}

/// Refuses addresses that are the node's own: it would keep what is sent to them. The built-in allocator gives none unless it is asked.
pub(crate) fn require_foreign(node: &Netlink, addresses: &[IpNet]) -> Result<(), Error> {
    for address in addresses.iter().map(IpNet::addr) {
        if node.keeps(address)? {
            return Err(CniError::config(format!(
                "invalid address {address} from the IPAM: the node has it itself, or hears it as one of many (broadcast, anycast), so a container with it would hear nothing; ask for another address, or keep it out of what the IPAM gives"
            ))
            .into());
        }
    }
    Ok(())
}

/// Refuses addresses that the node does not have: answers to them would never arrive.
pub(crate) fn require_local(node: &Netlink, asked: &[IpAddr]) -> Result<(), Error> {
    if asked.is_empty() {
        return Ok(());
    }
    let present = node.addresses()?;
    for address in asked {
        if !present.iter().any(|other| other.net.addr() == *address) {
            return Err(CniError::config(format!(
                "invalid {KEY} {address}: it is no address of this node; give it to a device (`lo` will do), or remove {KEY}"
            ))
            .into());
        }
    }
    Ok(())
}

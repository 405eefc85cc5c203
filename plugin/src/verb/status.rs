//! STATUS: whether an ADD would work (50 if not), and whether the containers that are there suffer
//! (51). Polled every few seconds: reads a little, changes nothing.

use std::path::Path;

use underpass_cni::{Error as CniError, NetworkRequest};

use super::del;
use crate::{
    conf::Conf,
    datapath::{Pins, attach},
    error::Error,
    netlink::{Netlink, link::By},
    step::{lease, link, program},
};

/// Says whether the network is able to serve.
pub(crate) fn status(request: &NetworkRequest) -> Result<(), CniError> {
    let conf = Conf::of_network(&request.conf)?;
    link::driver(conf.device).map_err(|error| CniError::not_available(error.to_string()))?;
    ready(&conf.bpf_root)?;
    Ok(lease::status(request)?)
}

/// As [`status`], apart from addresses.
pub(super) fn ready(bpf_root: &Path) -> Result<(), CniError> {
    let pins = Pins::at(bpf_root);
    pins.require_bpffs()
        .map_err(|error| CniError::not_available(error.to_string()))?;
    let wrong = existing(&pins).map_err(|error| CniError::not_available(error.to_string()))?;
    if !wrong.is_empty() {
        return Err(CniError::limited_connectivity(wrong.join("; ")));
    }
    Ok(())
}

/// What is wrong with the programs of existing containers.
fn existing(pins: &Pins) -> Result<Vec<String>, Error> {
    // Nothing loaded is how every boot begins: the first ADD does it.
    let Some(maps) = del::open(pins)? else {
        return Ok(Vec::new());
    };
    if !maps.has_attachments()? {
        return Ok(Vec::new());
    }
    let node = Netlink::open()?;
    // Uplinks that are new or have changed are the next ADD's business: a network that is not ready
    // for them would never see that ADD.
    let devices: Vec<_> = maps
        .devices()?
        .into_iter()
        .map(|(index, entry)| (index, attach::places(entry.flags)))
        .collect();
    let mut wrong = Vec::new();
    for (index, place) in attach::missing(&node, pins, &devices)? {
        // A device that is gone took its filters along.
        if let Some(link) = node.link(By::Index(index))? {
            wrong.push(program::not_attached(place, &link.name));
        }
    }
    Ok(wrong)
}

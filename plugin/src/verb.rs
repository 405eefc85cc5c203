//! The verbs of the contract, one file each.

use underpass_abi::endpoint::Owner;
use underpass_cni::{CniResult, Error as CniError, NetworkRequest, Plugin, Request};
use underpass_dataplane::Maps;

use crate::{error::Error, identity::Identity};

pub use chained::Portmap;

mod add;
mod chained;
mod check;
mod del;
mod gc;
mod status;

/// The plugin, as the runtime calls it.
#[derive(Clone, Copy, Debug)]
pub struct Underpass;

impl Plugin for Underpass {
    fn add(&self, request: &Request) -> Result<CniResult, CniError> {
        Ok(add::add(request)?)
    }

    fn del(&self, request: &Request) -> Result<(), CniError> {
        Ok(del::del(request)?)
    }

    fn check(&self, request: &Request) -> Result<(), CniError> {
        Ok(check::check(request)?)
    }

    fn gc(&self, request: &NetworkRequest) -> Result<(), CniError> {
        Ok(gc::gc(request)?)
    }

    fn status(&self, request: &NetworkRequest) -> Result<(), CniError> {
        status::status(request)
    }
}

fn identity(request: &Request) -> Identity {
    Identity {
        network: request.conf.name.clone(),
        container: request.attachment.container_id.clone(),
        ifname: request.attachment.ifname.clone(),
    }
}

/// Refuses an attachment that the maps know already.
fn require_detached(maps: &Maps, owner: Owner, identity: &Identity) -> Result<(), Error> {
    match maps.attachment(owner)? {
        Some(_) => Err(Error::Attached {
            network: identity.network.clone(),
            container: identity.container.clone(),
            ifname: identity.ifname.clone(),
        }),
        None => Ok(()),
    }
}

//! The verbs of the contract, one file each.

use std::collections::BTreeSet;

use underpass_abi::endpoint::Owner;
use underpass_cni::{
    CniResult, Error as CniError, Interface, NetConf, NetworkRequest, Plugin, Request,
};
use underpass_dataplane::{Error as DataplaneError, Maps, Pins, object};
use underpass_netlink::Netlink;

use crate::{conf::Conf, error::Error, identity::Identity, reap::reap, step::endpoint};

pub use bandwidth::Bandwidth;
pub use chained::Portmap;
pub use loopback::Loopback;

mod add;
mod bandwidth;
mod chained;
mod check;
mod del;
mod gc;
mod loopback;
pub(crate) mod status;

/// The plugin, as the runtime calls it.
#[derive(Clone, Copy, Debug)]
pub struct Underpass;

impl Plugin for Underpass {
    fn add(&self, request: &Request) -> Result<CniResult, CniError> {
        Ok(add::add(request)?)
    }

    fn undo(&self, request: &Request, _: &CniResult) -> Result<(), CniError> {
        // In a chain the interface is that of the plugin before, which may be ours under the same name.
        match behind(request)? {
            Some(_) => Ok(chained::del(request)?),
            None => self.del(request),
        }
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

/// What the plugins before have made, if the interface is there already. Others may stand before it in the list, as `loopback` does in
/// Nomad's. Who names no interface at all has made this one, unless this entry of the list has addresses given to it.
fn behind(request: &Request) -> Result<Option<CniResult>, CniError> {
    let ifname = &request.attachment.ifname;
    let is_it = |interface: &Interface| interface.name == *ifname && !interface.sandbox.is_empty();
    let previous = request.conf.prev_result()?;
    let is_later = request.conf.ipam_type()?.is_none();
    Ok(previous.filter(|previous| {
        let interfaces = &previous.interfaces;
        interfaces.is_empty() && is_later || interfaces.iter().any(is_it)
    }))
}

/// Tells whether the config is that of a later entry of the list than the one that has made the interface: it gives no addresses, and
/// the interface has some.
fn is_later(request: &Request, maps: &Maps) -> Result<bool, Error> {
    if request.conf.ipam_type()?.is_some() {
        return Ok(false);
    }
    let known = maps.attachment(identity(request).owner())?;
    Ok(known.is_some_and(|known| endpoint::addresses(&known).next().is_some()))
}

fn identity(request: &Request) -> Identity {
    Identity {
        network: request.conf.name.clone(),
        container: request.attachment.container_id.clone(),
        ifname: request.attachment.ifname.clone(),
    }
}

/// An ADD in a chain that has no result of a plugin before it, in the words of the reference plugins.
fn not_chained() -> CniError {
    CniError::config("must be called as chained plugin").with_details(
        "put it behind the plugin that makes the interface: prevResult is that one's result",
    )
}

/// A CHECK without the result of the ADD, in the words of the reference plugins; `msg` has them.
fn no_result(msg: &str) -> CniError {
    CniError::config(msg).with_details("the runtime has to hand the result of the ADD to CHECK")
}

/// Refuses an attachment that the maps know already.
fn require_detached(maps: &Maps, owner: Owner, identity: &Identity) -> Result<(), Error> {
    match maps.attachment(owner)? {
        Some(_) => Err(Error::attached(identity)),
        None => Ok(()),
    }
}

/// Opens the maps that a DEL has to clean. If there are none, what a killed load has left goes at once. Those of another network namespace matter only if they know what
/// is to be detached: an ADD here was refused.
fn maps_to_clean(conf: &NetConf, owners: &[Owner]) -> Result<Option<Maps>, Error> {
    let pins = Pins::at(&Conf::bpf_root(conf)?);
    let error = match Maps::open_existing(&pins) {
        Err(error @ DataplaneError::Elsewhere { .. }) => error,
        Ok(None) => {
            object::sweep(pins.root())?;
            return Ok(None);
        }
        opened => return Ok(opened?),
    };
    let maps = Maps::open(&pins)?;
    for owner in owners {
        if maps.attachment(*owner)?.is_some() {
            return Err(error.into());
        }
    }
    Ok(None)
}

/// Takes away what lost DELs have left, of all networks. An ADD works all the same if that fails.
fn reap_or_warn(node: &Netlink, maps: &mut Maps, devices: &BTreeSet<u32>, conf: &NetConf) {
    let reaped =
        reap(node, maps, devices, &[conf]).and_then(|reaped| Error::collect(reaped.errors));
    if let Err(error) = reaped {
        tracing::warn!("cannot take away all that lost DELs have left: {error}");
    }
}

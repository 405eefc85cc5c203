//! Addresses: from the allocator in this process, or from another IPAM plugin by the contract's
//! delegation.

use std::{
    collections::HashSet,
    net::IpAddr,
    path::{Path, PathBuf},
};

use underpass_cni::{Code, Error as CniError, NetConf, NetworkRequest, Request, delegate};
use underpass_ipam::{Claim, Freed, Home, Sample, Unusable, Usage, pool::Pool, store::Store};
use underpass_netlink::{Netlink, route::Led};

use super::Undo;
use crate::{
    error::Error,
    finding::{Finding, Findings},
    name::Name,
    plan::LeaseResult,
};

/// The name of the lease, in the log and among the times of the last ADD.
pub(crate) const NAME: &str = "lease";

/// Types that the built-in allocator answers to.
const BUILT_IN: [&str; 2] = ["host-local", "underpass-ipam"];

/// The one plugin that cannot work before the interface exists.
const DHCP: &str = "dhcp";

/// Who gives addresses to a network.
enum Ipam {
    /// Nobody: an interface without addresses.
    None,
    /// This process.
    BuiltIn,
    /// The plugin of that name.
    Delegate(String),
    /// One that no container was ever attached with, so there is nothing to give back: why no ADD takes it.
    Refused(Box<CniError>),
}

fn ipam(conf: &NetConf) -> Result<Ipam, Error> {
    Ok(match conf.ipam_type()? {
        None => Ipam::None,
        Some(name) if BUILT_IN.contains(&name.as_str()) => Ipam::BuiltIn,
        Some(name) if name == DHCP => Ipam::Refused(Box::new(no_dhcp())),
        Some(name) => match Name::of(&name) {
            Ok(ours) if !ours.gives_addresses() => Ipam::Refused(Box::new(no_ipam(&name))),
            _ => Ipam::Delegate(name),
        },
    })
}

/// It asks on the interface, which does not exist yet, in a broadcast domain, which a routed interface
/// never has.
fn no_dhcp() -> CniError {
    CniError::unsupported("ipam.type", DHCP).with_details(
        "a routed interface has no broadcast domain in which a DHCP server could be found: \
         use host-local, or static with runtimeConfig.ips",
    )
}

/// By mistake this executable, as the interface or chained plugin of that name: each call would start the next, for ever.
fn no_ipam(name: &str) -> CniError {
    CniError::config(format!(
        "invalid ipam.type {name:?}: that plugin gives no addresses; use host-local, or another IPAM plugin"
    ))
}

/// What was taken.
#[derive(Default)]
pub(crate) struct Taken {
    pub(crate) result: LeaseResult,
    /// For a look whether it is still leased, where this process gives the addresses.
    pub(crate) claim: Option<Claim>,
}

/// Takes addresses, of those that are the node's own or that it has a route for none unless it is asked for or another plugin
/// gives it. They are given back if the ADD fails, unless the container `is_attached` by then: a DEL has come, and after it another ADD, whose
/// they are.
pub(crate) fn take<'a>(
    request: &'a Request,
    node: &Netlink,
    is_attached: impl Fn() -> bool + 'a,
    undo: &mut Undo<'a>,
) -> Result<Taken, Error> {
    Ok(match ipam(&request.conf)? {
        Ipam::None => Taken::default(),
        Ipam::BuiltIn => {
            // Without it the lease would be taken for another plugin's, which nobody but a DEL or GC frees.
            let home = Home::current().ok();
            // What can't be seen is refused by who sees it later, if at all; and a range of the loopback for what it is.
            let unusable = |address: IpAddr| {
                let is_asked = !address.is_loopback();
                let led = is_asked.then(|| node.led(address).unwrap_or_default());
                led.flatten().map(|led| match led {
                    Led::Alone => Unusable::Alone,
                    Led::WithRange => Unusable::WithRange,
                })
            };
            let allocation = underpass_ipam::add(request, home, unusable)?;
            let claim = Some(allocation.lease.claim());
            undo.push(NAME, move || {
                if !is_attached() {
                    allocation.lease.release()?;
                }
                Ok(())
            });
            Taken {
                result: LeaseResult {
                    ips: allocation.ips,
                    routes: allocation.routes,
                    dns: allocation.dns,
                    subnets: allocation.subnets,
                },
                claim,
            }
        }
        Ipam::Refused(why) => return Err((*why).into()),
        Ipam::Delegate(name) => {
            let result = request.delegation.add(&name)?;
            let plugin = name.clone();
            undo.push(NAME, move || {
                if !is_attached() {
                    request.delegation.del(&plugin)?;
                }
                Ok(())
            });
            if result.ips.is_empty() {
                return Err(Error::NoAddress(name));
            }
            Taken {
                result: LeaseResult {
                    ips: result.ips,
                    routes: result.routes,
                    dns: result.dns,
                    subnets: Vec::new(),
                },
                claim: None,
            }
        }
    })
}

/// Says whether the addresses are still leased to the container, or why that can't be told.
pub(crate) fn verify(request: &Request, findings: &mut Findings) -> Result<(), Error> {
    match ipam(&request.conf)? {
        Ipam::None => Ok(()),
        Ipam::BuiltIn => match underpass_ipam::check(request) {
            // There is no such lease.
            Err(error) if error.code == Code::Internal => {
                findings.push(Finding::Lease(Box::new(error.into())));
                Ok(())
            }
            answer => Ok(answer?),
        },
        Ipam::Refused(why) => Err((*why).into()),
        Ipam::Delegate(name) => Ok(request.delegation.check(&name)?),
    }
}

/// Gives the addresses back, if `is_due` says that the lease is still the one that has to go: as late as it can be asked.
pub(crate) fn give_back(request: &Request, is_due: impl FnOnce() -> bool) -> Result<(), Error> {
    let answer = match ipam(&request.conf)? {
        Ipam::BuiltIn => underpass_ipam::del_if(request, is_due),
        Ipam::Delegate(name) if is_due() => request.delegation.del(&name),
        Ipam::None | Ipam::Refused(_) | Ipam::Delegate(_) => return Ok(()),
    };
    Ok(answer?)
}

/// Gives back all addresses of the network whose containers are gone.
pub(crate) fn collect(request: &NetworkRequest) -> Result<(), Error> {
    let answer = match ipam(&request.conf)? {
        Ipam::None | Ipam::Refused(_) => return Ok(()),
        Ipam::BuiltIn => underpass_ipam::gc(request),
        Ipam::Delegate(name) => request.delegation.gc(&name),
    };
    Ok(answer?)
}

/// Says whether this process gives the network's addresses.
pub(crate) fn is_built_in(conf: &NetConf) -> Result<bool, Error> {
    Ok(matches!(ipam(conf)?, Ipam::BuiltIn))
}

/// Finds the network's dataDir, where this process gives its addresses.
pub(crate) fn data_dir(conf: &NetConf) -> Result<Option<PathBuf>, Error> {
    match ipam(conf)? {
        Ipam::BuiltIn => Ok(Some(underpass_ipam::data_dir(conf)?)),
        Ipam::None | Ipam::Refused(_) | Ipam::Delegate(_) => Ok(None),
    }
}

/// Lists the networks whose leases are in a dataDir.
pub(crate) fn networks(data_dir: &Path) -> Result<Vec<String>, Error> {
    Ok(Store::networks(data_dir).map_err(CniError::from)?)
}

/// Gives back addresses, where this process gives them, of the networks that `is_of` names: of the attachments
/// (network, container, interface) that `is_dead` names. Returns what was freed.
pub(crate) fn free_dead(
    conf: &NetConf,
    is_of: impl Fn(&str) -> bool,
    is_dead: impl Fn(&str, &str, &str) -> bool,
) -> Result<Vec<Freed>, Error> {
    match ipam(conf)? {
        Ipam::BuiltIn => Ok(underpass_ipam::free_dead(conf, is_of, is_dead)?),
        Ipam::None | Ipam::Refused(_) | Ipam::Delegate(_) => Ok(Vec::new()),
    }
}

/// Lists the pools, where this process gives the addresses.
pub(crate) fn pools(conf: &NetConf) -> Result<Vec<Pool>, Error> {
    match ipam(conf)? {
        Ipam::BuiltIn => Ok(underpass_ipam::known_pools(conf)?),
        Ipam::None | Ipam::Refused(_) | Ipam::Delegate(_) => Ok(Vec::new()),
    }
}

/// Says how full the pools are, where this process gives the addresses.
pub(crate) fn usage(conf: &NetConf) -> Result<Vec<Usage>, Error> {
    match ipam(conf)? {
        Ipam::BuiltIn => Ok(underpass_ipam::usage(conf)?),
        Ipam::None | Ipam::Refused(_) | Ipam::Delegate(_) => Ok(Vec::new()),
    }
}

/// Says whether there are addresses to give, and what an ADD would be given, as far as this process knows. Where it gives
/// them and a pool seems to be full, `dead` lists those that the next ADD would free.
pub(crate) fn status(
    request: &NetworkRequest,
    dead: impl FnOnce(&Store) -> HashSet<IpAddr>,
) -> Result<LeaseResult, Error> {
    match ipam(&request.conf)? {
        Ipam::None => Ok(LeaseResult::default()),
        Ipam::BuiltIn => Ok(underpass_ipam::status_without(request, dead)?.into()),
        Ipam::Refused(why) => Err((*why).into()),
        Ipam::Delegate(name) => {
            request.delegation.status(&name)?;
            Ok(LeaseResult::default())
        }
    }
}

/// Does without a runtime what [`status`] does, except for the question whether addresses are free. A plugin of others is
/// looked for in `folders`, and not called.
pub(crate) fn sample(conf: &NetConf, folders: &[PathBuf]) -> Result<LeaseResult, Error> {
    match ipam(conf)? {
        Ipam::None => Ok(LeaseResult::default()),
        Ipam::BuiltIn => Ok(underpass_ipam::sample(conf)?.into()),
        Ipam::Refused(why) => Err((*why).into()),
        Ipam::Delegate(name) => {
            delegate::find(&name, folders)?;
            Ok(LeaseResult::default())
        }
    }
}

impl From<Sample> for LeaseResult {
    fn from(sample: Sample) -> Self {
        let Sample { ips, routes, dns } = sample;
        Self {
            ips,
            routes,
            dns,
            subnets: Vec::new(),
        }
    }
}

//! ADD: one address from each pool, or nothing.

use std::collections::HashSet;
use std::mem;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use thiserror::Error;
use underpass_cni::{CniResult, Code, Dns, Error as CniError, IpConfig, Request, Route};

use crate::config;
use crate::exhausted::Exhausted;
use crate::home::Home;
use crate::owner::Owner;
use crate::pool::{Candidate, Pool};
use crate::range::Range;
use crate::shorten;
use crate::store::{Holder, Locked, Store, StoreError, both};

/// So many addresses are tried one by one; then the directory is listed, which tells of all at
/// once.
const PROBES: usize = 32;

/// The code for an attachment that is there already, as the interface plugin has it.
const CODE_TAKEN: u32 = 101;

/// What an attachment was given.
#[derive(Debug)]
pub struct Allocation {
    /// The addresses, in the order of the pools.
    pub ips: Vec<IpConfig>,
    /// Routes, as configured.
    pub routes: Vec<Route>,
    /// Resolver settings, from `resolvConf`.
    pub dns: Dns,
    /// All subnets that the network's containers can have addresses of.
    pub subnets: Vec<IpNet>,
    /// For giving the addresses back, should the attachment fail.
    pub lease: Lease,
}

/// The addresses that one ADD took. Dropping it keeps them.
#[derive(Debug)]
#[must_use = "a failed attachment has to release its lease"]
pub struct Lease {
    store: Store,
    owner: Owner,
    taken: Vec<IpAddr>,
}

/// What an ADD took, as a question: is it still leased to the container?
#[derive(Clone, Debug)]
pub struct Claim {
    store: Store,
    owner: Owner,
}

impl Claim {
    /// Tells whether `ip` is leased to the container, by the lease itself. Waits for no lock.
    pub fn holds(&self, ip: IpAddr) -> Result<bool, CniError> {
        Ok(self.store.owner(ip)?.as_ref() == Some(&self.owner))
    }
}

impl Lease {
    /// Says whose it is, for a look later on.
    #[must_use]
    pub fn claim(&self) -> Claim {
        Claim {
            store: self.store.clone(),
            owner: self.owner.clone(),
        }
    }

    /// Frees what this ADD took, and nothing that the container held before.
    pub fn release(self) -> Result<(), CniError> {
        if let Some(mut locked) = self.store.lock_existing()? {
            release(&mut locked, &self.taken, &self.owner)?;
        }
        Ok(())
    }
}

/// Why an address could not be had. The words are those of the reference plugin, and what to do
/// comes after them.
#[derive(Debug, Error)]
enum AllocationError {
    #[error("failed to allocate for range {pool}: {source}")]
    Pool { pool: usize, source: PoolFailure },
    #[error("failed to allocate all requested IPs: {}", shorten::part(spaced(.0)))]
    LeftOver(Vec<IpAddr>),
    #[error(transparent)]
    Store(#[from] StoreError),
}

#[derive(Debug, Error)]
enum PoolFailure {
    #[error("requested ip {0} is subnet's gateway")]
    Gateway(IpAddr),
    #[error(
        "requested IP address {ip} is not available in range set {}",
        shorten::part(pool)
    )]
    Unavailable {
        ip: IpAddr,
        pool: Pool,
        /// Where its lease is.
        folder: PathBuf,
        /// Whose it is, as far as that is known.
        holder: String,
    },
    #[error(
        "{ip} has been allocated to {}, duplicate allocation is not allowed: \
         the lease is in {}; DEL this attachment first, or wait for another ADD of it that is under way",
        shorten::part(container),
        shorten::path(folder)
    )]
    Duplicate {
        ip: IpAddr,
        container: String,
        folder: PathBuf,
    },
    #[error(transparent)]
    Exhausted(Exhausted),
    #[error(
        "{MANY} of the next free addresses of range set {}, up to {last}, are in ranges that are the node's own",
        shorten::part(pool)
    )]
    Kept { pool: Pool, last: IpAddr },
    #[error(
        "the next free addresses of range set {}, up to {last}, are the node's own or lead to others, \
         and there are too many for one call",
        shorten::part(pool)
    )]
    Late { pool: Pool, last: IpAddr },
}

fn spaced(ips: &[IpAddr]) -> String {
    ips.iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(" ")
}

impl AllocationError {
    /// Says what to do, where the known words do not.
    fn remedy(&self) -> String {
        match self {
            Self::Pool {
                source: PoolFailure::Gateway(_),
                ..
            } => "ask for another address, or give the range another \"gateway\"".to_owned(),
            Self::Pool {
                source: PoolFailure::Unavailable { folder, holder, .. },
                ..
            } => format!(
                "it is leased in {} to {holder}: ask for another address, or DEL that container first",
                shorten::path(folder)
            ),
            Self::LeftOver(_) => {
                "each must lie between the bounds of a range, and a range set gives one address only: \
                 correct IP of CNI_ARGS, args.cni.ips or runtimeConfig.ips, or the ranges"
                    .to_owned()
            }
            Self::Pool {
                source: PoolFailure::Kept { last, .. },
                ..
            } => format!(
                "see `ip route get {last}`: give the network another range, or take away the route that leads its addresses elsewhere"
            ),
            Self::Pool {
                source: PoolFailure::Late { last, .. },
                ..
            } => format!(
                "repeat the call, which goes on behind {last}; see `ip route get {last}`: give the network another range, \
                 or take away the routes that lead its addresses elsewhere"
            ),
            Self::Pool { .. } | Self::Store(_) => String::new(),
        }
    }
}

impl From<AllocationError> for CniError {
    fn from(error: AllocationError) -> Self {
        let code = match &error {
            AllocationError::Store(_) => Code::Io,
            // An address may become free.
            AllocationError::Pool {
                source:
                    PoolFailure::Exhausted(_)
                    | PoolFailure::Unavailable { .. }
                    | PoolFailure::Late { .. },
                ..
            } => Code::TryAgainLater,
            AllocationError::Pool {
                source: PoolFailure::Duplicate { .. },
                ..
            } => Code::Other(CODE_TAKEN),
            AllocationError::Pool {
                source: PoolFailure::Gateway(_) | PoolFailure::Kept { .. },
                ..
            }
            | AllocationError::LeftOver(_) => Code::InvalidConfig,
        };
        Self::new(code, error.to_string()).with_details(error.remedy())
    }
}

/// Why no container can have an address, although nobody has leased it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unusable {
    /// The node has it, or a route of somebody else for it alone.
    Alone,
    /// The node has it together with a range around it.
    WithRange,
}

/// Leases one address from each pool, all under one lock. On failure nothing is leased that was not
/// before. An interface plugin says where its container's device will be, and which addresses are of
/// no use to it: those are passed over, unless they are asked for.
pub fn add(
    request: &Request,
    home: Option<Home>,
    unusable: impl Fn(IpAddr) -> Option<Unusable>,
) -> Result<Allocation, CniError> {
    let pools = config::pools(&request.conf)?;
    let requested = config::requested(&request.conf, &request.attachment)?;
    let (routes, dns) = config::routes_and_dns(&request.conf)?;
    let store = Store::new(&config::data_dir(&request.conf)?, &request.conf.name);
    let owner = Owner::from(&request.attachment);

    let mut locked = store.lock()?;
    let mut taken = Vec::with_capacity(pools.len());
    let wish = Wish {
        requested,
        holder: Holder {
            owner: &owner,
            home,
        },
        unusable: &unusable,
        patience: PATIENCE,
    };
    match allocate(&mut locked, &pools, wish, &mut taken) {
        Ok(ips) => {
            drop(locked);
            Ok(Allocation {
                ips,
                routes,
                dns,
                subnets: pools.iter().flat_map(Pool::subnets).collect(),
                lease: Lease {
                    store,
                    owner,
                    taken,
                },
            })
        }
        Err(error) => {
            // The first failure is the one to report.
            let _ = release(&mut locked, &taken, &owner);
            Err(error.into())
        }
    }
}

/// What an ADD wants.
struct Wish<'a> {
    /// Addresses that are asked for, each of another pool.
    requested: Vec<IpAddr>,
    holder: Holder<'a>,
    /// Why no container could have an address, if so.
    unusable: &'a dyn Fn(IpAddr) -> Option<Unusable>,
    /// How long addresses that are of no use are passed over.
    patience: Duration,
}

fn allocate(
    locked: &mut Locked,
    pools: &[Pool],
    mut wish: Wish<'_>,
    taken: &mut Vec<IpAddr>,
) -> Result<Vec<IpConfig>, AllocationError> {
    let mut requested = mem::take(&mut wish.requested);
    let mut ips = Vec::with_capacity(pools.len());
    let holder = wish.holder;
    let owner = holder.owner;
    let held: Vec<IpAddr> = locked.owned(owner)?.into_iter().map(|(ip, _)| ip).collect();
    for (index, pool) in pools.iter().enumerate() {
        let failed = |source| AllocationError::Pool {
            pool: index,
            source,
        };
        let wanted = requested
            .iter()
            .position(|ip| pool.range_of(*ip).is_some())
            .map(|at| requested.remove(at));
        let (ip, range) = if let Some(ip) = wanted {
            take_requested(locked, pool, ip, holder)?.map_err(failed)?
        } else {
            if let Some(held) = held.iter().find(|ip| pool.range_of(**ip).is_some()) {
                return Err(failed(PoolFailure::Duplicate {
                    ip: *held,
                    container: owner.container_id.clone(),
                    folder: locked.store().dir().to_owned(),
                }));
            }
            let candidates = pool.candidates(locked.last_reserved(index));
            match take_next(locked, candidates, &wish)? {
                Next::Is(ip, range) => (ip, range),
                // Nobody looks at these again before all others: what is behind them may be of use.
                Next::Kept(last) => {
                    locked.set_last_reserved(index, last)?;
                    let pool = pool.clone();
                    return Err(failed(PoolFailure::Kept { pool, last }));
                }
                Next::Late(last) => {
                    locked.set_last_reserved(index, last)?;
                    let pool = pool.clone();
                    return Err(failed(PoolFailure::Late { pool, last }));
                }
                Next::None { unusable } => {
                    let exhausted = Exhausted::of(locked.store(), pool).but_for(unusable);
                    return Err(failed(PoolFailure::Exhausted(exhausted)));
                }
            }
        };
        taken.push(ip);
        locked.set_last_reserved(index, ip)?;
        ips.push(IpConfig {
            interface: None,
            address: range.address(ip),
            gateway: Some(range.gateway()),
        });
    }
    if requested.is_empty() {
        Ok(ips)
    } else {
        Err(AllocationError::LeftOver(requested))
    }
}

/// The address that was asked for, or why not.
fn take_requested<'a>(
    locked: &mut Locked,
    pool: &'a Pool,
    ip: IpAddr,
    holder: Holder<'_>,
) -> Result<Result<(IpAddr, &'a Range), PoolFailure>, StoreError> {
    Ok(match pool.range_of(ip) {
        Some(range) if range.gateway() == ip => Err(PoolFailure::Gateway(ip)),
        Some(range) if locked.reserve_for(ip, holder)? => Ok((ip, range)),
        _ => Err(PoolFailure::Unavailable {
            ip,
            pool: pool.clone(),
            folder: locked.store().dir().to_owned(),
            holder: match locked.store().owner(ip) {
                Ok(Some(owner)) => shorten::part(owner),
                Ok(None) => "somebody whom its file there names".to_owned(),
                Err(_) => "somebody unknown, as its file there cannot be read".to_owned(),
            },
        }),
    })
}

/// Where the node has so many addresses of a range as a part of its own ones, it has all: nobody looks at the rest, of which IPv6
/// has too many. Those that lead elsewhere one by one are no more than the node has routes.
const MANY: usize = 256;

/// So long one call passes over addresses that lead elsewhere: all others of the network wait for the lock.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the candidates came to.
enum Next<'a> {
    Is(IpAddr, &'a Range),
    /// Many were free, and the node's own with a range around them; the last of them.
    Kept(IpAddr),
    /// It took long; the last that was free, and of no use.
    Late(IpAddr),
    /// All are looked at; the last that was free, and of no use.
    None {
        unusable: Option<IpAddr>,
    },
}

/// The first of the candidates that is free and of use. Of one that is leased nobody asks whether it is.
fn take_next<'a>(
    locked: &mut Locked,
    candidates: impl Iterator<Item = Candidate<'a>>,
    wish: &Wish<'_>,
) -> Result<Next<'a>, StoreError> {
    let begin = Instant::now();
    let mut kept = 0;
    let mut last = None;
    let mut listed: Option<HashSet<IpAddr>> = None;
    for (attempt, Candidate { ip, range }) in candidates.enumerate() {
        if attempt == PROBES {
            listed = Some(locked.taken()?);
        }
        let is_leased = match &listed {
            Some(listed) => listed.contains(&ip),
            None => locked.store().is_leased(ip),
        };
        if is_leased {
            continue;
        }
        let Some(why) = (wish.unusable)(ip) else {
            if locked.reserve_for(ip, wish.holder)? {
                return Ok(Next::Is(ip, range));
            }
            continue;
        };
        last = Some(ip);
        kept += usize::from(why == Unusable::WithRange);
        if kept == MANY {
            return Ok(Next::Kept(ip));
        }
        if begin.elapsed() > wish.patience {
            return Ok(Next::Late(ip));
        }
    }
    Ok(Next::None { unusable: last })
}

/// Frees what an ADD took that gave `result`, and nothing that the container held before.
pub(crate) fn undo(request: &Request, result: &CniResult) -> Result<(), CniError> {
    let store = Store::new(&config::data_dir(&request.conf)?, &request.conf.name);
    let lease = Lease {
        store,
        owner: Owner::from(&request.attachment),
        taken: result.ips.iter().map(|ip| ip.address.addr()).collect(),
    };
    lease.release()
}

/// Frees `taken`, all that can be, and names what stays.
fn release(locked: &mut Locked, taken: &[IpAddr], owner: &Owner) -> Result<(), StoreError> {
    let mut outcome = Ok(());
    for ip in taken {
        outcome = both(outcome, locked.release(*ip, owner).map(drop));
    }
    outcome
}

#[cfg(test)]
mod tests;

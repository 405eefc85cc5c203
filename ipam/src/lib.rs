//! Addresses: a pure allocator, and a directory as its database.
//!
//! The directory is the one of the reference plugin `host-local`, byte by byte, and is guarded by
//! the same lock: both may work on it in turns or at the same time.
//!
//! - [`range`](mod@range) and [`pool`]: which addresses exist and in which order they are tried; no
//!   IO.
//! - [`store`]: leases as files, and an index beside them that keeps every call short.
//! - [`add()`], [`del()`], [`check()`], [`gc()`], [`status()`]: the verbs.
#![forbid(unsafe_code)]

mod add;
mod check;
mod config;
mod dead;
mod del;
mod exhausted;
mod gc;
mod home;
mod orphan;
mod owner;
pub mod pool;
pub mod range;
mod resolv;
mod sample;
mod shorten;
mod status;
pub mod store;
mod usage;

use underpass_cni::{CniResult, Error, NetworkRequest, Plugin, Request};

pub use add::{Allocation, Claim, Lease, Unusable, add};
pub use check::check;
pub use config::{data_dir, known_pools};
pub use dead::{Freed, free_dead};
pub use del::{del, del_if};
pub use gc::gc;
pub use home::Home;
pub use orphan::{Orphan, find_orphans, free_orphans};
pub use owner::Owner;
pub use sample::{Sample, sample};
pub use status::{status, status_without};
pub use usage::{Usage, usage};

/// The allocator as an IPAM plugin of its own.
#[derive(Clone, Copy, Debug)]
pub struct HostLocal;

impl Plugin for HostLocal {
    fn add(&self, request: &Request) -> Result<CniResult, Error> {
        let Allocation {
            ips, routes, dns, ..
        } = add(request, None, |_| None)?;
        Ok(CniResult {
            interfaces: Vec::new(),
            ips,
            routes,
            dns,
        })
    }

    fn undo(&self, request: &Request, result: &CniResult) -> Result<(), Error> {
        add::undo(request, result)
    }

    fn del(&self, request: &Request) -> Result<(), Error> {
        del(request)
    }

    fn check(&self, request: &Request) -> Result<(), Error> {
        check(request)
    }

    fn gc(&self, request: &NetworkRequest) -> Result<(), Error> {
        gc(request)
    }

    fn status(&self, request: &NetworkRequest) -> Result<(), Error> {
        status(request)
    }
}

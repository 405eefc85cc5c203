//! CHECK: the attachment holds what `prevResult` says.

use std::net::IpAddr;

use underpass_cni::{Error, Request};

use crate::config;
use crate::owner::Owner;
use crate::store::Store;

/// Verifies that each address of `prevResult` that lies in our pools is leased to this attachment,
/// and that it holds at least one. Addresses of other plugins in the chain are none of our
/// business.
pub fn check(request: &Request) -> Result<(), Error> {
    let conf = &request.conf;
    let pools = config::pools(conf)?;
    let owner = Owner::from(&request.attachment);
    let store = Store::new(&config::data_dir(conf)?, &conf.name);
    let held: Vec<IpAddr> = match store.lock_existing()? {
        None => Vec::new(),
        Some(mut locked) => locked
            .owned(&owner)?
            .into_iter()
            .map(|(ip, _)| ip)
            .collect(),
    };
    let failed = || {
        Error::internal(format!(
            "host-local: Failed to find address added by container {}",
            owner.container_id
        ))
    };
    let previous = conf.prev_result()?.unwrap_or_default();
    let ours = previous.ips.iter().map(|ip| ip.address.addr());
    for ip in ours.filter(|ip| pools.iter().any(|pool| pool.range_of(*ip).is_some())) {
        if !held.contains(&ip) {
            return Err(failed().with_details(format!(
                "{ip} has no lease of this container in {}",
                store.dir().display()
            )));
        }
    }
    if held.is_empty() {
        Err(failed())
    } else {
        Ok(())
    }
}

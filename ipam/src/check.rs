//! CHECK: the attachment holds what `prevResult` says.

use underpass_cni::{Error, Request};

use crate::config;
use crate::owner::Owner;
use crate::shorten;
use crate::store::Store;

/// Verifies that each address of `prevResult` that lies in our pools is leased to this attachment,
/// and that it holds at least one. Addresses of other plugins in the chain are none of our
/// business. Waits for no lock and writes nothing: the disk may be read-only.
pub fn check(request: &Request) -> Result<(), Error> {
    let conf = &request.conf;
    let pools = config::pools(conf)?;
    let owner = Owner::from(&request.attachment);
    let store = Store::new(&config::data_dir(conf)?, &conf.name);
    let failed = || {
        Error::internal(format!(
            "host-local: Failed to find address added by container {}",
            shorten::part(&owner.container_id)
        ))
    };
    let is_its = |found: Option<Owner>| found.is_some_and(|found| found.covers(&owner));
    let previous = conf.prev_result()?.unwrap_or_default();
    let mut verified = 0;
    let ours = previous.ips.iter().map(|ip| ip.address.addr());
    for ip in ours.filter(|ip| pools.iter().any(|pool| pool.range_of(*ip).is_some())) {
        if !is_its(store.owner(ip)?) {
            return Err(failed().with_details(format!(
                "{ip} has no lease of this container in {}: recreate the container",
                shorten::path(store.dir())
            )));
        }
        verified += 1;
    }
    if verified > 0 {
        return Ok(());
    }
    // It was given addresses of other pools, before the config was changed: then any lease will do.
    for ip in store.glimpse()? {
        if is_its(store.owner_if_known(ip)?) {
            return Ok(());
        }
    }
    Err(failed().with_details(format!(
        "{} has no lease of it: recreate the container",
        shorten::path(store.dir())
    )))
}

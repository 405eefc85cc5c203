//! GC: leases of attachments that are gone.

use std::collections::HashSet;

use underpass_cni::{Code, Error, NetworkRequest};

use crate::config;
use crate::owner::Owner;
use crate::shorten;
use crate::store::{Store, both};

/// Frees every lease of this network whose owner is not a valid attachment; a legacy lease, if no
/// attachment of its container is valid. Goes on past failures and reports them together. Where nobody says what is valid
/// (`null`) none is freed.
///
/// Reads every lease once; files that no plugin can have written stay, and so do those that can't be read.
pub fn gc(request: &NetworkRequest) -> Result<(), Error> {
    let Some(valid) = request.conf.valid_attachments()? else {
        return Ok(());
    };
    let valid: HashSet<Owner> = valid.iter().map(Owner::from).collect();
    let containers: HashSet<&str> = valid
        .iter()
        .map(|owner| owner.container_id.as_str())
        .collect();
    let store = Store::new(&config::data_dir(&request.conf)?, &request.conf.name);
    let Some(mut locked) = store.lock_existing()? else {
        return Ok(());
    };
    let mut failures = 0;
    let mut outcome = Ok(());
    let mut leased: Vec<_> = locked.leased()?.into_iter().collect();
    leased.sort_unstable();
    for ip in leased {
        let freed = match locked.owner(ip) {
            Ok(Some(owner)) if is_valid(&owner, &valid, &containers) || !is_plausible(&owner) => {
                Ok(())
            }
            Ok(_) => locked.remove(ip),
            Err(error) => error.pass_over(),
        };
        failures += usize::from(freed.is_err());
        outcome = both(outcome, freed);
    }
    // Owners who are gone leave the index, too. Should that fail, calls take longer and go as well.
    let _ = locked.rebuild_index();
    outcome.map_err(|error| {
        let folder = shorten::path(store.dir());
        let msg = format!("GC of {folder} failed in {failures} places: {error}");
        Error::new(Code::Io, shorten::shortened(&msg, shorten::MESSAGE))
    })
}

fn is_valid(owner: &Owner, valid: &HashSet<Owner>, containers: &HashSet<&str>) -> bool {
    match owner.ifname {
        Some(_) => valid.contains(owner),
        None => containers.contains(owner.container_id.as_str()),
    }
}

/// Whether a plugin can have written this: a container's id has no white space in it.
fn is_plausible(owner: &Owner) -> bool {
    !owner.container_id.contains(char::is_whitespace)
}

//! DEL: the attachment's leases, wherever they are.

use underpass_cni::{Error, Request};

use crate::config;
use crate::owner::Owner;
use crate::store::Store;

/// Frees all that the attachment holds in this network. Needs nothing of the config but the
/// network's name and `dataDir`, so ranges that are wrong by now are no obstacle. Succeeds if
/// nothing is held.
pub fn del(request: &Request) -> Result<(), Error> {
    del_if(request, || true)
}

/// Does what [`del()`] does, if `is_due` says that the leases are still those that have to go. It is asked while the folder's lock is held.
pub fn del_if(request: &Request, is_due: impl FnOnce() -> bool) -> Result<(), Error> {
    let store = Store::new(&config::data_dir(&request.conf)?, &request.conf.name);
    if let Some(mut locked) = store.lock_existing()?
        && is_due()
    {
        locked.release_all(&Owner::from(&request.attachment))?;
    }
    Ok(())
}

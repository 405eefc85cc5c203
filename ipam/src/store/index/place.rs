//! Where an index can be: wherever the file system links its files to those in the folder of leases.

use std::fs;
use std::io;
use std::path::Path;

use super::super::error::{Attempt, StoreError, refuses_links};
use super::super::file::remove_if_there;
use super::super::lock;
use super::state::State;

/// What a probe is called.
const PROBE: &str = ".underpass-probe";

/// Makes the folders of an index at the first place that will do; nothing, if there is none.
///
/// That is found out by trying. Mounts can't be compared instead: a bind mount has the device number
/// of what it shows, and takes no link from elsewhere all the same.
pub(super) fn find<'a>(
    leases: &Path,
    places: &'a [State],
) -> Result<Option<&'a State>, StoreError> {
    if !is_linked(leases, &leases.join(PROBE))? {
        return Ok(None);
    }
    let mut outcome = Ok(None);
    for place in places {
        // Beside the folder nothing may be writable.
        match place
            .create()
            .and_then(|()| is_linked(leases, &place.file("probe")))
        {
            Ok(true) => return Ok(Some(place)),
            Ok(false) => place.remove()?,
            Err(error) => {
                let _ = place.remove();
                outcome = Err(error);
            }
        }
    }
    outcome
}

/// Whether there can be a hard link with this path to a file in the folder of leases. The lock file
/// lends itself to that: it is there, and nothing is ever in it.
fn is_linked(leases: &Path, link: &Path) -> Result<bool, StoreError> {
    match fs::hard_link(lock::path(leases), link) {
        Err(error) if refuses_links(&error) => return Ok(false),
        // That of a call which was killed.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        outcome => outcome.attempt("create", link)?,
    }
    remove_if_there(link).attempt("remove", link)?;
    Ok(true)
}

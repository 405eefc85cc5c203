//! Whether a netns is the one that this thread is in.

use std::fs;
use std::os::linux::fs::MetadataExt;
use std::path::Path;

use crate::env::NetnsOverride;
use crate::error::{Code, Error};

const OWN: &str = "/proc/thread-self/ns/net";

/// Code 8 if `netns` is the plugin's own: a stale path like `/proc/<pid>/ns/net` may lead to the
/// host's, and its devices are not ours to touch. A path that cannot be looked at is judged by
/// whoever opens it.
pub(super) fn refuse_own(netns: Option<&Path>, netns_override: NetnsOverride) -> Result<(), Error> {
    let (Some(netns), NetnsOverride::Refuse) = (netns, netns_override) else {
        return Ok(());
    };
    let (Ok(theirs), Ok(own)) = (fs::metadata(netns), fs::metadata(OWN)) else {
        return Ok(());
    };
    // Two names of one namespace have the same device (nsfs) and inode.
    if (theirs.st_dev(), theirs.st_ino()) == (own.st_dev(), own.st_ino()) {
        return Err(Error::new(
            Code::InvalidNetns,
            "plugin's netns and netns from CNI_NETNS should not be the same",
        )
        .with_details(format!(
            "{} is the namespace that the plugin itself runs in: give the container's, or set CNI_NETNS_OVERRIDE=1 if it is meant",
            netns.display()
        )));
    }
    Ok(())
}

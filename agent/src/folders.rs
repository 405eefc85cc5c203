//! The folders of the host that the agent's container has: whether they are still those of the host.
//!
//! A container gets a folder of its host by a mount, and keeps that one. When somebody on the host removes the folder and makes it again,
//! the container goes on to see the removed one, which is empty, and in which nothing can be made. From inside that looks like a
//! network that somebody deletes again and again; only a new container gets the new folder.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::every;
use crate::options::Options;

/// Where the plugin keeps its leases, unless its network names another folder.
const LEASES: &str = "/var/lib/cni";

/// Where the plugin and its commands have their locks.
const LOCKS: &str = "/run/underpass";

/// Ends when one of the folders was removed while it was mounted. It is looked for at each comparison.
pub(crate) async fn await_loss(options: &Options) -> PathBuf {
    let folders = [
        options.net_dir.as_path(),
        options.bin_dir.as_path(),
        Path::new(LEASES),
        Path::new(LOCKS),
    ];
    let mut again = every(options.resync);
    loop {
        again.tick().await;
        if let Some(lost) = folders.iter().find(|folder| is_lost(folder)) {
            return lost.to_path_buf();
        }
    }
}

/// Tells whether there is a folder at this path that has no name any more: without a mount on the path a removed one would not be found.
fn is_lost(folder: &Path) -> bool {
    // The kernel takes the last link of a folder away with its name (rmdir(2)), whatever the filesystem says of those that are there.
    fs::metadata(folder).is_ok_and(|found| found.is_dir() && found.nlink() == 0)
}

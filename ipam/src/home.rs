//! Where the containers of an interface plugin are: what tells its leases from those of others in the same folder.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

/// The network namespace of the node that an interface plugin works in, by its inode number. A lease that is
/// noted with it was taken by an ADD of that plugin, which gives the container a device there. Of any other lease
/// nobody knows where its container is: the folder is shared with every plugin that has `host-local` give its
/// addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home(pub(crate) u64);

impl Home {
    /// The calling thread's namespace.
    pub fn current() -> io::Result<Self> {
        Ok(Self(fs::metadata("/proc/thread-self/ns/net")?.ino()))
    }
}

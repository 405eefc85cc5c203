//! The folders of the host that the agent's container has: whether they are still those of the host.
//!
//! A container gets a folder of its host by a mount, and keeps that one. When somebody on the host removes the folder and makes it again,
//! the container goes on to see the removed one, which is empty, and in which nothing can be made. From inside that looks like a
//! network that somebody deletes again and again; only a new container gets the new folder.

use std::fs;
use std::path::{Path, PathBuf};

use crate::every;
use crate::options::Options;

/// Where the plugin keeps its leases, unless its network names another folder.
const LEASES: &str = "/var/lib/cni";

/// Where the plugin and its commands have their locks.
const LOCKS: &str = "/run/underpass";

/// What the kernel appends to the name of a mount's root that has been removed (`seq_dentry` and `prepend_path` of `fs/d_path.c`), on
/// each filesystem. The number of links of a folder would not tell: of some of an overlay's it is 1 before and after.
const REMOVED: &str = "//deleted";

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
        // Where it can't be read it can't be told.
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        if let Some(lost) = folders.iter().find(|folder| is_lost(&mounts, folder)) {
            return lost.to_path_buf();
        }
    }
}

/// Tells whether what is mounted last on the folder, or on one above it, has been removed where it came from. Without such a mount a folder
/// that is removed is not found any more, and made again.
fn is_lost(mounts: &str, folder: &Path) -> bool {
    let above = mounts.lines().filter_map(|line| {
        let mut columns = line.split(' ').skip(3);
        let (root, place) = (columns.next()?, columns.next()?);
        let place = PathBuf::from(unescaped(place));
        folder.starts_with(&place).then_some((root, place))
    });
    // Of two on one place the later one is on top.
    let last = above.max_by_key(|(_, place)| place.as_os_str().len());
    last.is_some_and(|(root, _)| root.ends_with(REMOVED))
}

/// Reads a path as mountinfo writes it, with blanks and backslashes in octal digits (proc(5)).
fn unescaped(text: &str) -> String {
    let pairs = [
        (r"\040", " "),
        (r"\011", "\t"),
        (r"\012", "\n"),
        (r"\134", r"\"),
    ];
    let mut path = text.to_owned();
    for (escaped, plain) in pairs {
        path = path.replace(escaped, plain);
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_root_is_that_of_the_mount_on_top() {
        let mounts = "1 0 0:1 / / rw - overlay overlay rw\n\
                      2 1 8:1 /etc/cni/net.d /etc/cni/net.d rw - ext4 /dev/sda1 rw\n\
                      3 1 8:1 /opt/cni//deleted /opt/cni rw - ext4 /dev/sda1 rw\n\
                      4 1 8:1 /old//deleted /run/a\\040b rw - ext4 /dev/sda1 rw\n\
                      5 4 8:1 /new /run/a\\040b rw - ext4 /dev/sda1 rw\n";
        let lost = |folder: &str| is_lost(mounts, Path::new(folder));
        assert!(lost("/opt/cni/bin"));
        assert!(!lost("/etc/cni/net.d"));
        assert!(!lost("/opt/cni2"));
        assert!(!lost("/run/a b"));
        assert!(!is_lost("", Path::new("/")));
    }
}

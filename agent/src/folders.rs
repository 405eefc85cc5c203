//! The folders of the host that the agent's container has: whether they are still those of the host.
//!
//! A container gets a folder of its host by a mount, and keeps that one. When somebody on the host removes the folder and makes it again,
//! the container goes on to see the removed one, which is empty, and in which nothing can be made. From inside that looks like a
//! network that somebody deletes again and again. One that was renamed looks as if all were well: what is made there is not what the host
//! reads. Only a new container gets the new folder.

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

/// What a folder is, or is in.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mount {
    /// Its number, as long as it is there.
    id: String,
    /// Where its file system has what is mounted, by the name of now.
    root: String,
}

/// Ends when one of the folders was removed, or renamed, while it was mounted. It is looked for at each comparison.
pub(crate) async fn await_loss(options: &Options) -> PathBuf {
    let folders = [
        options.net_dir.as_path(),
        options.bin_dir.as_path(),
        Path::new(LEASES),
        Path::new(LOCKS),
    ];
    let mut folders = folders.map(|folder| (folder, None));
    let mut again = every(options.resync);
    loop {
        again.tick().await;
        // Where it can't be read it can't be told.
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        for (folder, before) in &mut folders {
            let Some(now) = mount_of(&mounts, folder) else {
                continue;
            };
            if now.is_lost(before.as_ref()) {
                return folder.to_path_buf();
            }
            *before = Some(now);
        }
    }
}

/// Finds what is mounted last on the folder, or on one above it.
fn mount_of(mounts: &str, folder: &Path) -> Option<Mount> {
    let above = mounts.lines().filter_map(|line| {
        let mut columns = line.split(' ');
        let id = columns.next()?;
        let mut columns = columns.skip(2);
        let (root, place) = (columns.next()?, columns.next()?);
        let place = PathBuf::from(unescaped(place));
        folder.starts_with(&place).then_some((id, root, place))
    });
    // Of two on one place the later one is on top.
    let last = above.max_by_key(|(.., place)| place.as_os_str().len());
    last.map(|(id, root, _)| Mount {
        id: id.to_owned(),
        root: root.to_owned(),
    })
}

impl Mount {
    /// Tells whether what is mounted has been removed where it came from, or has had another name there `before`. Without a mount of its own a
    /// folder that is removed or renamed is not found any more, and made again. Another mount in its place is the host's of now.
    fn is_lost(&self, before: Option<&Self>) -> bool {
        let is_renamed =
            before.is_some_and(|before| before.id == self.id && before.root != self.root);
        is_renamed || self.root.ends_with(REMOVED)
    }
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
        let lost = |folder: &str| {
            let mount = mount_of(mounts, Path::new(folder)).expect("a mount");
            mount.is_lost(None)
        };
        assert!(lost("/opt/cni/bin"));
        assert!(!lost("/etc/cni/net.d"));
        assert!(!lost("/opt/cni2"));
        assert!(!lost("/run/a b"));
        assert_eq!(mount_of("", Path::new("/")), None);
    }

    #[test]
    fn a_renamed_root_is_another_of_the_same_mount() {
        let root = "1 0 0:1 / / rw - overlay overlay rw\n";
        let at = |lines: &str, folder: &str| {
            let mounts = format!("{root}{lines}");
            mount_of(&mounts, Path::new(folder)).expect("a mount")
        };
        let line = |id: u32, root: &str| {
            format!("{id} 1 8:1 {root} /etc/cni/net.d rw master:7 - ext4 /dev/sda1 rw\n")
        };
        let of = |lines: &str| at(lines, "/etc/cni/net.d");
        let before = of(&line(2, "/etc/cni/net.d"));
        assert_eq!((&*before.id, &*before.root), ("2", "/etc/cni/net.d"));
        for (root, is_lost) in [
            ("/etc/cni/net.d", false),
            ("/etc/cni/net.d.bak", true),
            ("/etc/cni.bak/net.d", true),
            ("/etc/cni/net.d\\040old", true),
            ("/etc/cni/net.d//deleted", true),
        ] {
            let now = of(&line(2, root));
            assert_eq!(now.is_lost(Some(&before)), is_lost, "{root}");
        }
        // Another one: on top, in its place, or what was below.
        let on_top = line(2, "/etc/cni/net.d") + &line(3, "/srv/net.d");
        for lines in [on_top, line(4, "/srv/net.d"), String::new()] {
            let now = of(&lines);
            assert!(!now.is_lost(Some(&before)), "{now:?}");
        }
        // What is in no mount of its own goes by that of the root, which has no name.
        let own = at(&line(2, "/old"), "/run/underpass");
        assert!(!own.is_lost(Some(&at("", "/run/underpass"))));
    }
}

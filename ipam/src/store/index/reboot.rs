//! Which leases a reboot has ended.
//!
//! No container outlives its kernel, but its lease does, as nobody calls DEL for it. Such a lease is
//! free, provided that it is certain. So all of this has to hold:
//!
//! - The mark names another boot than is named here, and both are the kernel's, or both a container's. No
//!   link is ever added to an index whose mark names another boot: the mark is removed before, and if it
//!   cannot be, there is no index. So every link was made before this boot, whatever a crash has lost of
//!   the rest.
//! - The lease is the very file that is linked. The link keeps its inode number in use, so one that
//!   anybody made since is another file, also under the same name: it stays.
//! - What it says is an owner as a plugin writes it, with an interface, for whom the index has noted
//!   the address. A lease that somebody wrote by hand (`reserved for the printer`) stays, and so does
//!   one that was written over.
//! - The mark was made on this machine, as `/etc/machine-id` tells. A folder that was copied, moved
//!   with its disk, or found in the image of another machine may hold leases of containers that live
//!   there. Where a second machine has worked on a folder, nothing in it is freed before a GC has
//!   said who is valid.
//! - The file system is one that a single kernel writes: none over a network, none of FUSE.
//!
//! A "node" that is a container has its kernel's boot: then it is no reboot when it starts anew, and its leases wait for
//! a GC. Or somebody mounts one of its own over that, another at each start, which ends all that ran in it. Its pods may
//! mount a procfs and see the kernel's: so a plugin and an agent on one node can see two boots at the same time, and neither
//! is the end of the other. Whether it is a procfs that names the boot tells them apart.
//!
//! The times of leases would not. On a machine whose clock stops while it is off, leases are no older than the next boot; and
//! where a clock is put forward, those of living pods become older than theirs.
//!
//! After kexec the kernel says another boot, rightly.
//!
//! The lease goes before its link. So a call that is killed leaves fewer of both for the next one,
//! and nothing that the next one would take for older than it is.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::sys::statfs::{
    BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, F2FS_SUPER_MAGIC, FsType, OVERLAYFS_SUPER_MAGIC,
    TMPFS_MAGIC, statfs,
};

use super::super::file::{addresses, read_short};
use super::mark::{Boot, Machine, Mark};
use super::state::{LINK_PREFIX, State};
use crate::owner::Owner;

/// `XFS_SUPER_MAGIC` of `linux/magic.h`, which the library leaves out where it is built for musl.
const XFS_SUPER_MAGIC: FsType = FsType(0x5846_5342);

/// That of ext2 and ext3 is ext4's.
const LOCAL: [FsType; 6] = [
    EXT4_SUPER_MAGIC,
    XFS_SUPER_MAGIC,
    BTRFS_SUPER_MAGIC,
    F2FS_SUPER_MAGIC,
    OVERLAYFS_SUPER_MAGIC,
    // Its files are from before a boot where somebody keeps them on a disk meanwhile.
    TMPFS_MAGIC,
];

/// The leases in the folder `leases` whose containers ended with an earlier boot, as far as the index
/// in `state` with this mark knows them. Changes nothing.
pub(super) fn ended(leases: &Path, state: &State, mark: &Mark) -> Vec<IpAddr> {
    let certain = mark.boot.is_over_in(&Boot::current())
        && mark.machine.is(&Machine::current())
        && statfs(leases).is_ok_and(|stat| LOCAL.contains(&stat.filesystem_type()));
    if !certain {
        return Vec::new();
    }
    let mut ended: Vec<IpAddr> = addresses(&state.links(), LINK_PREFIX)
        .unwrap_or_default()
        .into_iter()
        .map(|(ip, _)| ip)
        .filter(|ip| is_same_file(&leases.join(ip.to_string()), &state.link(*ip)))
        .filter(|ip| is_noted(&leases.join(ip.to_string()), state, *ip))
        .collect();
    ended.sort_unstable();
    ended
}

fn is_same_file(lease: &Path, link: &Path) -> bool {
    let identity = |path| fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()));
    match (identity(lease), identity(link)) {
        (Ok(lease), Ok(link)) => lease == link,
        _ => false,
    }
}

/// Whether it is a plugin's lease, and the one that the index knew.
fn is_noted(lease: &Path, state: &State, ip: IpAddr) -> bool {
    read_short(lease)
        .ok()
        .and_then(|content| Owner::parse(&content))
        .is_some_and(|owner| owner.is_attachment() && state.noted(&owner).contains(&ip))
}

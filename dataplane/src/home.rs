//! The network namespace that pins belong to: programs sit on its devices, and maps know these by numbers
//! that mean other devices elsewhere.
//!
//! It is pinned as a map of devices with one entry: the number of the namespace leads to its loopback
//! device. Nobody can delete that device; the kernel takes it out of the map when the namespace ends
//! (`dev_map_notification` in `kernel/bpf/devmap.c`, the same from 5.10 to 7.3). So one look-up answers
//! both who the pins are of and whether their containers can be alive, and a number that another namespace
//! got later is no danger.

use std::{
    fs::metadata,
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::Path,
};

use underpass_abi::endpoint::LOOPBACK;

use crate::{
    Error,
    bpf::{self, NewMap},
};

/// The calling thread's own namespace.
const OWN: &str = "/proc/thread-self/ns/net";

/// The kernel's number of a map of devices by any key (`enum bpf_map_type`), since 5.4.
const DEVICES_BY_HASH: u32 = 25;

/// Who pins belong to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Home {
    /// The calling thread's network namespace.
    Here,
    /// Another one, with this inode number, which exists.
    Elsewhere(u32),
    /// One that has ended, and its containers' devices with it.
    Gone,
}

/// Pins, at a path, that the calling thread's network namespace is the home of what is pinned beside it.
pub(crate) fn pin(path: &Path) -> Result<(), Error> {
    let here = own()?;
    let make = || {
        let map = bpf::create_map(NewMap {
            name: c"HOME",
            kind: DEVICES_BY_HASH,
            key_size: 4,
            value_size: 4,
            max_entries: 1,
        })?;
        bpf::update(map.as_fd(), here, LOOPBACK)?;
        bpf::pin(map, path)
    };
    make().map_err(Error::file("make the map", path))
}

/// Reads what [`pin`] has pinned at the path.
pub(crate) fn read(path: &Path) -> Result<Home, Error> {
    let here = own()?;
    let look = || {
        let map: OwnedFd = bpf::open_pin(path)?;
        Ok(if bpf::has_key(map.as_fd(), here)? {
            Home::Here
        } else {
            bpf::first_key(map.as_fd())?.map_or(Home::Gone, Home::Elsewhere)
        })
    };
    look().map_err(Error::file("open the pin", path))
}

/// Gives the inode number of the calling thread's network namespace, which names it while it exists.
fn own() -> Result<u32, Error> {
    let path = Path::new(OWN);
    metadata(path)
        .and_then(|namespace| u32::try_from(namespace.ino()).map_err(io::Error::other))
        .map_err(Error::file("look at", path))
}

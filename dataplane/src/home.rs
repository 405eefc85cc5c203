//! The network namespace that pins belong to: programs sit on its devices, and maps know these by numbers
//! that mean other devices elsewhere.
//!
//! It is pinned as a map of devices with one entry: the number of the namespace leads to its loopback
//! device. Nobody can delete that device; the kernel takes it out of the map when the namespace ends
//! (`dev_map_notification` in `kernel/bpf/devmap.c`, the same from 5.10 to 7.3). So one look-up answers
//! both who the pins are of and whether their containers can be alive, and a number that another namespace
//! got later is no danger.

use std::{fs::metadata, io, os::unix::fs::MetadataExt as _, path::Path};

use underpass_abi::endpoint::LOOPBACK;

use crate::{Error, raw_map::RawMap};

/// The calling thread's own namespace.
const OWN: &str = "/proc/thread-self/ns/net";

/// The kernel's number of a map of devices by any key (`enum bpf_map_type`), since 5.4.
const DEVICES_BY_HASH: u32 = 25;
/// Of its keys and values, in bytes.
const SIZES: (usize, usize) = (4, 4);

/// Who pins belong to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Home {
    /// The calling thread's network namespace.
    Here,
    /// One that has ended, and its containers' devices with it.
    Gone,
}

/// Pins, at a path, that the calling thread's network namespace is the home of what is pinned beside it.
pub(crate) fn pin(path: &Path) -> Result<(), Error> {
    let here = own()?;
    let make = || {
        let map = RawMap::create(c"HOME", DEVICES_BY_HASH, SIZES, 1)?;
        map.set_value(&here.to_ne_bytes(), &LOOPBACK.to_ne_bytes())?;
        map.pin(path)
    };
    make().map_err(Error::file("make the map", path))
}

/// Reads what [`pin`] has pinned in a folder of `root`; `None` if nothing is pinned there. Fails if that is
/// another network namespace, which exists.
pub(crate) fn read(path: &Path, root: &Path) -> Result<Option<Home>, Error> {
    let here = own()?;
    let failed = || Error::file("open the pin", path);
    let map = match RawMap::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        map => map.map_err(failed())?,
    };
    if map.has_key(&here.to_ne_bytes()).map_err(failed())? {
        return Ok(Some(Home::Here));
    }
    let first = map.next_key(None).map_err(failed())?;
    match first.and_then(|key| key.first_chunk().copied()) {
        None => Ok(Some(Home::Gone)),
        Some(namespace) => Err(Error::Elsewhere {
            root: root.to_owned(),
            namespace: u32::from_ne_bytes(namespace),
        }),
    }
}

/// Gives the inode number of the calling thread's network namespace, which names it while it exists.
fn own() -> Result<u32, Error> {
    let path = Path::new(OWN);
    metadata(path)
        .and_then(|namespace| u32::try_from(namespace.ino()).map_err(io::Error::other))
        .map_err(Error::file("look at", path))
}

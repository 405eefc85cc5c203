//! Whose turn it is to change an installation: one process of a node has it, and the others wait.
//!
//! The folders of an installation can't be its lock, though `flock(2)` takes them: everybody can open them, a container that has one of them
//! read-only, too, and whoever has one open could keep it for ever. So the lock is among those of the node, which only root can open.
//!
//! There is one for all folders. Agents see the node's folders by mounts of their own, so the name of a lock for each could not follow from
//! a path, only from device and inode. Those are others as soon as somebody removes the folder and makes it anew, while its holder goes
//! on to write by the path; a network's file system that is mounted twice can have two devices; and who is told of one folder by
//! two mounts would wait for himself. A lock that has one name is right in all of these, and it costs that installations in different
//! folders, of which a node hardly ever has two, are not changed at the same time.
//!
//! Who sees another `/run/underpass` is not waited for, as by all locks of the node. Nor are builds of before the first release, which
//! locked the folders.

use std::{fs::File, path::Path};

use underpass_cni::Error as CniError;
use underpass_dataplane::lock::{self, FOLDER};

use crate::error::Error;

/// The name of the lock's file.
const FILE: &str = "installation";

/// The turn, which is over when this is dropped, or when the process dies.
#[derive(Debug)]
pub(crate) struct Turn {
    _file: File,
}

impl Turn {
    /// Waits for it. A program that is executed meanwhile does not inherit it.
    pub(crate) fn wait() -> Result<Self, CniError> {
        let path = Path::new(FOLDER).join(FILE);
        let file = lock::hold(&path).map_err(Error::from)?;
        Ok(Self { _file: file })
    }
}

//! A folder whose files others read at any moment, also after a power failure: a file in it appears as a whole or not at all.
//!
//! Each file is written under a temporary name, waits for the disk, and is renamed; then the folder waits for the
//! disk. So nobody executes half a file, and an executable that runs can be replaced. A temporary name begins with a dot and ends in
//! `.tmp`, and nobody may execute its file before it is whole, so that it is neither plugin nor config. Whoever opens the folder has the
//! [`Turn`], and nobody else changes it meanwhile, so a temporary file that is there is that of a process which was killed.

use std::{
    fs::{self, File, Permissions},
    io::{self, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use underpass_cni::Error;

use super::turn::Turn;

const TEMPORARY_PREFIX: &str = ".underpass-install.";
const TEMPORARY_SUFFIX: &str = ".tmp";
/// The permission bits of a file.
const MODE: u32 = 0o7777;
/// Those that let somebody execute it.
const EXECUTABLE: u32 = 0o111;

/// The outcome of a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// Something was written or removed.
    Made,
    /// It was so before.
    None,
}

/// A folder that may be changed for as long as its opener has the [`Turn`].
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    handle: File,
}

impl Folder {
    /// Makes the folder if need be, and sweeps what was left by one who was killed.
    pub(crate) fn open(path: &Path, turn: &Turn) -> Result<Self, Error> {
        fs::create_dir_all(path).map_err(|error| failed("make the folder", path, &error))?;
        Self::open_existing(path, turn)?.ok_or_else(|| {
            Error::new(
                underpass_cni::Code::Io,
                format!(
                    "the folder {} vanished while it was being opened: another program deleted it; repeat the command",
                    path.display()
                ),
            )
        })
    }

    /// Does what [`Self::open`] does, where there is such a folder.
    pub(crate) fn open_existing(path: &Path, _turn: &Turn) -> Result<Option<Self>, Error> {
        let handle = match File::open(path) {
            Ok(handle) => handle,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed("open the folder", path, &error)),
        };
        let folder = Self {
            path: path.to_owned(),
            handle,
        };
        folder.sweep()?;
        Ok(Some(folder))
    }

    /// Gives the path of a file.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Reads a file, if it is there.
    pub(crate) fn read(&self, name: &str) -> Result<Option<Vec<u8>>, Error> {
        let path = self.path(name);
        match fs::read(&path) {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("read", &path, &error)),
        }
    }

    /// Puts an executable there, unless the same one is there.
    pub(crate) fn put_executable(&self, name: &str, content: &[u8]) -> Result<Change, Error> {
        let path = self.path(name);
        let may_be_executed = fs::metadata(&path).is_ok_and(|file| {
            file.mode() & EXECUTABLE == EXECUTABLE && file.len() == content.len() as u64
        });
        if may_be_executed && self.read(name)?.as_deref() == Some(content) {
            return Ok(Change::None);
        }
        self.put(name, content, 0o755)?;
        Ok(Change::Made)
    }

    /// Fails unless a copy of the file could be put there: writes one that nobody sees, and removes it.
    pub(crate) fn try_out(&self, file: &Path) -> Result<(), Error> {
        let content = fs::read(file).map_err(|error| failed("read", file, &error))?;
        let temporary = self.path(&format!("{TEMPORARY_PREFIX}try{TEMPORARY_SUFFIX}"));
        let written = write(&temporary, &content, 0o600);
        let removed = fs::remove_file(&temporary);
        written
            .and(removed)
            .map_err(|error| failed("write", &temporary, &error))
    }

    /// Puts a file there, in place of the one that is there.
    pub(crate) fn put(&self, name: &str, content: &[u8], mode: u32) -> Result<(), Error> {
        let path = self.path(name);
        let temporary = self.path(&format!("{TEMPORARY_PREFIX}{name}{TEMPORARY_SUFFIX}"));
        let written = write(&temporary, content, mode)
            .and_then(|()| fs::rename(&temporary, &path))
            .and_then(|()| self.handle.sync_all());
        written.map_err(|error| {
            // It is swept by the next one if not now.
            let _ = fs::remove_file(&temporary);
            failed("write", &path, &error)
        })
    }

    /// Links a name to another file of the folder, unless there is a file of that name.
    pub(crate) fn link(&self, name: &str, target: &str) -> Result<Change, Error> {
        let path = self.path(name);
        match symlink(target, &path) {
            Ok(()) => self.settle(&path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(Change::None),
            Err(error) => Err(failed("make the link", &path, &error)),
        }
    }

    /// Names the links that lead to another file of the folder, in order.
    pub(crate) fn links_to(&self, target: &str) -> Result<Vec<String>, Error> {
        let file = self.path(target);
        let leads_there = |name: &String| {
            fs::read_link(self.path(name)).is_ok_and(|to| self.path.join(to) == file)
        };
        let mut names = self.names()?;
        names.retain(leads_there);
        names.sort();
        Ok(names)
    }

    /// Tells whether there is a file.
    pub(crate) fn has(&self, name: &str) -> Result<bool, Error> {
        let path = self.path(name);
        fs::exists(&path).map_err(|error| failed("look for", &path, &error))
    }

    /// Renames a file, if it is there. Another one of the new name is gone then.
    pub(crate) fn rename(&self, from: &str, to: &str) -> Result<Change, Error> {
        let path = self.path(from);
        match fs::rename(&path, self.path(to)) {
            Ok(()) => self.settle(&path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Change::None),
            Err(error) => Err(failed("rename", &path, &error)),
        }
    }

    /// Renames a file, and fails if there is one of the new name. For a moment it has both names: not each file system can do it at once.
    pub(crate) fn rename_new(&self, from: &str, to: &str) -> Result<(), Error> {
        let path = self.path(to);
        fs::hard_link(self.path(from), &path).map_err(|error| failed("make", &path, &error))?;
        self.settle(&path)?;
        self.remove(from).map(drop)
    }

    /// Removes a file, if it is there.
    pub(crate) fn remove(&self, name: &str) -> Result<Change, Error> {
        let path = self.path(name);
        match fs::remove_file(&path) {
            Ok(()) => self.settle(&path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Change::None),
            Err(error) => Err(failed("remove", &path, &error)),
        }
    }

    fn settle(&self, path: &Path) -> Result<Change, Error> {
        self.handle
            .sync_all()
            .map_err(|error| failed("write to the disk", path, &error))?;
        Ok(Change::Made)
    }

    fn sweep(&self) -> Result<(), Error> {
        for name in self.names()? {
            if name.starts_with(TEMPORARY_PREFIX) && name.ends_with(TEMPORARY_SUFFIX) {
                self.remove(&name)?;
            }
        }
        Ok(())
    }

    fn names(&self) -> Result<Vec<String>, Error> {
        let entries = fs::read_dir(&self.path)
            .and_then(Iterator::collect::<io::Result<Vec<_>>>)
            .map_err(|error| failed("list the folder", &self.path, &error))?;
        let names = entries.into_iter().map(|entry| entry.file_name());
        Ok(names.filter_map(|name| name.into_string().ok()).collect())
    }
}

fn write(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(content)?;
    file.set_permissions(Permissions::from_mode(mode & MODE))?;
    file.sync_all()
}

fn failed(action: &str, path: &Path, error: &io::Error) -> Error {
    let remedy = match error.kind() {
        io::ErrorKind::PermissionDenied => "run it as root of the node",
        io::ErrorKind::ReadOnlyFilesystem => {
            "name a folder that can be written, the one that the runtime is configured with"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space on its file system, and repeat the command"
        }
        io::ErrorKind::NotADirectory => "a part of the path is no folder: name another one",
        _ => "",
    };
    Error::io(format!("cannot {action} {}", path.display()), error).with_details(remedy)
}

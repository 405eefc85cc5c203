//! Where programs and maps are pinned: `<bpfRoot>/v<ABI>/programs/<name>`, `<bpfRoot>/v<ABI>/maps/<name>-<layout>-<value>`
//! ([`map::Pinned`]), and beside them `home`, the network namespace that they are for.
//!
//! The folder is made under another name and renamed when everything is in it, so one that exists
//! is complete: a call killed half-way leaves only a folder that the next one removes. An upgrade has a second complete one for
//! a moment, `next-v<ABI>`, see [`crate::upgrade`].

use std::{
    fs::{self, File},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    process,
};

use aya::{
    maps::MapData,
    programs::{ProgramFd, ProgramInfo},
};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use underpass_abi::{
    ABI,
    map::{self, Content},
};

use crate::{
    Error,
    home::{self, Home},
    lock::Lock,
};

mod folder;

pub use folder::Folder;
pub(crate) use folder::{HOME, MAPS, PROGRAMS, Pin};

/// What is pinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loaded {
    /// Nothing of this layout.
    Nothing,
    /// Everything, for the calling thread's network namespace.
    Here,
    /// What was loaded for a network namespace that has ended: a node in a container that was started anew.
    Leftover,
}

/// The pins of one node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pins {
    root: PathBuf,
}

/// Names the command that mounts a bpffs where this folder is to be on one.
#[must_use]
pub fn mount_command(root: &Path) -> String {
    const USUAL: &str = "/sys/fs/bpf";
    if root.starts_with(USUAL) {
        return format!("mount -t bpf bpf {USUAL}");
    }
    let root = root.display();
    format!("mkdir -p {root} && mount -t bpf bpf {root}")
}

impl Pins {
    /// Takes the pins below `root`, which need not exist.
    #[must_use]
    pub fn at(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// Names the folder below which they are, bpfRoot.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Names the folder of this layout's pins.
    #[must_use]
    pub fn folder(&self) -> Folder {
        Folder(self.root.join(format!("v{ABI}")))
    }

    /// Names the folder of the pins that an upgrade is about to show in place of those that are there.
    pub(crate) fn next(&self) -> Folder {
        Folder(self.root.join(format!("next-v{ABI}")))
    }

    /// Tells whether all maps and the usual programs are loaded and pinned, for the calling thread's network
    /// namespace. Fails if they are pinned for another one that exists, as its devices have other numbers; and if the maps that
    /// user space alone writes have another layout. (Those of the programs are theirs, whichever build loaded them.)
    pub fn loaded(&self) -> Result<Loaded, Error> {
        let loaded = self.pinned()?;
        if loaded == Loaded::Here {
            self.require_layouts(|map| map.content == Content::Copied)?;
        }
        Ok(loaded)
    }

    /// Does what [`Self::loaded`] does, whatever the layout of the maps.
    pub(crate) fn pinned(&self) -> Result<Loaded, Error> {
        self.adopt();
        let folder = self.folder();
        match fs::metadata(&folder.0) {
            Ok(found) if found.is_dir() => {}
            // Who may not look can't say that nothing is there.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(Error::file("look at", &folder.0)(error));
            }
            _ => return Ok(Loaded::Nothing),
        }
        Ok(match home::read(&folder.home(), &self.root)? {
            Some(Home::Here) => Loaded::Here,
            Some(Home::Gone) => Loaded::Leftover,
            // Another call has just removed it.
            None => Loaded::Nothing,
        })
    }

    /// Tells whether anything of this layout is there, shown or about to be.
    pub(crate) fn exist(&self) -> bool {
        let (folder, next) = (self.folder(), self.next());
        // Between the first look and the second, the next ones may have been shown.
        folder.exists() || next.exists() || folder.exists()
    }

    /// Shows the pins of an upgrade that was killed when it had taken the old ones away: they are complete. Without effect
    /// wherever there is nothing to do, which is what happens.
    fn adopt(&self) {
        let (Folder(next), Folder(folder)) = (self.next(), self.folder());
        if !folder.exists() && next.exists() {
            // Another call may be doing it.
            let _ = fs::rename(next, folder);
        }
    }

    /// Fails if some maps have another layout than this build's, of those that are asked about. What somebody has removed is not its
    /// business.
    fn require_layouts(&self, is_asked: impl Fn(&map::Pinned) -> bool) -> Result<(), Error> {
        let there = self.folder().maps()?;
        let other: Vec<_> = map::MAPS
            .iter()
            .filter(|map| is_asked(map))
            .filter(|map| {
                let same_name = |pin: &&Pin| pin.name == map.name;
                there.iter().find(same_name).is_some_and(|pin| !pin.is(map))
            })
            .map(|map| map.name)
            .collect();
        if other.is_empty() {
            return Ok(());
        }
        Err(Error::OtherLayout {
            root: self.root.clone(),
            maps: other.join(", "),
        })
    }

    /// Makes the calling thread's network namespace the one that everything pinned is for.
    pub fn settle(&self) -> Result<(), Error> {
        home::pin(&self.folder().home())
    }

    /// Fails unless `root`, or the folder that it will be made in, is on a bpffs.
    pub fn require_bpffs(&self) -> Result<(), Error> {
        let existing = self
            .root
            .ancestors()
            .find(|folder| folder.exists())
            .unwrap_or(&self.root);
        match statfs(existing) {
            Ok(stat) if stat.filesystem_type() == BPF_FS_MAGIC => Ok(()),
            Ok(_) => Err(Error::NotBpffs(self.root.clone())),
            Err(errno) => Err(Error::file("examine", existing)(errno.into())),
        }
    }

    /// Makes an empty folder to pin into, and removes those of calls that were killed. The caller
    /// holds the lock.
    pub(crate) fn begin(&self) -> Result<Unfinished, Error> {
        self.make_root()?;
        self.sweep()?;
        self.forget_next()?;
        let name = format!("{}{}", Unfinished::PREFIX, process::id());
        let unfinished = Unfinished {
            folder: Folder(self.root.join(name)),
            complete: self.folder(),
        };
        match unfinished.make() {
            Ok(()) => Ok(unfinished),
            Err(error) => {
                unfinished.abandon();
                Err(error)
            }
        }
    }

    /// Lists the folders that calls are pinning into, or were when they were killed.
    pub(crate) fn unfinished(&self) -> Result<Vec<PathBuf>, Error> {
        let entries = match fs::read_dir(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(Error::file("list", &self.root))?,
        };
        let mut folders = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::file("list", &self.root))?;
            let name = entry.file_name();
            if name
                .as_encoded_bytes()
                .starts_with(Unfinished::PREFIX.as_bytes())
            {
                folders.push(entry.path());
            }
        }
        Ok(folders)
    }

    /// Removes the folders of calls that were killed. The caller holds the lock.
    pub(crate) fn sweep(&self) -> Result<(), Error> {
        self.unfinished()?
            .iter()
            .try_for_each(|folder| remove(folder))
    }

    /// Removes what calls have left that were killed. The caller holds the lock.
    pub fn tidy(&self, _lock: &Lock) -> Result<(), Error> {
        self.sweep()?;
        self.forget_next()
    }

    /// Removes the pins that an upgrade was about to show. The caller holds the lock.
    pub(crate) fn forget_next(&self) -> Result<(), Error> {
        let Folder(next) = self.next();
        if next.exists() { retire(&next) } else { Ok(()) }
    }

    /// Shows the pins of an upgrade in place of those that are there. The caller holds the lock.
    pub(crate) fn show_next(&self) -> Result<(), Error> {
        let (Folder(next), Folder(folder)) = (self.next(), self.folder());
        let aside = Unfinished::aside(&folder);
        // Linux can exchange two folders of a bpffs since 5.16 only. Who finds neither adopts the next.
        match fs::rename(&folder, &aside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::file("remove", &folder)(error));
            }
            _ => {}
        }
        match fs::rename(&next, &folder) {
            // Else somebody has adopted it, in the moment between the two.
            Err(error) if !folder.exists() => {
                let _ = fs::rename(&aside, &folder);
                return Err(Error::file("complete", &folder)(error));
            }
            _ => {}
        }
        // What can't be removed now is swept by the next call that loads.
        let _ = remove(&aside);
        Ok(())
    }

    /// Removes the pins of this layout. The caller holds the lock.
    pub(crate) fn remove(&self) -> Result<(), Error> {
        retire(&self.folder().0)
    }

    /// Locks the folder of all layouts, and makes it if need be: calls with another `/run` wait for that, too,
    /// as those of two nodes in containers that share a bpffs. Free again when dropped.
    pub(crate) fn lock(&self) -> Result<File, Error> {
        self.make_root()?;
        let folder = File::open(&self.root).map_err(Error::file("open", &self.root))?;
        folder.lock().map_err(Error::file("lock", &self.root))?;
        Ok(folder)
    }

    fn make_root(&self) -> Result<(), Error> {
        let mut builder = fs::DirBuilder::new();
        builder.mode(0o700).recursive(true);
        builder
            .create(&self.root)
            .map_err(Error::file("create", &self.root))
    }

    /// Opens a pinned map.
    pub fn map(&self, name: &'static str) -> Result<MapData, Error> {
        MapData::from_pin(self.folder().map(name)).map_err(|error| {
            // It may be another build's.
            match self.require_layouts(|map| map.name == name) {
                Err(other @ Error::OtherLayout { .. }) => other,
                _ => Error::map(name)(error),
            }
        })
    }

    /// Tells whether a program is pinned: no device needed it before, if not.
    #[must_use]
    pub fn has_program(&self, name: &str) -> bool {
        self.folder().program(name).exists()
    }

    /// Asks about a pinned program.
    ///
    /// Not as a program of its type: before aya makes one of those it tries out what the kernel can
    /// do, and loads five programs for it. That takes longer than the rest of a CHECK of the filters.
    pub fn program(&self, name: &'static str) -> Result<ProgramInfo, Error> {
        ProgramInfo::from_pin(self.folder().program(name)).map_err(Error::program(name))
    }

    /// Opens a pinned program, to give it to the kernel.
    pub fn program_fd(&self, name: &'static str) -> Result<ProgramFd, Error> {
        self.program(name)?.fd().map_err(Error::program(name))
    }
}

/// A folder of pins that nobody sees yet.
#[derive(Debug)]
pub(crate) struct Unfinished {
    folder: Folder,
    complete: Folder,
}

impl Unfinished {
    const PREFIX: &str = "new-";

    /// Names a place where a complete folder is out of the way.
    fn aside(folder: &Path) -> PathBuf {
        folder.with_file_name(format!("{}{}-gone", Self::PREFIX, process::id()))
    }

    /// The pins.
    pub(crate) const fn folder(&self) -> &Folder {
        &self.folder
    }

    fn make(&self) -> Result<(), Error> {
        let mut builder = fs::DirBuilder::new();
        builder.mode(0o700).recursive(true);
        for part in [MAPS, PROGRAMS] {
            let path = self.folder.0.join(part);
            builder
                .create(&path)
                .map_err(Error::file("create", &path))?;
        }
        Ok(())
    }

    /// Makes the folder the next one, or removes it.
    pub(crate) fn complete_as_next(mut self, pins: &Pins) -> Result<(), Error> {
        self.complete = pins.next();
        self.complete()
    }

    /// Shows the folder to everybody, or removes it.
    pub(crate) fn complete(self) -> Result<(), Error> {
        let (Folder(from), Folder(to)) = (&self.folder, &self.complete);
        match fs::rename(from, to) {
            Ok(()) => Ok(()),
            Err(error) => {
                let error = Error::file("complete", to)(error);
                self.abandon();
                Err(error)
            }
        }
    }

    /// Removes it: there was an error, which matters more than what goes wrong here. The next call
    /// that loads tries again.
    pub(crate) fn abandon(self) {
        let _ = remove(&self.folder.0);
    }
}

/// Removes a complete folder: under another name, so that nobody sees it half removed, and what a killed call
/// leaves of it is swept by the next one that loads.
pub(crate) fn retire(folder: &Path) -> Result<(), Error> {
    let aside = Unfinished::aside(folder);
    fs::rename(folder, &aside).map_err(Error::file("remove", folder))?;
    remove(&aside)
}

fn remove(folder: &Path) -> Result<(), Error> {
    fs::remove_dir_all(folder).map_err(Error::file("remove", folder))
}

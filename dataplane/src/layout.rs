//! Folders of pins of any layout, as far as they are alike: which programs they have, whether attachments
//! use them, and how to be rid of them.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use aya::programs::ProgramInfo;
use underpass_abi::{ABI, map};
use underpass_netlink::{Netlink, filter::Direction, link::Link};

use crate::{
    Error, Pins, bpf,
    home::{self, Home},
    netkit,
    pin::{self, Folder, HOME, PROGRAMS},
    raw_map::RawMap,
};

mod beside;

pub use beside::require_free;

/// The folder of one layout.
#[derive(Debug)]
pub struct Layout {
    number: u32,
    root: PathBuf,
    folder: PathBuf,
}

impl Pins {
    /// Lists the layouts that are pinned, whichever version of the plugin did it.
    pub fn layouts(&self) -> Result<Vec<Layout>, Error> {
        let entries = match fs::read_dir(self.root()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(Error::file("list", self.root()))?,
        };
        let mut layouts = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::file("list", self.root()))?;
            if let Some(number) = number(&entry.file_name()) {
                layouts.push(Layout {
                    number,
                    root: self.root().to_owned(),
                    folder: entry.path(),
                });
            }
        }
        layouts.sort_unstable_by_key(|layout| layout.number);
        Ok(layouts)
    }
}

/// Reads the number in `v<number>`, or in `next-v<number>`, which an upgrade has left that was killed and can't be ended.
fn number(name: &OsStr) -> Option<u32> {
    let name = name.to_str()?;
    let name = name.strip_prefix("next-").unwrap_or(name);
    name.strip_prefix('v')?.parse().ok()
}

impl Layout {
    /// Gives the number of the layout, as [`ABI`] counts them.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// Tells whether another version of the plugin made it.
    #[must_use]
    pub const fn is_other(&self) -> bool {
        self.number != ABI
    }

    /// Names the folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Counts the attachments that may be alive. Fails if it is for another network namespace than the calling
    /// thread's, which exists. Layouts before 7 do not say.
    pub fn attachments(&self) -> Result<usize, Error> {
        if home::read(&self.folder.join(HOME), &self.root)? == Some(Home::Gone) {
            return Ok(0);
        }
        let path = Folder::at(&self.folder).any_map(map::OWNERS)?;
        let count = || Ok(RawMap::open(&path)?.keys()?.len());
        count().map_err(Error::file("read the map", &path))
    }

    /// Takes its programs off devices, wherever they sit there. Returns the names of those that had any.
    pub fn detach(&self, netlink: &Netlink, links: &[Link]) -> Result<Vec<String>, Error> {
        let programs = self.programs()?;
        let mut names = Vec::new();
        for link in links {
            if programs.detach(netlink, link)? {
                names.push(link.name.clone());
            }
        }
        Ok(names)
    }

    /// Lists the pins of its programs.
    fn programs(&self) -> Result<Programs, Error> {
        let folder = self.folder.join(PROGRAMS);
        let mut programs = BTreeMap::new();
        for entry in fs::read_dir(&folder).map_err(Error::file("list", &folder))? {
            let path = entry.map_err(Error::file("list", &folder))?.path();
            let program = ProgramInfo::from_pin(&path)
                .map_err(io::Error::other)
                .map_err(Error::file("open the pin", &path))?;
            programs.insert(program.id(), path);
        }
        Ok(Programs(programs))
    }

    /// Removes its pins, and the folder of all layouts if nothing is left in it. The caller holds the lock.
    pub fn remove(self) -> Result<(), Error> {
        pin::retire(&self.folder)?;
        match fs::remove_dir(&self.root) {
            // Other layouts are there, or a bpffs is mounted on it.
            Err(error) if !matches!(error.raw_os_error(), Some(libc::ENOTEMPTY | libc::EBUSY)) => {
                Err(Error::file("remove", &self.root)(error))
            }
            _ => Ok(()),
        }
    }
}

/// Pins of programs, by the kernel's numbers of these.
struct Programs(BTreeMap<u32, PathBuf>);

impl Programs {
    fn open(&self, id: u32) -> Result<Option<OwnedFd>, Error> {
        let open = |pin| bpf::open_pin(pin).map_err(Error::file("open the pin", pin));
        self.0.get(&id).map(|pin| open(pin)).transpose()
    }

    /// Takes them off a device. Returns whether there were any.
    fn detach(&self, netlink: &Netlink, link: &Link) -> Result<bool, Error> {
        let mut found = false;
        let places = [Direction::Ingress, Direction::Egress].map(|way| (link.index, way));
        let sitting = netlink.filter_programs(&places)?;
        for ((index, direction), program) in places.into_iter().zip(sitting) {
            if program.is_some_and(|program| self.0.contains_key(&program)) {
                found |= netlink.delete_filter(index, direction)?;
            }
        }
        if link.is_netkit() {
            for id in netkit::programs(link.index)? {
                if let Some(program) = self.open(id)? {
                    found |= netkit::detach(link.index, &link.name, program.as_fd())?;
                }
            }
        }
        for attached in &link.xdp {
            if let Some(program) = self.open(attached.program)? {
                netlink.detach_xdp(&link.into(), attached.mode, program.as_fd())?;
                found = true;
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_layouts_have_numbers() {
        assert_eq!(number("v7".as_ref()), Some(7));
        assert_eq!(number("v12".as_ref()), Some(12));
        assert_eq!(number("next-v8".as_ref()), Some(8));
        for other in ["", "v", "7", "vx", "new-7", "v7.old"] {
            assert_eq!(number(other.as_ref()), None, "{other}");
        }
    }
}

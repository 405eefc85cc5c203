//! What is in a folder of pins, and under which names.

use std::{
    fmt, fs, io,
    path::{self, Path, PathBuf},
};

use underpass_abi::map;

use crate::Error;

pub(crate) const MAPS: &str = "maps";
/// See [`crate::home`].
pub(crate) const HOME: &str = "home";
pub(crate) const PROGRAMS: &str = "programs";

/// A folder of pins.
#[derive(Debug)]
pub struct Folder(pub(super) PathBuf);

/// The pin of a map, by its name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Pin {
    /// The map's name.
    pub(crate) name: String,
    /// As in [`map::Pinned`].
    pub(crate) layout: u32,
    /// As in [`map::Pinned`].
    pub(crate) value: u32,
}

impl Pin {
    /// Reads what [`map::Pinned`] writes.
    pub(super) fn read(name: &str) -> Option<Self> {
        let mut parts = name.split('-');
        let pin = Self {
            name: parts.next()?.to_owned(),
            layout: parts.next()?.parse().ok()?,
            value: parts.next()?.parse().ok()?,
        };
        parts.next().is_none().then_some(pin)
    }

    /// Tells whether this build knows what is in the map.
    pub(crate) fn is(&self, map: &map::Pinned) -> bool {
        (self.layout, self.value) == (map.layout, map.value)
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.name, self.layout, self.value)
    }
}

impl Folder {
    /// Takes a folder of any layout.
    pub(crate) fn at(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    /// Names the place where a map of this build is pinned.
    pub(crate) fn map(&self, name: &str) -> PathBuf {
        let pin = map::pinned(name).map_or_else(|| name.to_owned(), map::Pinned::to_string);
        self.0.join(MAPS).join(pin)
    }

    /// Names the place where a map of any build is pinned.
    pub(crate) fn pin(&self, pin: &Pin) -> PathBuf {
        self.0.join(MAPS).join(pin.to_string())
    }

    /// Names the place where whichever build pinned the map of that name: before layout 8 by its name alone.
    pub(crate) fn any_map(&self, name: &str) -> Result<PathBuf, Error> {
        let folder = self.0.join(MAPS);
        let found = names(&folder)?
            .into_iter()
            .find(|pin| pin.split('-').next() == Some(name));
        Ok(found.map_or_else(|| self.map(name), |pin| folder.join(pin)))
    }

    /// Lists the maps that are pinned.
    pub(crate) fn maps(&self) -> Result<Vec<Pin>, Error> {
        let folder = self.0.join(MAPS);
        let names = names(&folder)?;
        Ok(names.iter().filter_map(|name| Pin::read(name)).collect())
    }

    /// Lists the programs that are pinned.
    pub(crate) fn programs(&self) -> Result<Vec<String>, Error> {
        names(&self.0.join(PROGRAMS))
    }

    /// Tells whether it is there.
    pub(crate) fn exists(&self) -> bool {
        self.0.exists()
    }

    /// Names the place where a program is pinned.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.0.join(PROGRAMS).join(name)
    }

    /// Names the place where the network namespace is pinned that all of it is for.
    pub(crate) fn home(&self) -> PathBuf {
        self.0.join(HOME)
    }

    /// Shows the folder to people.
    #[must_use]
    pub fn display(&self) -> path::Display<'_> {
        self.0.display()
    }
}

/// Lists what is in a folder of pins.
fn names(folder: &Path) -> Result<Vec<String>, Error> {
    let entries = match fs::read_dir(folder) {
        // Another call has just removed it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(Error::file("list", folder))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::file("list", folder))?;
        names.extend(entry.file_name().into_string());
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_pin_says_what_is_in_the_map() {
        for map in map::MAPS {
            let pin = Pin::read(&map.to_string()).expect("a pin");
            assert!(pin.name == map.name && pin.is(map), "{pin}");
        }
        for other in ["FLOWS4", "FLOWS4-1", "FLOWS4-x-176", "FLOWS4-1-176-1", ""] {
            assert_eq!(Pin::read(other), None, "{other}");
        }
    }
}

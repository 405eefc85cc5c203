//! The files below `/proc/sys/net`.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs::File,
    io::{self, Read as _, Write as _},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use nix::{
    fcntl::{self, OFlag},
    sys::stat::Mode,
};

/// Room for a number and what follows it.
const DIGITS: usize = 32;

/// Where the settings of a namespace are.
///
/// The folders `ipv4` and `ipv6` of all namespaces have the same name and the same parent, so the
/// kernel finds one among them by looking at one after the other: up to a millisecond on a node with a
/// thousand containers. They are opened once, and everything else from there.
#[derive(Debug)]
pub struct Tree {
    root: &'static Path,
    families: RefCell<BTreeMap<String, OwnedFd>>,
}

impl Tree {
    /// Takes the tree of the calling thread, which must not change its namespace while the tree is in use.
    #[must_use]
    pub fn of_this_thread() -> Self {
        Self::at(Path::new("/proc/sys/net"))
    }

    /// Takes the tree at another place: for tests.
    #[must_use]
    pub fn at(root: &'static Path) -> Self {
        Self {
            root,
            families: RefCell::default(),
        }
    }

    /// Opens a file, whose path begins with the family.
    fn open(&self, path: &Path, flags: OFlag) -> io::Result<File> {
        let mut components = path.components();
        let family = components.next().ok_or(io::ErrorKind::NotFound)?;
        let family = family.as_os_str().to_string_lossy().into_owned();
        let mut families = self.families.borrow_mut();
        if !families.contains_key(&family) {
            let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            let folder = fcntl::open(&self.root.join(&family), flags, Mode::empty())?;
            families.insert(family.clone(), folder);
        }
        let folder = &families[&family];
        let flags = flags | OFlag::O_CLOEXEC;
        let file = fcntl::openat(folder, components.as_path(), flags, Mode::empty())?;
        Ok(file.into())
    }

    /// Tells people where a file is.
    #[must_use]
    pub fn path(&self, path: &Path) -> PathBuf {
        self.root.join(path)
    }

    /// Reads a setting, without the newline after it.
    pub fn read(&self, path: &Path) -> io::Result<String> {
        let mut text = String::new();
        self.open(path, OFlag::O_RDONLY)?
            .read_to_string(&mut text)?;
        Ok(text.trim().to_owned())
    }

    /// Changes a setting.
    pub fn write(&self, path: &Path, value: &str) -> io::Result<()> {
        let mut file = self.open(path, OFlag::O_WRONLY | OFlag::O_TRUNC)?;
        file.write_all(value.as_bytes())
    }

    /// Reads a number; none if there is no such file, or no such number in it.
    pub fn number(&self, path: impl AsRef<Path>) -> Option<u32> {
        let mut file = self.open(path.as_ref(), OFlag::O_RDONLY).ok()?;
        // The kernel gives all of it at once. To read to the end would take three system calls more.
        let mut text = [0; DIGITS];
        let length = file.read(&mut text).ok()?;
        let text = std::str::from_utf8(text.get(..length)?).ok()?;
        text.trim().parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::{env, fs};

    #[test]
    fn what_is_no_number_is_none() {
        let folder = env::temp_dir().join(format!("underpass-tree-{}", std::process::id()));
        fs::create_dir(&folder).expect("the temporary folder is writable");
        for (name, text) in [
            ("seconds", "30\n"),
            ("negative", "-1\n"),
            ("word", "auto\n"),
        ] {
            fs::write(folder.join(name), text).expect("the temporary folder is writable");
        }
        let tree = Tree::at(Box::leak(env::temp_dir().into_boxed_path()));
        let name = folder.file_name().map(Path::new).expect("just named");
        assert_eq!(tree.number(name.join("seconds")), Some(30));
        for other in ["negative", "word", "missing"] {
            assert_eq!(tree.number(name.join(other)), None, "{other}");
        }
        fs::remove_dir_all(folder).expect("just written");
    }
}

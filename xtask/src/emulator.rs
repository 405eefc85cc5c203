//! What guests are started with: an emulator and a busybox, unpacked by set-up beside the machine's own packages.

use std::path::{Path, PathBuf};
use std::process::Command;

/// What Debian calls the kind of machine that guests are, and that runs them.
pub(crate) const ARCHITECTURE: &str = "amd64";
/// Where Debian's packages have libraries, before and since `/lib` became a part of `/usr`.
const LIBRARIES: [&str; 2] = ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];
/// What starts a program with the C library beside it instead of the machine's.
const LOADER: [&str; 2] = [
    "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
    "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
];
const PROGRAM: &str = "usr/bin/qemu-system-x86_64";
/// Where the emulator's own parts are.
const MODULES: &str = "usr/lib/x86_64-linux-gnu/qemu";
/// What a machine runs before its kernel.
const FIRMWARE: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];
const BUSYBOX: [&str; 2] = ["bin/busybox", "usr/bin/busybox"];

/// An emulator with all that it needs, down to the C library.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Emulator {
    root: PathBuf,
    loader: PathBuf,
    busybox: PathBuf,
}

impl Emulator {
    /// Where set-up unpacks it; `tools` is the folder of what it installs for the workspace.
    pub(crate) fn folder(tools: &Path) -> PathBuf {
        tools.join("emulator-trixie")
    }

    /// The emulator in a folder, if it is complete.
    pub(crate) fn find(root: PathBuf) -> Option<Self> {
        let first = |places: &[&str]| {
            let mut paths = places.iter().map(|place| root.join(place));
            paths.find(|path| path.is_file())
        };
        first(&[PROGRAM])?;
        let loader = first(&LOADER)?;
        let busybox = first(&BUSYBOX)?;
        Some(Self {
            root,
            loader,
            busybox,
        })
    }

    /// A busybox that needs no library.
    pub(crate) fn busybox(&self) -> &Path {
        &self.busybox
    }

    /// Appends to a command what starts the emulator.
    pub(crate) fn append_to(&self, command: &mut Command) {
        let libraries = LIBRARIES.map(|folder| self.root.join(folder).display().to_string());
        command
            .arg(&self.loader)
            .args(["--library-path", &libraries.join(":")])
            .arg(self.root.join(PROGRAM));
        // By itself it would look for its parts beside its executable, but as the kernel sees it, that is the loader.
        command.env("QEMU_MODULE_DIR", self.root.join(MODULES));
        for folder in FIRMWARE {
            command.arg("-L").arg(self.root.join(folder));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A folder with empty files.
    fn tree(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().expect("a file lies in a folder"))
                .and_then(|()| fs::write(path, []))
                .expect("a temporary folder is writable");
        }
        folder
    }

    #[test]
    fn it_is_found_where_any_release_of_debian_has_it() {
        for release in 0..LIBRARIES.len() {
            let folder = tree(&[PROGRAM, LOADER[release], BUSYBOX[release]]);
            let root = folder.path();
            let emulator = Emulator::find(root.to_owned()).expect("it is complete");
            assert_eq!(emulator.loader, root.join(LOADER[release]));
            assert_eq!(emulator.busybox(), root.join(BUSYBOX[release]));
        }
    }

    #[test]
    fn what_is_not_complete_is_not_found() {
        let all = [PROGRAM, LOADER[0], BUSYBOX[0]];
        for missing in all {
            let files: Vec<&str> = all.into_iter().filter(|&file| file != missing).collect();
            let folder = tree(&files);
            assert_eq!(
                Emulator::find(folder.path().to_owned()),
                None,
                "without {missing}"
            );
        }
    }

    #[test]
    fn it_is_started_with_nothing_of_the_machine() {
        let emulator = Emulator {
            root: "/t".into(),
            loader: "/t/loader".into(),
            busybox: "/t/busybox".into(),
        };
        let mut command = Command::new("nice");
        emulator.append_to(&mut command);
        let line: Vec<_> = command
            .get_args()
            .map(|argument| argument.to_string_lossy())
            .collect();
        assert_eq!(
            line.join(" "),
            "/t/loader --library-path /t/lib/x86_64-linux-gnu:/t/usr/lib/x86_64-linux-gnu \
             /t/usr/bin/qemu-system-x86_64 -L /t/usr/share/qemu -L /t/usr/share/seabios"
        );
        let modules = command
            .get_envs()
            .find(|(name, _)| *name == "QEMU_MODULE_DIR");
        assert_eq!(
            modules.and_then(|(_, folder)| folder?.to_str()),
            Some("/t/usr/lib/x86_64-linux-gnu/qemu")
        );
    }
}

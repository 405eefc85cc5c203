//! Debian's kernels, unpacked and kept under `.toolchain/kernels/<version of the package>`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::archive::{Archive, Suites};
use crate::emulator::ARCHITECTURE;
use crate::{process, report};

/// The package that depends on a suite's kernel. Not its `cloud` flavour, which has no 9p.
const PACKAGE: &str = "linux-image-amd64";
/// The suites that have one.
const SUITES: &Suites = &[
    (
        "Debian",
        &[
            "bullseye",
            "bookworm",
            "bookworm-backports",
            "trixie",
            "trixie-backports",
            "sid",
            "experimental",
        ],
    ),
    (
        "Debian-Security",
        &["bullseye-security", "bookworm-security", "trixie-security"],
    ),
];
/// The name of whatever kernel is the newest.
pub(super) const NEWEST: &str = "newest";

/// Folders and files of a kernel's modules that guests may need; the others are drivers of hardware they don't have.
const MODULES: [&str; 14] = [
    "modules.builtin",
    "modules.builtin.modinfo",
    "modules.order",
    "kernel/arch",
    "kernel/crypto",
    "kernel/lib",
    "kernel/net",
    "kernel/fs/9p",
    "kernel/fs/fscache",
    "kernel/fs/netfs",
    "kernel/fs/overlayfs",
    "kernel/drivers/block/virtio_blk.ko",
    "kernel/drivers/net",
    "kernel/drivers/virtio",
];

/// A kernel on this machine.
#[derive(Clone, Debug)]
pub(super) struct Kernel {
    /// As asked for: `5.10`, or `newest`.
    pub(super) name: String,
    /// Of the package.
    pub(super) version: String,
    folder: PathBuf,
    release: String,
}

impl Kernel {
    pub(super) fn image(&self) -> PathBuf {
        self.folder.join("vmlinuz")
    }

    pub(super) fn modules(&self) -> PathBuf {
        self.folder.join("lib/modules").join(&self.release)
    }

    /// `uname -r`.
    pub(super) fn release(&self) -> &str {
        &self.release
    }

    fn open(name: &str, version: &str, folder: PathBuf) -> anyhow::Result<Self> {
        let modules = folder.join("lib/modules");
        let release = fs::read_dir(&modules)
            .and_then(|mut releases| releases.next().transpose())
            .with_context(|| format!("cannot list {}", modules.display()))?
            .with_context(|| format!("{} is empty", modules.display()))?;
        Ok(Self {
            name: name.to_owned(),
            version: version.to_owned(),
            release: release.file_name().to_string_lossy().into_owned(),
            folder,
        })
    }
}

/// The kernels on this machine, and the way to more of them.
pub(super) struct Kernels {
    folder: PathBuf,
    archive: Option<Archive>,
}

impl Kernels {
    pub(super) fn at(tools: &Path) -> Self {
        Self {
            folder: tools.join("kernels"),
            archive: None,
        }
    }

    /// A kernel by its name, fetched where it is not there yet.
    pub(super) fn get(&mut self, name: &str) -> anyhow::Result<Kernel> {
        match self.cached(name) {
            Some(kernel) => Ok(kernel),
            None => self.fetch(name),
        }
    }

    /// A kernel by its name, if it is there.
    pub(super) fn cached(&self, name: &str) -> Option<Kernel> {
        let version = fs::read_to_string(self.folder.join("names").join(name)).ok()?;
        Kernel::open(name, version.trim(), self.folder.join(version.trim())).ok()
    }

    /// The same, but a newer package of it is fetched.
    pub(super) fn fetch(&mut self, name: &str) -> anyhow::Result<Kernel> {
        if self.archive.is_none() {
            report::step("reading", "the archive's index of kernels");
            let folder = self.folder.join("archive");
            self.archive = Some(Archive::open(&folder, SUITES, ARCHITECTURE)?);
        }
        let archive = self.archive.as_ref().context("the archive was opened")?;
        let versions = archive.versions(PACKAGE)?;
        let Some(version) = choose(name, &versions) else {
            bail!(
                "no suite of Debian has a kernel {name}: it has {}",
                versions.join(", ")
            );
        };
        let folder = self.folder.join(version);
        if !folder.is_dir() {
            report::step("fetching", &format!("kernel {version}"));
            let unfinished = self.folder.join(format!("{version}.new"));
            if unfinished.exists() {
                fs::remove_dir_all(&unfinished)
                    .with_context(|| format!("cannot remove {}", unfinished.display()))?;
            }
            unpack(archive, version, &unfinished)?;
            fs::rename(&unfinished, &folder)
                .with_context(|| format!("cannot rename {}", unfinished.display()))?;
        }
        let names = self.folder.join("names");
        fs::create_dir_all(&names)
            .and_then(|()| fs::write(names.join(name), version))
            .with_context(|| format!("cannot write to {}", names.display()))?;
        Kernel::open(name, version, folder)
    }
}

/// The newest version that a name stands for.
fn choose<'a>(name: &str, versions: &'a [String]) -> Option<&'a str> {
    versions.iter().map(String::as_str).find(|version| {
        name == NEWEST
            || version
                .strip_prefix(name)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '~', '-', '+']))
    })
}

/// Fetches the packages of a kernel and keeps of them what a guest needs.
fn unpack(archive: &Archive, version: &str, folder: &Path) -> anyhow::Result<()> {
    let whole = folder.join("whole");
    fs::create_dir_all(&whole).with_context(|| format!("cannot create {}", whole.display()))?;
    for package in packages(archive, version)? {
        archive.unpack(&package, version, &whole)?;
    }
    let modules = [whole.join("usr/lib/modules"), whole.join("lib/modules")]
        .iter()
        .find_map(|folder| fs::read_dir(folder).ok()?.next()?.ok())
        .with_context(|| format!("the packages of {version} have no modules"))?;
    let release = modules.file_name().to_string_lossy().into_owned();
    let image = [
        whole.join("boot").join(format!("vmlinuz-{release}")),
        modules.path().join("vmlinuz"),
    ];
    let image = image
        .iter()
        .find(|image| image.is_file())
        .with_context(|| format!("the packages of {version} have no vmlinuz"))?;
    let kept = folder.join("lib/modules").join(&release);
    fs::rename(image, folder.join("vmlinuz")).context("cannot move the kernel's image")?;
    for part in MODULES {
        let from = modules.path().join(part);
        let to = kept.join(part);
        if from.exists() {
            let parent = to.parent().unwrap_or(&kept);
            fs::create_dir_all(parent)
                .and_then(|()| fs::rename(&from, &to))
                .with_context(|| format!("cannot move {}", from.display()))?;
        }
    }
    fs::remove_dir_all(&whole).with_context(|| format!("cannot remove {}", whole.display()))?;
    // The first modules are loaded by a program that can't decompress them.
    process::run(Command::new("find").arg(&kept).args([
        "-name",
        "*.ko.xz",
        "-exec",
        "xz",
        "--decompress",
        "{}",
        "+",
    ]))?;
    let mut depmod = Command::new("depmod");
    depmod.env("PATH", process::path());
    depmod.arg("--basedir").arg(folder).arg(&release);
    // It misses lists of built-in modules that newer packages leave out; nobody here needs them.
    depmod.stderr(std::process::Stdio::null());
    process::run(&mut depmod)
}

/// Newer kernels are split into several packages of the same version.
fn packages(archive: &Archive, version: &str) -> anyhow::Result<Vec<String>> {
    let image = archive
        .depends(PACKAGE, version)?
        .into_iter()
        .find(|name| name.starts_with("linux-image-"))
        .with_context(|| format!("{PACKAGE} {version} depends on no kernel"))?;
    let mut packages: Vec<String> = archive
        .depends(&image, version)?
        .into_iter()
        .filter(|name| name.starts_with("linux-binary-") || name.starts_with("linux-modules-"))
        .collect();
    packages.push(image);
    Ok(packages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_for_the_newest_of_its_line() {
        let versions =
            ["7.3~rc7-1~exp1", "6.12.107-1", "6.1.192-2", "6.1.176-1"].map(str::to_owned);
        assert_eq!(choose("6.1", &versions), Some("6.1.192-2"));
        assert_eq!(choose("6.12", &versions), Some("6.12.107-1"));
        assert_eq!(choose("6.1.176-1", &versions), Some("6.1.176-1"));
        assert_eq!(choose("7.3", &versions), Some("7.3~rc7-1~exp1"));
        assert_eq!(choose(NEWEST, &versions), Some("7.3~rc7-1~exp1"));
        assert_eq!(choose("5.10", &versions), None);
        assert_eq!(choose("6", &versions), Some("6.12.107-1"));
    }
}

//! The compiler and the linker of the eBPF programs: where they are found and how they are called.
//!
//! Set-up (`xtask`) and build (`dataplane/build.rs`) both ask this crate, so that they can never disagree on what
//! "installed" means. It is built before anything is installed, and therefore uses the standard library alone.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fmt, fs, io};

/// The target the programs are compiled for: little-endian eBPF.
pub const TARGET: &str = "bpfel-unknown-none";

/// The objects that the dataplane embeds: the programs, and the one that finds out what the kernel can do.
pub const OBJECTS: [&str; 2] = ["underpass-ebpf", "underpass-probe"];

/// Chooses between the two compilers where both are installed: `rustup` or `debian`.
pub const CHOICE: &str = "UNDERPASS_EBPF_TOOLCHAIN";

/// Where a `core` library for [`TARGET`] comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Core {
    /// rustup's nightly compiles it from `rust-src`.
    FromSource,
    /// Debian ships it compiled, for its own compiler.
    Prebuilt,
}

/// What the eBPF build lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// No compiler with a `core` for the target.
    Compiler,
    /// No bpf-linker.
    Linker,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Compiler => "no Rust compiler with a `core` library for bpfel-unknown-none is installed: run `cargo xtask setup`",
            Self::Linker => "bpf-linker, the linker of the eBPF programs, is not installed: run `cargo xtask setup`",
        })
    }
}

/// A compiler that can build for [`TARGET`].
#[derive(Clone, Debug)]
pub struct Compiler {
    /// Where its `core` comes from.
    pub core: Core,
    /// Its cargo.
    pub cargo: PathBuf,
    /// The compiler itself.
    pub rustc: PathBuf,
}

/// All that the eBPF build needs.
#[derive(Clone, Debug)]
pub struct Toolchain {
    /// The compiler.
    pub compiler: Compiler,
    /// bpf-linker.
    pub linker: PathBuf,
}

impl Toolchain {
    /// Looks for the toolchain on this machine; `root` is the workspace.
    pub fn find(root: &Path) -> Result<Self, Missing> {
        Ok(Self {
            compiler: Compiler::find().ok_or(Missing::Compiler)?,
            linker: linker(root).ok_or(Missing::Linker)?,
        })
    }

    /// Calls `cargo <verb>` for the eBPF programs of the workspace `root`, with everything it builds below `out`.
    ///
    /// `rustflags` are added to the ones that the link needs.
    pub fn cargo(
        &self,
        verb: &str,
        root: &Path,
        out: &Path,
        rustflags: &[&str],
    ) -> io::Result<Command> {
        let mut flags = vec![
            format!("-Clinker={}", self.linker.display()),
            // aya relocates by BTF, and the verifier's log quotes source lines from it.
            "-Clink-arg=--btf".to_owned(),
            // The newest instruction set that Linux 5.10 accepts in full.
            "-Ctarget-cpu=v3".to_owned(),
            // The same object wherever the workspace lies.
            format!("--remap-path-prefix={}=.", root.display()),
        ];
        flags.extend(rustflags.iter().map(|&flag| flag.to_owned()));

        let mut command = self.compiler.cargo(root);
        command
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
            .env("LD_LIBRARY_PATH", self.compiler.llvm(out)?)
            .args([verb, "--locked", "--package", "underpass-ebpf", "--bins"])
            .args(["--features", "bpf", "--profile", "ebpf", "--target", TARGET])
            // A target folder of its own: the outer cargo holds the lock of the shared one.
            .arg("--target-dir")
            .arg(out);
        Ok(command)
    }

    /// The object file of one of [`OBJECTS`] that `cargo build` leaves below `out`.
    #[must_use]
    pub fn object(out: &Path, name: &str) -> PathBuf {
        out.join(TARGET).join("ebpf").join(name)
    }
}

impl Compiler {
    /// Finds rustup's nightly with `rust-src`, else Debian's compiler with its `core` for eBPF.
    #[must_use]
    pub fn find() -> Option<Self> {
        match env::var(CHOICE).as_deref() {
            Ok("rustup") => Self::rustup(),
            Ok("debian") => Self::debian(Path::new("/usr")),
            _ => Self::rustup().or_else(|| Self::debian(Path::new("/usr"))),
        }
    }

    /// Calls this compiler's cargo in the workspace `root`, free of what an outer cargo has set for its own.
    #[must_use]
    pub fn cargo(&self, root: &Path) -> Command {
        let mut command = self.bare(root);
        match self.core {
            Core::FromSource => command.arg("-Zbuild-std=core"),
            Core::Prebuilt => command.env("RUSTC_BOOTSTRAP", "1"),
        };
        command
    }

    /// Checks crates of the workspace `root` for another target of Linux, whose standard library it compiles from its sources.
    /// `None` says that those are not at hand.
    #[must_use]
    pub fn check_for(&self, root: &Path, target: &str) -> Option<Command> {
        if self.core != Core::FromSource {
            return None;
        }
        let mut command = self.cargo_with_std(root);
        command.args(["check", "--locked", "--target", target]);
        Some(command)
    }

    /// Calls the cargo of a compiler that has the sources of Rust's library ([`Core::FromSource`]), to compile all of it for a target of Linux. It has
    /// none of the parts that a caller may leave out: a panic says what and where, and no more.
    #[must_use]
    pub fn cargo_with_std(&self, root: &Path) -> Command {
        let mut command = self.bare(root);
        command.args(["-Zbuild-std=std,panic_abort", "-Zbuild-std-features="]);
        command
    }

    /// The folder that has these sources.
    #[must_use]
    pub fn library(&self) -> PathBuf {
        sources(self.root())
    }

    /// Where this compiler is installed: the folder above its `bin`.
    pub fn root(&self) -> &Path {
        let bin = self.rustc.parent();
        bin.and_then(Path::parent).unwrap_or(Path::new("/"))
    }

    fn bare(&self, root: &Path) -> Command {
        let mut command = Command::new(&self.cargo);
        forget_outer_build(&mut command);
        command
            .current_dir(root)
            .env("RUSTC", &self.rustc)
            // Empty means none: the workspace's wrapper links host executables.
            .env("RUSTC_WORKSPACE_WRAPPER", "");
        command
    }

    fn rustup() -> Option<Self> {
        let home = env::var_os("RUSTUP_HOME")
            .map(PathBuf::from)
            .or_else(|| Some(env::home_dir()?.join(".rustup")))?;
        Self::nightly(&home)
    }

    /// The undated nightly, else the newest dated one, that carries the sources of `core`.
    fn nightly(rustup_home: &Path) -> Option<Self> {
        let mut toolchains: Vec<PathBuf> = entries(&rustup_home.join("toolchains"))
            .filter(|(name, _)| name.starts_with("nightly-"))
            .map(|(_, path)| path)
            .collect();
        // Letters sort after digits: `nightly-x86_64-...` comes last, after `nightly-2026-...`.
        toolchains.sort();
        toolchains.into_iter().rev().find_map(|toolchain| {
            let found = Self {
                core: Core::FromSource,
                cargo: toolchain.join("bin/cargo"),
                rustc: toolchain.join("bin/rustc"),
            };
            let core = sources(&toolchain).join("library/core/Cargo.toml");
            (core.is_file() && found.cargo.is_file() && found.rustc.is_file()).then_some(found)
        })
    }

    fn debian(usr: &Path) -> Option<Self> {
        let found = Self {
            core: Core::Prebuilt,
            cargo: usr.join("bin/cargo"),
            rustc: usr.join("bin/rustc"),
        };
        let has_core = entries(&usr.join("lib/rustlib").join(TARGET).join("lib"))
            .any(|(name, _)| name.starts_with("libcore-"));
        (has_core && found.cargo.is_file() && found.rustc.is_file()).then_some(found)
    }

    /// A folder where bpf-linker, which has no LLVM of its own, finds the one of this compiler and no other.
    fn llvm(&self, out: &Path) -> io::Result<PathBuf> {
        if self.core == Core::FromSource {
            return Ok(self.rustc.with_file_name("../lib"));
        }
        // Debian keeps the LLVMs of several compilers in one folder, and bpf-linker would take the first it meets.
        let output = Command::new(&self.rustc).arg("-vV").output()?;
        let answer = String::from_utf8_lossy(&output.stdout);
        let version = llvm_version(&answer).ok_or_else(|| {
            io::Error::other(format!("{} does not name its LLVM", self.rustc.display()))
        })?;
        let name = format!("libLLVM.so.{version}");
        let library = entries(Path::new("/usr/lib"))
            .map(|(_, folder)| folder.join(&name))
            .find(|path| path.is_file())
            .ok_or_else(|| {
                io::Error::other(format!("{name} of {} is missing", self.rustc.display()))
            })?;
        let folder = out.join("llvm");
        fs::create_dir_all(&folder)?;
        match std::os::unix::fs::symlink(&library, folder.join(&name)) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
            _ => Ok(folder),
        }
    }
}

/// Where a toolchain has the sources of Rust's library, if it has them.
fn sources(toolchain: &Path) -> PathBuf {
    toolchain.join("lib/rustlib/src/rust")
}

/// `22.1` from the line `LLVM version: 22.1.8` of `rustc -vV`.
fn llvm_version(verbose: &str) -> Option<&str> {
    let full = verbose
        .lines()
        .find_map(|line| line.strip_prefix("LLVM version: "))?;
    let minor = full.find('.')? + 1;
    let end = full[minor..]
        .find('.')
        .map_or(full.len(), |dot| minor + dot);
    Some(&full[..end])
}

/// Ours, else cargo's, else whatever `PATH` has.
fn linker(root: &Path) -> Option<PathBuf> {
    let cargo_home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(env::home_dir()?.join(".cargo")));
    let path = env::var_os("PATH").unwrap_or_default();
    [root.join(".toolchain/bin")]
        .into_iter()
        .chain(cargo_home.map(|home| home.join("bin")))
        .chain(env::split_paths(&path))
        .map(|folder| folder.join("bpf-linker"))
        .find(|file| file.is_file())
}

/// Removes what an outer cargo, clippy or rustup set for its own compiler; the user's network settings stay.
fn forget_outer_build(command: &mut Command) {
    for (name, _) in env::vars_os() {
        let Some(text) = name.to_str() else { continue };
        if belongs_to_outer_build(text) {
            command.env_remove(name);
        }
    }
}

fn belongs_to_outer_build(name: &str) -> bool {
    const KEPT: [&str; 5] = [
        "CARGO_HOME",
        "CARGO_NET_",
        "CARGO_HTTP_",
        "CARGO_REGISTR",
        "CARGO_TERM_",
    ];
    const DROPPED: [&str; 4] = ["CARGO", "RUSTC", "RUSTDOC", "CLIPPY_"];
    const EXACT: [&str; 10] = [
        "RUSTFLAGS",
        "RUSTUP_TOOLCHAIN",
        "TARGET",
        "HOST",
        "OUT_DIR",
        "PROFILE",
        "OPT_LEVEL",
        "DEBUG",
        "NUM_JOBS",
        "LD_LIBRARY_PATH",
    ];
    EXACT.contains(&name)
        || DROPPED.iter().any(|prefix| name.starts_with(prefix))
            && !KEPT.iter().any(|prefix| name.starts_with(prefix))
}

/// Name and path of every entry of a folder; none if it cannot be read.
fn entries(folder: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| {
            (
                entry.file_name().to_string_lossy().into_owned(),
                entry.path(),
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_llvm_of_a_compiler_is_known_by_its_first_two_numbers() {
        assert_eq!(
            llvm_version("rustc 1.96.0\nrelease: 1.96.0\nLLVM version: 22.1.8\n"),
            Some("22.1")
        );
        assert_eq!(llvm_version("LLVM version: 22.1\n"), Some("22.1"));
        assert_eq!(llvm_version("rustc 1.96.0\n"), None);
    }

    #[test]
    fn settings_of_an_outer_build_do_not_reach_the_inner_one() {
        for name in [
            "RUSTFLAGS",
            "CARGO_ENCODED_RUSTFLAGS",
            "RUSTC",
            "RUSTC_WORKSPACE_WRAPPER",
            "RUSTUP_TOOLCHAIN",
            "CARGO_TARGET_DIR",
            "CARGO_MAKEFLAGS",
            "CARGO_FEATURE_BPF",
            "CARGO_PROFILE_RELEASE_LTO",
            "CLIPPY_ARGS",
        ] {
            assert!(belongs_to_outer_build(name), "{name} leaks");
        }
        for name in [
            "PATH",
            "HOME",
            "CARGO_HOME",
            "CARGO_NET_OFFLINE",
            "CARGO_HTTP_PROXY",
            "HTTPS_PROXY",
            "RUST_BACKTRACE",
        ] {
            assert!(!belongs_to_outer_build(name), "{name} is lost");
        }
    }

    #[test]
    fn a_nightly_counts_only_with_the_sources_of_core() -> io::Result<()> {
        let home = tempfile::tempdir()?;
        let install = |name: &str, files: &[&str]| {
            files.iter().try_for_each(|file| {
                let path = home.path().join("toolchains").join(name).join(file);
                fs::create_dir_all(path.parent().expect("a file lies in a folder"))?;
                fs::write(path, "")
            })
        };
        let whole = [
            "bin/cargo",
            "bin/rustc",
            "lib/rustlib/src/rust/library/core/Cargo.toml",
        ];
        install("stable-x86_64-unknown-linux-gnu", &whole)?;
        install("nightly-x86_64-unknown-linux-gnu", &whole[..2])?;
        assert!(Compiler::nightly(home.path()).is_none());

        install("nightly-2026-01-01-x86_64-unknown-linux-gnu", &whole)?;
        install("nightly-2025-01-01-x86_64-unknown-linux-gnu", &whole)?;
        let dated = Compiler::nightly(home.path()).expect("two dated nightlies are whole");
        assert!(dated.rustc.to_string_lossy().contains("nightly-2026-01-01"));

        install("nightly-x86_64-unknown-linux-gnu", &whole)?;
        let undated = Compiler::nightly(home.path()).expect("three nightlies are whole");
        assert!(undated.rustc.to_string_lossy().contains("nightly-x86_64"));
        Ok(())
    }

    #[test]
    fn debians_compiler_counts_only_with_its_core_for_ebpf() -> io::Result<()> {
        let usr = tempfile::tempdir()?;
        fs::create_dir_all(usr.path().join("bin"))?;
        fs::write(usr.path().join("bin/cargo"), "")?;
        fs::write(usr.path().join("bin/rustc"), "")?;
        assert!(Compiler::debian(usr.path()).is_none());
        let folder = usr.path().join("lib/rustlib").join(TARGET).join("lib");
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("libcore-8056e5e5b270ef4d.rlib"), "")?;
        let found = Compiler::debian(usr.path()).expect("compiler and core are there");
        assert_eq!(found.core, Core::Prebuilt);
        Ok(())
    }
}

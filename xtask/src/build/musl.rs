//! The plugins linked with musl, where its C library and the sources of Rust's own are at hand.
//!
//! A plugin is a process of a few milliseconds, and starting it is a part of each call. glibc looks at the processor first, by some fifty `CPUID`s, each of
//! which leaves a virtual machine; musl asks for nothing. And a standard library that is compiled here has no part that a plugin does not use
//! (docs/performance.md, "Calls").

use std::env::consts::ARCH;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use underpass_toolchain::{Compiler, Core};

use crate::process;
use crate::workspace::Workspace;

/// What links with musl.
pub(crate) struct Musl {
    compiler: Compiler,
    /// The folder of `libc.a` and of what stands around `main`.
    libraries: PathBuf,
}

/// Where Debian's `musl-dev` has its libraries.
fn libraries() -> PathBuf {
    Path::new("/usr/lib").join(format!("{ARCH}-linux-musl"))
}

/// Rust's name of such machines.
fn target() -> String {
    format!("{ARCH}-unknown-linux-musl")
}

impl Musl {
    /// What is at hand. `None` says that a part is missing; then a plugin is linked with glibc, by the compiler of everything else.
    pub(crate) fn find() -> Option<Self> {
        let compiler = Compiler::find().filter(|compiler| compiler.core == Core::FromSource)?;
        let libraries = libraries();
        libraries.join("libc.a").is_file().then_some(Self {
            compiler,
            libraries,
        })
    }

    /// Builds plugins, and puts them where the release build of all else is.
    pub(super) fn build(&self, workspace: &Workspace, names: &[&str]) -> anyhow::Result<()> {
        let folder = workspace.target.join("musl");
        let start = |file: &str| self.libraries.join(file).display().to_string();
        // Rust links with `libunwind` there, of which nothing is used: who panics aborts.
        let unwinder = folder.join("unwinder");
        fs::create_dir_all(&unwinder)
            .and_then(|()| fs::write(unwinder.join("libunwind.a"), "!<arch>\n"))
            .with_context(|| format!("cannot write to {}", unwinder.display()))?;
        let flags = [
            "-Clinker=cc".to_owned(),
            // The target's own files for the start of a program are a part of a toolchain that is installed, and not of one that is compiled.
            "-Clink-self-contained=no".to_owned(),
            "-Zpre-link-arg=-nostartfiles".to_owned(),
            format!("-Zpre-link-arg={}", start("rcrt1.o")),
            format!("-Zpre-link-arg={}", start("crti.o")),
            format!("-Clink-arg={}", start("crtn.o")),
            format!("-Lnative={}", unwinder.display()),
            format!("-Lnative={}", self.libraries.display()),
            // A twelfth of the executable, of which nothing is used either.
            "-Cforce-unwind-tables=no".to_owned(),
            // This compiler knows lints that the workspace's does not; `cargo xtask lint` is who looks at them.
            "--cap-lints=warn".to_owned(),
            // A library that is compiled here would name this machine's folders.
            format!(
                "--remap-path-prefix={}=/rust",
                self.compiler.library().display()
            ),
        ];
        let mut cargo = self.compiler.cargo_with_std(&workspace.root);
        cargo
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
            .env("CARGO_BUILD_WARNINGS", "allow")
            // Behind the verb it would take the place of what is asked for before it.
            .args(["-Zunstable-options", "build", "--release", "--locked"])
            .args(["--target", &target()])
            .arg("--target-dir")
            .arg(folder)
            .arg("--artifact-dir")
            .arg(workspace.releases());
        for name in names {
            cargo.args(["--package", name, "--bin", name]);
        }
        process::run(&mut cargo)
    }
}

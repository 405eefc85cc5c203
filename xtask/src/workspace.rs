//! Where the workspace lies, and the cargo that builds it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

/// The workspace this program was built from.
pub(crate) struct Workspace {
    /// The folder of the root `Cargo.toml`.
    pub(crate) root: PathBuf,
    /// Where cargo puts what it builds.
    pub(crate) target: PathBuf,
    cargo: PathBuf,
}

impl Workspace {
    pub(crate) fn find() -> anyhow::Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("xtask lies in no workspace: run it as `cargo xtask`")?
            .to_path_buf();
        let target = match env::var_os("CARGO_TARGET_DIR") {
            Some(folder) => env::current_dir()
                .context("the current folder is gone: change to the workspace")?
                .join(folder),
            None => root.join("target"),
        };
        let cargo = env::var_os("CARGO").map_or_else(|| "cargo".into(), PathBuf::from);
        Ok(Self {
            root,
            target,
            cargo,
        })
    }

    /// What `git` prints in the workspace, or nothing where it fails: a tree may have no history.
    pub(crate) fn git(&self, arguments: &[&str]) -> Option<String> {
        let mut git = Command::new("git");
        let output = git
            .arg("-C")
            .arg(&self.root)
            .args(arguments)
            .output()
            .ok()?;
        let printed = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        output.status.success().then_some(printed)
    }

    /// The host's cargo, in the workspace.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = Command::new(&self.cargo);
        command
            .current_dir(&self.root)
            .env("CARGO_TARGET_DIR", &self.target);
        command
    }

    /// The folder of released executables.
    pub(crate) fn releases(&self) -> PathBuf {
        self.target.join("release")
    }

    /// A released executable.
    pub(crate) fn released(&self, name: &str) -> PathBuf {
        self.releases().join(name)
    }

    /// What set-up installs for this workspace alone.
    pub(crate) fn tools(&self) -> PathBuf {
        self.root.join(".toolchain")
    }

    /// A program that set-up installs there.
    pub(crate) fn tool(&self, name: &str) -> PathBuf {
        self.tools().join("bin").join(name)
    }
}

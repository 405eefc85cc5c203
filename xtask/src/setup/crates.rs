//! Programs that are built from crates.io into the workspace's own folder of tools.

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;

use crate::workspace::Workspace;
use crate::{process, report};

/// A program of crates.io, in the one version that is known to do.
pub(super) struct Tool {
    pub(super) name: &'static str,
    pub(super) version: &'static str,
    /// What it is for, and how long its build takes.
    pub(super) why: &'static str,
}

/// What `cargo xtask lint` looks at the dependencies with.
const CHECKERS: [Tool; 2] = [
    Tool {
        name: "cargo-deny",
        version: "0.20.2",
        why: "it checks licences, sources and advisories of all dependencies (two minutes)",
    },
    Tool {
        name: "cargo-machete",
        version: "0.9.2",
        why: "it finds dependencies that nothing uses (a minute or two)",
    },
];

/// How they are built: each runs for seconds, but what their authors choose for releases (link-time optimisation of everything, in one unit)
/// takes minutes.
const QUICKLY: [(&str, &str); 4] = [
    ("CARGO_PROFILE_RELEASE_LTO", "off"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
];

/// Installs the checkers of dependencies that are not there in their version.
pub(super) fn ensure_checkers(workspace: &Workspace) -> anyhow::Result<()> {
    for tool in &CHECKERS {
        if !tool.is_there(workspace) {
            tool.install(workspace)?;
        }
    }
    Ok(())
}

impl Tool {
    fn path(&self, workspace: &Workspace) -> PathBuf {
        workspace.tool(self.name)
    }

    /// Whether set-up has installed it in this version.
    fn is_there(&self, workspace: &Workspace) -> bool {
        // cargo keeps a list of what it installed below a folder.
        let list = fs::read_to_string(workspace.tools().join(".crates.toml")).unwrap_or_default();
        self.path(workspace).exists()
            && list.contains(&format!("\"{} {} ", self.name, self.version))
    }

    /// Builds and installs it.
    pub(super) fn install(&self, workspace: &Workspace) -> anyhow::Result<()> {
        let Self { name, version, why } = self;
        report::step(
            "installing",
            &format!("{name} {version} from crates.io: {why}"),
        );
        let target = workspace.target.join(name);
        let mut cargo = workspace.cargo();
        cargo
            .args(["install", "--quiet", "--locked", "--root"])
            .arg(workspace.tools())
            .args([name, "--version", version])
            // Outside the workspace, whose settings are not for it.
            .current_dir("/")
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env("CARGO_TARGET_DIR", &target)
            .envs(QUICKLY);
        process::run(&mut cargo).with_context(|| {
            format!(
                "{name} could not be built: run `cargo install --locked --root {} {name} --version {version}` where crates.io can be reached",
                workspace.tools().display()
            )
        })?;
        fs::remove_dir_all(&target).with_context(|| format!("cannot remove {}", target.display()))
    }
}

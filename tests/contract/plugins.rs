//! Executables, ours under each of their names, and calls of them.

use std::{
    io::Write as _,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;
use underpass_tests::{
    Node,
    node::plugin,
    runtime::{Call, CniError},
};

/// The reference plugins, as Debian installs them.
pub(crate) const REFERENCE: &str = "/usr/lib/cni";

/// Each name that we answer to, with what it is a link to.
pub(crate) const NAMES: [Name; 10] = [
    Name::new("underpass", Program::Underpass),
    Name::new("ptp", Program::Underpass),
    Name::new("host-local", Program::Underpass),
    Name::new("portmap", Program::Underpass),
    Name::new("bandwidth", Program::Underpass),
    Name::new("loopback", Program::Underpass),
    Name::new("underpass-ipam", Program::Underpass),
    Name::new("underpass-0.2", Program::Underpass),
    Name::new("underpass-ipam", Program::Ipam),
    Name::new("host-local", Program::Ipam),
];

/// A name for one of our executables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Name {
    pub(crate) name: &'static str,
    program: Program,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Program {
    Underpass,
    Ipam,
}

impl Name {
    pub(crate) const fn new(name: &'static str, program: Program) -> Self {
        Self { name, program }
    }

    /// A folder in which the executable has just this name.
    pub(crate) fn install(self) -> Result<Installed> {
        let folder = TempDir::new().context("make a folder for links")?;
        let target = match self.program {
            Program::Underpass => plugin().to_owned(),
            Program::Ipam => ipam()?,
        };
        let path = folder.path().join(self.name);
        symlink(&target, &path).with_context(|| format!("link {}", path.display()))?;
        Ok(Installed { folder, path })
    }
}

/// An executable in a folder of its own, which goes with this value.
#[derive(Debug)]
pub(crate) struct Installed {
    folder: TempDir,
    pub(crate) path: PathBuf,
}

impl Installed {
    /// `CNI_PATH` in which this executable comes before the reference plugins.
    pub(crate) fn cni_path(&self) -> String {
        format!("{}:{REFERENCE}", self.folder.path().display())
    }
}

/// A reference plugin.
pub(crate) fn reference(name: &str) -> Result<PathBuf> {
    let path = Path::new(REFERENCE).join(name);
    ensure!(
        path.exists(),
        "{} is missing: install Debian's package containernetworking-plugins",
        path.display()
    );
    Ok(path)
}

/// The allocator on its own: `UNDERPASS_IPAM_BIN`, else the neighbour of the plugin under test.
fn ipam() -> Result<PathBuf> {
    let path = std::env::var_os("UNDERPASS_IPAM_BIN")
        .map_or_else(|| plugin().with_file_name("underpass-ipam"), PathBuf::from);
    path.canonicalize().with_context(|| {
        format!(
            "there is no {}: build it with `cargo xtask build`, or name one in UNDERPASS_IPAM_BIN",
            path.display()
        )
    })
}

fn command(program: &Path, call: &Call) -> Command {
    let mut command = Command::new(program);
    let vars = call.command();
    let vars = vars
        .get_envs()
        .filter_map(|(name, value)| Some((name, value?)));
    command.env_clear().envs(vars);
    command
}

/// Makes a call on a node.
pub(crate) fn run(node: &Node, program: &Path, call: &Call) -> Result<Answer> {
    let output = node
        .netns()
        .output(&mut command(program, call), call.input())?;
    Answer::of(program, output)
}

/// Makes a call where this process is, for calls that do nothing to the system.
pub(crate) fn run_here(program: &Path, call: &Call) -> Result<Answer> {
    let mut child = command(program, call)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("run {}", program.display()))?;
    // A verb that does not read its input closes the pipe.
    let _ = child
        .stdin
        .take()
        .map(|mut pipe| pipe.write_all(call.input()));
    let output = child.wait_with_output().context("wait for a plugin")?;
    Answer::of(program, output)
}

/// What a plugin answered.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    plugin: String,
    pub(crate) success: bool,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Answer {
    fn of(program: &Path, output: Output) -> Result<Self> {
        Ok(Self {
            plugin: program.display().to_string(),
            success: output.status.success(),
            stdout: String::from_utf8(output.stdout).context("a plugin printed no UTF-8")?,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// The document of a call that succeeded.
    pub(crate) fn result(&self) -> Result<Value> {
        self.succeeded()?;
        self.document()
    }

    /// Success without a document.
    pub(crate) fn silence(&self) -> Result<()> {
        self.succeeded()?;
        ensure!(
            self.stdout.is_empty(),
            "{} has no result, but it printed {:?}",
            self.plugin,
            self.stdout
        );
        Ok(())
    }

    /// The error of a call that must fail.
    pub(crate) fn error(&self) -> Result<CniError> {
        ensure!(
            !self.success,
            "{} succeeded where it must fail: {}",
            self.plugin,
            self.stdout
        );
        let document = self.document()?;
        let text = |key: &str| document[key].as_str().unwrap_or_default().to_owned();
        Ok(CniError {
            code: document["code"]
                .as_u64()
                .with_context(|| format!("an error without a code: {document}"))?,
            msg: text("msg"),
            details: text("details"),
        })
    }

    fn succeeded(&self) -> Result<()> {
        if !self.success {
            bail!(
                "{} failed, {}; its log: {}",
                self.plugin,
                self.error()?,
                self.stderr
            );
        }
        Ok(())
    }

    fn document(&self) -> Result<Value> {
        serde_json::from_str(&self.stdout).with_context(|| {
            format!(
                "{} must print exactly one JSON document, but it printed {:?}; its log: {}",
                self.plugin, self.stdout, self.stderr
            )
        })
    }
}

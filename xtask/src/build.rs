//! `cargo xtask build`: the two plugins and the agent, statically linked.

use std::fs;
use std::panic::resume_unwind;
use std::thread;

use anyhow::{Context as _, bail};
use underpass_toolchain::{self as toolchain, Toolchain};

use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{elf, process, report};

mod musl;

pub(crate) use musl::Musl;

/// What runtimes call.
pub(crate) const PLUGINS: [&str; 2] = ["underpass", "underpass-ipam"];

/// What connects the nodes of a cluster.
const AGENT: &str = "underpass-agent";

/// All that is built for nodes.
pub(crate) const EXECUTABLES: [&str; 3] = [PLUGINS[0], PLUGINS[1], AGENT];

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Build the eBPF programs alone, with all warnings shown.
    #[arg(long)]
    ebpf: bool,
}

pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.ebpf {
        return programs(workspace);
    }
    executables(workspace)?;
    for name in EXECUTABLES {
        let path = workspace.released(name);
        let size = fs::metadata(&path)
            .with_context(|| format!("the build left no {}", path.display()))?
            .len();
        report::step(
            "built",
            &format!("{} ({} KiB)", path.display(), size / 1024),
        );
    }
    Ok(())
}

/// The plugins in `target/release`, for who needs no cluster: the agent takes as long to build as all else.
pub(crate) fn plugins(workspace: &Workspace) -> anyhow::Result<()> {
    setup::ensure(workspace, Need::Build)?;
    match Musl::find() {
        Some(musl) => musl.build(workspace, &PLUGINS),
        None => release(workspace, &PLUGINS),
    }
}

/// All executables in `target/release`. Built together with the agent the plugins would have the features of
/// dependencies that only the agent asks for. Refuses what could not be given out, so that tests see it first.
pub(crate) fn executables(workspace: &Workspace) -> anyhow::Result<()> {
    plugins(workspace)?;
    // It runs for months, and has much more to do with memory, at which glibc is better.
    release(workspace, &[AGENT])?;
    for name in EXECUTABLES {
        let built = workspace.released(name);
        if let Some(fault) = elf::fault(&built)? {
            bail!("{} {fault}", built.display());
        }
    }
    Ok(())
}

/// The same, and beside it all tests: cargo keeps others out of the folder of one profile only, and where an executable is linked, which takes a
/// minute, all other processors are idle.
pub(crate) fn executables_and_tests(workspace: &Workspace) -> anyhow::Result<()> {
    setup::ensure(workspace, Need::Build)?;
    let mut tests = workspace.cargo();
    tests.args(["test", "--no-run", "--workspace", "--locked", "--quiet"]);
    thread::scope(|scope| {
        let tests = scope.spawn(|| process::run(&mut tests));
        let executables = executables(workspace);
        let tests = tests.join().unwrap_or_else(|panic| resume_unwind(panic));
        executables.and(tests)
    })
}

fn release(workspace: &Workspace, names: &[&str]) -> anyhow::Result<()> {
    let mut cargo = workspace.cargo();
    cargo.args(["build", "--release", "--locked"]);
    for name in names {
        cargo.args(["--package", name]);
    }
    process::run(&mut cargo)
}

/// The eBPF object by itself, for those who work on it: `dataplane/build.rs` hides the compiler's warnings.
fn programs(workspace: &Workspace) -> anyhow::Result<()> {
    setup::ensure(workspace, Need::Build)?;
    let out = workspace.target.join("ebpf");
    let toolchain = Toolchain::find(&workspace.root).map_err(anyhow::Error::msg)?;
    process::run(&mut toolchain.cargo("build", &workspace.root, &out, &[])?)?;
    report::step(
        "built",
        &Toolchain::object(&out, toolchain::OBJECTS[0])
            .display()
            .to_string(),
    );
    Ok(())
}

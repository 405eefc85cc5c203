//! `cargo xtask setup`: finds or installs what the other commands need. Quick and offline when nothing is missing.

use anyhow::bail;
use nix::unistd::geteuid;

use crate::report;
use crate::workspace::Workspace;

mod bpffs;
mod crates;
mod ebpf;
mod emulator;
mod packages;

/// How much of the machine a command needs. Each includes the ones before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Need {
    /// Compilers and linkers.
    Build,
    /// A bpffs to pin to, and the programs that the demonstration runs.
    Demo,
    /// The programs that tests compare with.
    Test,
    /// The emulator that runs the tests on other kernels.
    Vm,
}

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// How much to set up.
    #[arg(
        long = "for",
        value_name = "PURPOSE",
        value_enum,
        default_value = "test"
    )]
    need: Need,
}

pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> anyhow::Result<()> {
    ensure(workspace, arguments.need)?;
    for line in ebpf::describe(workspace)? {
        report::step("found", &line);
    }
    report::step("ready", "everything is in place");
    Ok(())
}

/// Installs what is missing, and says so; says nothing otherwise.
pub(crate) fn ensure(workspace: &Workspace, need: Need) -> anyhow::Result<()> {
    packages::ensure(need)?;
    ebpf::ensure(workspace)?;
    if need >= Need::Demo {
        bpffs::ensure()?;
    }
    if need >= Need::Vm {
        emulator::ensure(&workspace.tools())?;
    }
    Ok(())
}

/// Installs what the lint looks at dependencies with, where it is missing.
pub(crate) fn ensure_checkers(workspace: &Workspace) -> anyhow::Result<()> {
    crates::ensure_checkers(workspace)
}

/// Refuses a command that only root can carry out, before anything is built for it.
pub(crate) fn require_root(command: &str, why: &str) -> anyhow::Result<()> {
    if !geteuid().is_root() {
        bail!("{why}, which needs root: run `sudo --preserve-env=PATH,HOME cargo xtask {command}`");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Need;

    #[test]
    fn a_need_includes_the_lesser_ones() {
        assert!(Need::Build < Need::Demo && Need::Demo < Need::Test && Need::Test < Need::Vm);
    }
}

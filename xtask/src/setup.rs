//! `cargo xtask setup`: finds or installs what the other commands need. Quick and offline when nothing is missing.

use std::path::PathBuf;

use anyhow::bail;
use nix::unistd::geteuid;

use crate::report;
use crate::workspace::Workspace;

mod bpffs;
mod busybox;
mod crates;
mod ebpf;
mod emulator;
mod flannel;
mod kubernetes;
mod musl;
mod packages;

/// How much of the machine a command needs. Each of the first three includes the ones before it; the others include those three, and not
/// each other if they don't say so.
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
    /// The container runtimes that the tests have call the plugins.
    Runtimes,
    /// A Kubernetes, built from Debian's source. It includes the runtimes.
    Kubernetes,
}

impl Need {
    /// Whether what `other` needs is needed as well.
    pub(crate) fn includes(self, other: Self) -> bool {
        self == other
            || (other < self && other <= Self::Test)
            || (self == Self::Kubernetes && other == Self::Runtimes)
    }
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
    musl::ensure(ebpf::ensure(workspace)?);
    if need.includes(Need::Demo) {
        bpffs::ensure()?;
    }
    if need.includes(Need::Test) {
        // The tests that want it say so where it is missing, and the others need not wait for it.
        if let Err(error) = flannel::ensure(&workspace.tools()) {
            report::warn(&format!("{error:#}"));
        }
    }
    if need.includes(Need::Vm) {
        emulator::ensure(&workspace.tools())?;
    }
    if need.includes(Need::Runtimes) {
        busybox::ensure(&workspace.tools())?;
    }
    if need.includes(Need::Kubernetes) {
        kubernetes::ensure(&workspace.tools())?;
    }
    Ok(())
}

/// The static busybox that containers of the tests run, once [`Need::Runtimes`] is met.
pub(crate) fn busybox(workspace: &Workspace) -> Option<PathBuf> {
    busybox::find(&busybox::folder(&workspace.tools()))
}

/// The folder of Kubernetes' executables, once [`Need::Kubernetes`] is met.
pub(crate) fn kubernetes(workspace: &Workspace) -> Option<PathBuf> {
    kubernetes::find(&kubernetes::folder(&workspace.tools()))
}

/// The plugin `flannel` that tests have call ours, where it could be had.
pub(crate) fn flannel(workspace: &Workspace) -> Option<PathBuf> {
    let file = flannel::file(&workspace.tools());
    file.is_file().then_some(file)
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
        let all = [Need::Build, Need::Demo, Need::Test, Need::Vm];
        for (at, greater) in all.into_iter().enumerate() {
            for lesser in &all[..=at] {
                assert!(greater.includes(*lesser), "{greater:?} and {lesser:?}");
            }
            for more in &all[at + 1..] {
                assert!(!greater.includes(*more), "{greater:?} and {more:?}");
            }
        }
    }

    #[test]
    fn runtimes_need_no_emulator_and_an_emulator_no_runtimes() {
        assert!(Need::Runtimes.includes(Need::Test) && Need::Runtimes.includes(Need::Runtimes));
        assert!(!Need::Runtimes.includes(Need::Vm) && !Need::Vm.includes(Need::Runtimes));
        assert!(!Need::Test.includes(Need::Runtimes));
    }

    #[test]
    fn kubernetes_needs_a_runtime_and_no_emulator() {
        assert!(Need::Kubernetes.includes(Need::Runtimes) && Need::Kubernetes.includes(Need::Test));
        assert!(!Need::Kubernetes.includes(Need::Vm) && !Need::Runtimes.includes(Need::Kubernetes));
    }
}

//! Packages of the distribution.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use nix::unistd::geteuid;

use super::Need;
use crate::{archive, process, report};

/// How it shows that a package is there, whoever installed it.
#[derive(Clone, Copy)]
enum Evidence {
    Program(&'static str),
    File(&'static str),
    /// The C library that the C compiler would link statically.
    StaticLibc,
}

/// A package of Debian and its relatives, by which others can guess theirs.
struct Package {
    name: &'static str,
    why: &'static str,
    need: Need,
    evidence: Evidence,
}

const PACKAGES: [Package; 19] = [
    Package {
        name: "gcc",
        why: "links the executables",
        need: Need::Build,
        evidence: Evidence::Program("cc"),
    },
    Package {
        name: "libc6-dev",
        why: "has the libc.a that makes them static",
        need: Need::Build,
        evidence: Evidence::StaticLibc,
    },
    Package {
        name: "iproute2",
        why: "makes and shows devices, addresses and routes",
        need: Need::Demo,
        evidence: Evidence::Program("ip"),
    },
    Package {
        name: "nftables",
        why: "counts, filters and translates beside the programs",
        need: Need::Demo,
        evidence: Evidence::Program("nft"),
    },
    Package {
        name: "conntrack",
        why: "lists and flushes the stack's connections",
        need: Need::Demo,
        evidence: Evidence::Program("conntrack"),
    },
    Package {
        name: "g++",
        why: "compiles the fuzzer",
        need: Need::Test,
        evidence: Evidence::Program("c++"),
    },
    Package {
        name: "iputils-ping",
        why: "pings in tests",
        need: Need::Test,
        evidence: Evidence::Program("ping"),
    },
    Package {
        name: "iptables",
        why: "filters and translates in tests, for those who still use it",
        need: Need::Test,
        evidence: Evidence::Program("iptables"),
    },
    Package {
        name: "wireguard-tools",
        why: "configures an uplink of tests on kernels that have WireGuard",
        need: Need::Test,
        evidence: Evidence::Program("wg"),
    },
    Package {
        name: "ipvsadm",
        why: "configures IPVS in tests on kernels that have it",
        need: Need::Test,
        evidence: Evidence::Program("ipvsadm"),
    },
    Package {
        name: "containernetworking-plugins",
        why: "the plugins that tests chain and compare with",
        need: Need::Test,
        evidence: Evidence::File("/usr/lib/cni/host-local"),
    },
    Package {
        name: "kmod",
        why: "finds and loads the modules of other kernels",
        need: Need::Vm,
        evidence: Evidence::Program("depmod"),
    },
    Package {
        name: "xz-utils",
        why: "unpacks these modules",
        need: Need::Vm,
        evidence: Evidence::Program("xz"),
    },
    Package {
        name: "containerd",
        why: "calls the plugins, by its CRI and by its client ctr",
        need: Need::Runtimes,
        evidence: Evidence::Program("containerd"),
    },
    Package {
        name: "podman",
        why: "calls the plugins, with networks by CNI",
        need: Need::Runtimes,
        evidence: Evidence::Program("podman"),
    },
    Package {
        name: "runc",
        why: "starts the containers of both",
        need: Need::Runtimes,
        evidence: Evidence::Program("runc"),
    },
    Package {
        name: "conmon",
        why: "watches the containers of podman",
        need: Need::Runtimes,
        evidence: Evidence::Program("conmon"),
    },
    Package {
        name: "dpkg-dev",
        why: "unpacks the source of Kubernetes",
        need: Need::Kubernetes,
        evidence: Evidence::Program("dpkg-source"),
    },
    Package {
        name: "openssl",
        why: "makes the key of a cluster's service accounts",
        need: Need::Kubernetes,
        evidence: Evidence::Program("openssl"),
    },
];

/// Debian's compiler for eBPF.
pub(super) const DEBIAN_COMPILER: [&str; 3] = ["rustc-web", "cargo-web", "libstd-rust-web-dev-bpf"];

pub(super) fn ensure(need: Need) -> anyhow::Result<()> {
    let missing: Vec<&Package> = all_for(need)
        .filter(|package| !package.evidence.is_there())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = missing.iter().map(|package| package.name).collect();
    if !can_install() {
        bail!(
            "{}: run `{}`, or what does the same here",
            sentence(&missing),
            by_hand(&names)
        );
    }
    for package in &missing {
        report::step("installing", &format!("{}: {}", package.name, package.why));
    }
    install(&names)
}

fn all_for(need: Need) -> impl Iterator<Item = &'static Package> {
    PACKAGES
        .iter()
        .filter(move |package| need.includes(package.need))
}

/// Whether this process may install packages with apt.
pub(super) fn can_install() -> bool {
    geteuid().is_root() && process::on_path("apt-get")
}

/// The command a person would type.
pub(super) fn by_hand(names: &[&str]) -> String {
    format!(
        "sudo apt-get install --no-install-recommends {}",
        names.join(" ")
    )
}

/// Installs packages.
pub(super) fn install(names: &[&str]) -> anyhow::Result<()> {
    with_index(|| apt("install", names)).with_context(|| {
        format!(
            "the distribution's archive did not give {}: run `{}`",
            names.join(", "),
            by_hand(names)
        )
    })
}

/// Unpacks packages of this machine's own suites and all that they need into a folder. Installs nothing, and needs no root.
pub(super) fn unpack(names: &[&str], folder: &Path) -> anyhow::Result<()> {
    archive::unpack_all(names, folder, |options| {
        with_index(|| {
            let mut command = apt("install", names);
            command.args(options);
            command
        })
        .context("run `sudo apt-get update`")
    })
}

/// Runs an apt-get that installs; reads the archive's index first only where the one at hand does not have what it asks for.
fn with_index(command: impl Fn() -> Command) -> anyhow::Result<()> {
    let attempt = command()
        .stderr(Stdio::null())
        .status()
        .context("cannot start apt-get")?;
    if attempt.success() {
        return Ok(());
    }
    report::step("updating", "the package index");
    // A single source that does not answer must not stand in the way of the others.
    if let Err(error) = process::run(&mut apt("update", &[])) {
        report::warn(&format!("{error:#}"));
    }
    process::run(&mut command())
}

fn apt(verb: &str, names: &[&str]) -> Command {
    let mut command = Command::new("apt-get");
    command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["-qq", "--option", "DPkg::Lock::Timeout=120", verb])
        .stdin(Stdio::null())
        // The report is ours, and standard output is for results.
        .stdout(Stdio::null());
    if verb == "install" {
        // Nothing that a person has chosen is taken away to make room.
        command
            .args(["--yes", "--no-install-recommends", "--no-remove"])
            .args(names);
    }
    command
}

impl Evidence {
    fn is_there(self) -> bool {
        match self {
            Self::Program(name) => process::on_path(name),
            Self::File(path) => Path::new(path).exists(),
            Self::StaticLibc => Command::new("cc")
                .arg("-print-file-name=libc.a")
                .output()
                // A compiler that does not find it repeats the bare name.
                .is_ok_and(|output| output.stdout.starts_with(b"/")),
        }
    }
}

fn sentence(missing: &[&Package]) -> String {
    let mut text = String::new();
    for package in missing {
        let separator = if text.is_empty() { "" } else { ", " };
        let _ = write!(text, "{separator}{} ({})", package.name, package.why);
    }
    let verb = if missing.len() == 1 { "is" } else { "are" };
    text + " " + verb + " not installed"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_its_purpose() {
        let one = sentence(&[&PACKAGES[0]]);
        assert_eq!(one, "gcc (links the executables) is not installed");
        let two = sentence(&[&PACKAGES[0], &PACKAGES[4]]);
        assert_eq!(
            two,
            "gcc (links the executables), conntrack (lists and flushes the stack's connections) are not installed"
        );
    }

    #[test]
    fn evidence_tells_present_from_absent() {
        assert!(Evidence::Program("sh").is_there());
        assert!(!Evidence::Program("no-such-program-anywhere").is_there());
        assert!(Evidence::File("/proc/self/exe").is_there());
        assert!(!Evidence::File("/proc/self/no-such-file").is_there());
    }

    fn names_for(need: Need) -> Vec<&'static str> {
        all_for(need).map(|package| package.name).collect()
    }

    #[test]
    fn a_build_asks_for_no_test_tools() {
        assert_eq!(names_for(Need::Build), ["gcc", "libc6-dev"]);
    }

    #[test]
    fn the_demonstration_asks_for_what_it_runs_and_no_more() {
        assert_eq!(
            names_for(Need::Demo),
            ["gcc", "libc6-dev", "iproute2", "nftables", "conntrack"]
        );
    }
}

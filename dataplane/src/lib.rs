//! The eBPF side of a node: programs and maps, loaded once and pinned, opened by every call after
//! that, and attached to devices.
//!
//! It knows devices, maps and the kernel, and neither CNI nor how an attachment is named.

use std::{
    io,
    path::{Path, PathBuf},
};

pub mod attach;
pub mod bpf;
pub mod feature;
mod home;
pub mod kernel;
pub mod layout;
pub mod lock;
pub mod map;
pub mod netkit;
pub mod object;
pub mod pin;
pub mod policy;
pub mod port;
pub mod test_run;

pub use map::Maps;
pub use pin::{Loaded, Pins};

/// Why the dataplane can't be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// bpfRoot is somewhere else.
    #[error(
        "bpfRoot {} is not on a bpffs: mount one with `mount -t bpf bpf /sys/fs/bpf`, or set bpfRoot to a folder of one",
        .0.display()
    )]
    NotBpffs(PathBuf),
    /// Nothing is pinned, and the caller must not load.
    #[error("no programs are loaded at {}: the first ADD loads them", .0.display())]
    NotLoaded(PathBuf),
    /// What is pinned belongs to another network namespace.
    #[error(
        "bpfRoot {} has the programs of another network namespace, net:[{namespace}], which still exists: \
         two nodes can't share them; set another bpfRoot here, or mount a bpffs of this node's own there",
        root.display()
    )]
    Elsewhere {
        /// The folder of pins.
        root: PathBuf,
        /// The inode number of the other namespace.
        namespace: u32,
    },
    /// A device needs a program that is not loaded, beside those of another build.
    #[error(
        "another build of underpass has loaded the programs at {}, and {programs} of this one can't be added: \
         put that executable back, or detach all containers and run `underpass unload`; a reboot does both",
        root.display()
    )]
    OtherBuild {
        /// The folder of pins.
        root: PathBuf,
        /// The programs that are needed.
        programs: String,
    },
    /// A file or folder.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The object, as a whole.
    #[error("cannot load the eBPF object: {source}{}", cause(source))]
    Object {
        /// From aya.
        #[from]
        source: aya::EbpfError,
    },
    /// The kernel refuses what every one that is supported takes.
    #[error(
        "Linux {0} refused a map, program or type description of a few bytes, as every Linux since 5.10 takes it: \
         repeat the call; if that does not help, raise the memory limit of the cgroup that the runtime is in, or lift the restriction on bpf(2)"
    )]
    Unusual(String),
    /// A program.
    #[error("program {name}: {source}{}", cause(source.as_ref()))]
    Program {
        /// The name, one of [`underpass_abi::map::PROGRAMS`].
        name: &'static str,
        /// From aya, with the verifier's log where there is one.
        source: Box<aya::programs::ProgramError>,
    },
    /// A map.
    #[error("map {name}: {source}{}", remedy(source))]
    Map {
        /// The name, one of [`underpass_abi::map::MAPS`].
        name: &'static str,
        /// From aya.
        source: Box<aya::maps::MapError>,
    },
    /// A device or a filter.
    #[error(transparent)]
    Netlink(#[from] underpass_netlink::Error),
    /// The entries of a map, all together.
    #[error("cannot list the map {name}: {source}")]
    List {
        /// The name, one of [`underpass_abi::map::MAPS`].
        name: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The map of pods that take frames.
    #[error("map XDP_PODS: {0}")]
    XdpPods(#[from] aya::maps::xdp::XdpMapError),
    /// The program of a netkit pair.
    #[error("cannot {action} {device}: {source}")]
    Netkit {
        /// What was tried.
        action: &'static str,
        /// With what.
        device: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A map or program could not be pinned.
    #[error("cannot pin {name}: {source}{}", cause(source.as_ref()))]
    Pin {
        /// The map or program.
        name: &'static str,
        /// From aya.
        source: Box<aya::pin::PinError>,
    },
    /// The object lacks something that this binary was built to use.
    #[error("the eBPF object has no {0}: this build is broken, build it again")]
    Missing(&'static str),
}

/// Says what to do about the kernel's refusal to change a map.
fn remedy(source: &aya::maps::MapError) -> String {
    let aya::maps::MapError::SyscallError(error) = source else {
        return cause(source);
    };
    let known = match error.io_error.raw_os_error() {
        Some(libc::E2BIG) => {
            ": the map is full; detach containers that are not needed (`underpass status` lists them), or have GC remove what is left of dead ones"
        }
        Some(libc::ENOMEM) => {
            ": the kernel has no memory for the entry; raise the memory limit of the cgroup that the runtime is in"
        }
        Some(libc::EPERM) => {
            ": run it as root in the initial user namespace, with CAP_BPF and CAP_NET_ADMIN"
        }
        _ => return cause(source),
    };
    known.to_owned()
}

/// Adds what the kernel said, where the library's own words leave that out.
fn cause(error: &(dyn std::error::Error + 'static)) -> String {
    let said = error.to_string();
    let mut added = String::new();
    let mut next = error.source();
    while let Some(source) = next {
        let words = source.to_string();
        if !said.contains(&words) && !added.contains(&words) {
            added = format!("{added}: {words}");
        }
        next = source.source();
    }
    added
}

/// Tells whether something had to be put right.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Changed {
    /// It was not as it should be.
    Yes,
    /// It was.
    No,
}

impl Error {
    fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::File {
            action,
            path: path.to_owned(),
            source,
        }
    }

    fn program<E: Into<aya::programs::ProgramError>>(name: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Program {
            name,
            source: Box::new(source.into()),
        }
    }

    fn pin(name: &'static str) -> impl FnOnce(aya::pin::PinError) -> Self {
        move |source| Self::Pin {
            name,
            source: Box::new(source),
        }
    }

    fn map(name: &'static str) -> impl FnOnce(aya::maps::MapError) -> Self {
        move |source| Self::Map {
            name,
            source: Box::new(source),
        }
    }
}

#[cfg(test)]
mod tests {
    use aya::{maps::MapError, sys::SyscallError};

    use super::*;

    #[test]
    fn a_full_map_says_what_to_do() {
        let refused = |errno| {
            let error = SyscallError {
                call: "bpf_map_update_elem",
                io_error: io::Error::from_raw_os_error(errno),
            };
            Error::map("OWNERS")(MapError::from(error)).to_string()
        };
        let full = refused(libc::E2BIG);
        assert!(full.starts_with("map OWNERS: "), "{full}");
        assert!(full.contains("the map is full"), "{full}");
        assert!(refused(libc::ENOMEM).contains("memory limit"));
        assert!(refused(libc::EPERM).contains("CAP_BPF"));
        let other = refused(libc::EBUSY);
        assert!(
            other.contains("resource busy") && !other.contains(';'),
            "{other}"
        );
    }
}

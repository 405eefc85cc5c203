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
mod memory;
pub mod netkit;
pub mod object;
pub mod pin;
pub mod policy;
pub mod port;
pub mod raw_map;
mod refusal;
pub mod tcx;
pub mod test_run;
pub mod upgrade;

pub use map::Maps;
pub use pin::{Loaded, Pins, mount_command};

use refusal::{Refusal, file_remedy, remedy, upgrade_remedy};

/// Why the dataplane can't be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// bpfRoot is somewhere else.
    #[error(
        "bpfRoot {} is not on a bpffs: mount one with `{}`, or set bpfRoot to a folder of one",
        .0.display(),
        mount_command(.0)
    )]
    NotBpffs(PathBuf),
    /// Nothing is pinned, and the caller must not load.
    #[error(
        "no programs are loaded at {}: the first ADD or `underpass load` loads them; name the folder with --bpf-root if they are in another",
        .0.display()
    )]
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
    /// A device serves the containers of another bpfRoot.
    #[error(
        "{device} has the programs of another bpfRoot, {}, to which {attached} {} of this node: a device serves one; \
         set bpfRoot to that one in all networks of the node, or detach its containers and run `underpass --bpf-root {} unload`",
        root.display(), if *attached == 1 { "container is attached" } else { "containers are attached" }, root.display()
    )]
    Claimed {
        /// The uplink, or `lo`.
        device: String,
        /// The other folder of pins.
        root: PathBuf,
        /// How many containers it has.
        attached: usize,
    },
    /// A device needs a program that is not loaded, beside those of another build.
    #[error(
        "another build of underpass has loaded the programs at {}, and {programs} of this one can't be added: {}",
        root.display(), upgrade_remedy(root)
    )]
    OtherBuild {
        /// The folder of pins.
        root: PathBuf,
        /// The programs that are needed.
        programs: String,
    },
    /// What is pinned are maps of another build, whose content is another.
    #[error(
        "another build of underpass has loaded what is at {}, and has other entries in {maps}: {}",
        root.display(), upgrade_remedy(root)
    )]
    OtherLayout {
        /// The folder of pins.
        root: PathBuf,
        /// The maps.
        maps: String,
    },
    /// This build can't take over.
    #[error(
        "this build can't take over what another one has loaded at {}, and nothing was changed: {reason}; \
         put that executable back; or drain the node with it, run `underpass unload`, and install this one",
        root.display()
    )]
    NotUpgradable {
        /// The folder of pins.
        root: PathBuf,
        /// What stands against it.
        reason: String,
    },
    /// Calls that began before an upgrade do not end.
    #[error(
        "nothing was changed: calls of the plugin have had maps open for half a minute, which an upgrade waits for: \
         `lsof {}` names them; end them, or try again", .0.display()
    )]
    Busy(PathBuf),
    /// Calls that were there before do not end.
    #[error(
        "calls of the plugin have been under way for half a minute, and what they are at was left alone: \
         `lsof {}` names them; end them, or try again", .0.display()
    )]
    UnderWay(PathBuf),
    /// What only the stack can ask, and the kernel does not tell of.
    #[error(
        "cannot tell whether the node has policies of IPsec: {}: ask as root in the user namespace of the node, with CAP_NET_ADMIN",
        io::Error::from_raw_os_error(*.0)
    )]
    IpsecUnknown(i32),
    /// A file or folder.
    #[error("cannot {action} {}: {source}{}", path.display(), file_remedy(source, path))]
    File {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The object, as a whole.
    #[error("cannot load the eBPF object: {}", Refusal(.0))]
    Object(#[from] aya::EbpfError),
    /// The kernel refuses what every one that is supported takes.
    #[error(
        "Linux {0} refused a map, program or type description of a few bytes, as every Linux since 5.10 takes it: \
         repeat the call; if that does not help, raise the memory limit of the cgroup that the runtime is in, or lift the restriction on bpf(2)"
    )]
    Unusual(String),
    /// Programs of one CPU are not alone with what they keep for it.
    #[error(
        "Linux {0} is a real-time kernel (PREEMPT_RT) that lets programs for packets interrupt each other, and one packet could get the addresses of another: \
         boot one without PREEMPT_RT, or one that is built with CONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y and has its configuration in /boot/config-{0}"
    )]
    Interrupted(String),
    /// The control group of this process has too little memory for it.
    #[error(
        "what is loaded counts against the control group of who loads it: this one may use {} MiB of memory, and loading may take {} MiB: \
         run `underpass load` where there is no such limit, at boot for instance, or raise it",
        limit >> 20, needed.div_ceil(1 << 20)
    )]
    Cramped {
        /// What the group may use, in bytes.
        limit: u64,
        /// What loading may take, in bytes.
        needed: u64,
    },
    /// A program.
    #[error("program {name}: {}", Refusal(source.as_ref()))]
    Program {
        /// The name, one of [`underpass_abi::map::PROGRAMS`].
        name: &'static str,
        /// From aya, with the verifier's log where there is one.
        source: Box<aya::programs::ProgramError>,
    },
    /// A map.
    #[error("map {name}: {}", Refusal(source.as_ref()))]
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
    #[error("cannot list the map {name}: {source}{}", remedy(source))]
    List {
        /// The name, one of [`underpass_abi::map::MAPS`].
        name: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The map of pods that take frames.
    #[error("map XDP_PODS: {}", Refusal(.0))]
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
    #[error("cannot pin {name}: {}", Refusal(source.as_ref()))]
    Pin {
        /// The map or program.
        name: &'static str,
        /// From aya.
        source: Box<aya::pin::PinError>,
    },
    /// There is no thread to be had to load a program.
    #[error(
        "cannot start a thread to load a program: {0}: raise the limit of processes of the runtime (RLIMIT_NPROC, pids.max of its cgroup)"
    )]
    Thread(io::Error),
    /// The object lacks something that this binary was built to use.
    #[error("the eBPF object has no {0}: this build is broken, build it again")]
    Missing(&'static str),
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

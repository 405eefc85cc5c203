//! What can go wrong, and what the runtime is told about it.

use std::{io, net::IpAddr, path::PathBuf};

use underpass_cni::{Code, Error as CniError};
use underpass_dataplane as dataplane;
use underpass_netlink::{self as netlink, netns};

use crate::{finding::Findings, identity::Identity};

/// Code for a CHECK that found something wrong; the contract leaves 100 and up to plugins.
const CODE_BROKEN: u32 = 100;
/// Code for an ADD of something that is there already.
const CODE_TAKEN: u32 = 101;

/// Everything that a verb or a command can fail with.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Config, environment or IPAM: already in the contract's words.
    #[error(transparent)]
    Contract(#[from] CniError),
    /// A device, address, route, neighbour or filter.
    #[error(transparent)]
    Netlink(#[from] netlink::Error),
    /// The container's network namespace.
    #[error(transparent)]
    Netns(#[from] netns::Error),
    /// Programs, maps, pins.
    #[error(transparent)]
    Dataplane(dataplane::Error),
    /// A setting below `/proc/sys`.
    #[error(
        "cannot {action} {}: {source}: it has to be {wanted}; {}",
        path.display(), setting_remedy(source)
    )]
    Sysctl {
        /// `read` or `set`.
        action: &'static str,
        /// The setting's file.
        path: PathBuf,
        /// The value that it must have.
        wanted: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The container's namespace is not there.
    #[error(
        "failed to open netns {0:?}: no such file: the container is gone, or the runtime gave a wrong path"
    )]
    NoNetns(PathBuf),
    /// ADD without DEL between.
    #[error(
        "{ifname} of container {container} is already attached to network {network}, or another ADD is at it: DEL it first"
    )]
    Attached {
        /// The network.
        network: String,
        /// The container.
        container: String,
        /// The interface.
        ifname: String,
    },
    /// The container has an interface of that name.
    #[error(
        "interface {0} already exists in the container, and is none of this plugin's attachment: delete it, or ask for another CNI_IFNAME"
    )]
    NameTaken(String),
    /// The node has a device of that name.
    #[error(
        "device {0} already exists on the node, and is none of this plugin's: delete or rename it (`ip link`)"
    )]
    HostNameTaken(String),
    /// A living container has the address.
    #[error(
        "{address} is the address of a container already, behind the device {device}: DEL that first, or ask for another address; \
         if its lease was removed while it lives, repeat the call, which gets the next one"
    )]
    AddressTaken {
        /// The address that was leased.
        address: IpAddr,
        /// The host's end of the pair by which it is reached.
        device: String,
    },
    /// The node has a route for it that is none of ours.
    #[error(
        "the node has a route to {address} already, {}, which is somebody else's: remove that route, or keep the address out of what the IPAM gives",
        device.as_ref().map_or_else(|| "by no device (blackhole, unreachable or prohibit)".to_owned(), |device| format!("by the device {device}"))
    )]
    RouteTaken {
        /// The address that was leased.
        address: IpAddr,
        /// Where the route leads, if it does.
        device: Option<String>,
    },
    /// The lease went while the ADD was under way.
    #[error(
        "{0} was leased to the container, and is no more: a DEL of it came during this ADD, or somebody removed the lease; repeat the ADD if the container is to be attached"
    )]
    LeaseLost(IpAddr),
    /// What the programs know of the container went while the ADD was under way.
    #[error(
        "the container was detached while it was being attached: a DEL of it came during this ADD, or somebody else deleted its device; repeat the ADD if the container is to be attached"
    )]
    AttachmentLost,
    /// An IPAM plugin that answered without an address.
    #[error(
        "IPAM plugin returned missing IP config: {0:?} gave no address; correct its part of the config, ipam"
    )]
    NoAddress(String),
    /// CHECK found something wrong.
    #[error("{0}")]
    Broken(Findings),
    /// Several things failed, each independent of the others.
    #[error("{}", join(.0))]
    Several(Vec<Error>),
}

impl Error {
    /// One error of many; none if there are none.
    pub fn collect(errors: Vec<Self>) -> Result<(), Self> {
        let mut errors = errors;
        match errors.len() {
            0 => Ok(()),
            1 => Err(errors.remove(0)),
            _ => Err(Self::Several(errors)),
        }
    }

    /// The attachment is there already.
    pub(crate) fn attached(identity: &Identity) -> Self {
        let Identity {
            network,
            container,
            ifname,
        } = identity.clone();
        Self::Attached {
            network,
            container,
            ifname,
        }
    }

    /// Says what to do, where the text does not.
    fn remedy(&self) -> &'static str {
        match self {
            // Each of its findings is a fact; who changed it, nobody knows.
            Self::Broken(_) => {
                "what differs was changed after the ADD: put it back, or delete and recreate the container"
            }
            _ => "",
        }
    }

    fn code(&self) -> Code {
        match self {
            Self::Contract(error) => error.code,
            Self::Netns(_) | Self::NoNetns(_) => Code::InvalidNetns,
            Self::Dataplane(_) | Self::Sysctl { .. } => Code::Io,
            Self::Netlink(_) | Self::NoAddress(_) => Code::Internal,
            Self::Attached { .. } | Self::NameTaken(_) | Self::HostNameTaken(_) => {
                Code::Other(CODE_TAKEN)
            }
            // The other container may go; another lease is free.
            Self::AddressTaken { .. }
            | Self::RouteTaken { .. }
            | Self::LeaseLost(_)
            | Self::AttachmentLost => Code::TryAgainLater,
            Self::Broken(_) => Code::Other(CODE_BROKEN),
            Self::Several(errors) => errors.first().map_or(Code::Internal, Self::code),
        }
    }
}

impl From<dataplane::Error> for Error {
    fn from(error: dataplane::Error) -> Self {
        match error {
            dataplane::Error::Netlink(error) => Self::Netlink(error),
            error => Self::Dataplane(error),
        }
    }
}

impl From<Error> for CniError {
    fn from(error: Error) -> Self {
        match error {
            Error::Contract(error) => error,
            error => Self::new(error.code(), error.to_string()).with_details(error.remedy()),
        }
    }
}

fn setting_remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            "make /proc/sys writable for the runtime, or set it before"
        }
        io::ErrorKind::NotFound => {
            "this kernel does not have it (is IPv6 off, or /proc hidden?); leave the family out of the network, or turn it on"
        }
        _ => "set it before",
    }
}

fn join(errors: &[Error]) -> String {
    let texts: Vec<_> = errors.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

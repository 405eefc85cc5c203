//! What CHECK and STATUS find wrong with an attachment.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use ipnet::IpNet;
use underpass_abi::port::HostPort;
use underpass_dataplane::{attach::Place, port::Text};
use underpass_netlink::{Mac, qdisc::Tbf};

use crate::error::Error;

/// One thing that is not as the attachment needs it.
#[derive(Debug, thiserror::Error)]
pub enum Finding {
    /// The IPAM says so.
    #[error("{0}")]
    Lease(Box<Error>),
    /// The host's end is gone.
    #[error("device {0} of the host is missing")]
    NoHostEnd(String),
    /// The container's end is gone.
    #[error("interface {0} is missing in the container")]
    NoContainerEnd(String),
    /// The two are ends of different pairs.
    #[error("{container} in the container is not the peer of {host}")]
    NotPaired {
        /// The container's end.
        container: String,
        /// The host's end.
        host: String,
    },
    /// A device takes part in nothing.
    #[error("{0} is down")]
    Down(String),
    /// The container's end has another MAC than the runtime remembers.
    #[error("{container} in the container has the MAC {actual}, prevResult says {remembered}")]
    OtherMac {
        /// The container's end.
        container: String,
        /// The MAC that it has.
        actual: Mac,
        /// The MAC that it should have.
        remembered: String,
    },
    /// A setting below `/proc/sys` has another value.
    #[error("{} is {actual} {place}, and has to be {wanted}", path.display())]
    Setting {
        /// The setting's file.
        path: PathBuf,
        /// In which namespace.
        place: &'static str,
        /// The value that it has.
        actual: String,
        /// The value that it should have.
        wanted: &'static str,
    },
    /// The container's end lacks an address.
    #[error("{container} does not have the address {address}")]
    NoAddress {
        /// The container's end.
        container: String,
        /// The address.
        address: IpNet,
    },
    /// There is no device to masquerade at; these names were looked for.
    #[error(
        "ipMasq is on, and what leaves the node has the containers' own addresses: {}",
        if .0.is_empty() {
            "no device is an uplink by its default route or its address, as bridges are only if \"uplinks\" names them".to_owned()
        } else {
            format!("no device is an uplink, as \"uplinks\" has only {}; correct it, or leave it out", .0.join(", "))
        }
    )]
    NoUplink(Vec<String>),
    /// The container has to ask where its gateway is.
    #[error(
        "the container has no permanent neighbour {gateway} at {mac} on {container}, and asks for it: somebody has set the interface's MAC, as `tuning` does, or had it down"
    )]
    NoGateway {
        /// The gateway's address.
        gateway: IpAddr,
        /// The MAC of the host's end.
        mac: Mac,
        /// The container's end.
        container: String,
    },
    /// The container sends packets for its gateway to somebody else.
    #[error(
        "the container has the permanent neighbour {gateway} at {mac} on {container}, but {host} has {host_mac}"
    )]
    OtherGateway {
        /// The gateway's address.
        gateway: IpAddr,
        /// The MAC that it has for the container.
        mac: Mac,
        /// The container's end.
        container: String,
        /// The host's end.
        host: String,
        /// The MAC of the host's end.
        host_mac: Mac,
    },
    /// The container does not know that its gateway is on the link.
    #[error("the container does not find its gateway {gateway} on {container}: the route is gone")]
    NoRouteToGateway {
        /// The gateway's address.
        gateway: IpAddr,
        /// The container's end.
        container: String,
    },
    /// The container lacks a route.
    #[error("the container has no route to {route} by {container}")]
    NoRoute {
        /// The destination, and what else tells the route from others.
        route: String,
        /// The container's end.
        container: String,
    },
    /// A route of the container has another attribute.
    #[error(
        "the container's route to {route} by {container} has {}, and has to have the {attribute} {wanted}",
        actual.map_or_else(|| format!("no {attribute}"), |actual| format!("the {attribute} {actual}"))
    )]
    OtherRoute {
        /// The destination, and what else tells the route from others.
        route: String,
        /// The container's end.
        container: String,
        /// `mtu` or `advmss`.
        attribute: &'static str,
        /// The value that it has.
        actual: Option<u32>,
        /// The value that it should have.
        wanted: u32,
    },
    /// The host lacks the route to an address of the container.
    #[error("the host has no route to {address} by {host}")]
    NoHostRoute {
        /// The container's address.
        address: IpAddr,
        /// The host's end.
        host: String,
    },
    /// The host has to ask where an address of the container is.
    #[error("the host has no permanent neighbour {address} at {mac} on {host}")]
    NoNeighbour {
        /// The container's address.
        address: IpAddr,
        /// The MAC of the container's end.
        mac: Mac,
        /// The host's end.
        host: String,
    },
    /// A direction is not limited.
    #[error("{device} has no token bucket filter: {direction} is not limited to {rate} bit/s")]
    NotShaped {
        /// The end that has no filter.
        device: String,
        /// `ingress` or `egress`, seen from the container.
        direction: &'static str,
        /// The limit, in bits per second.
        rate: u64,
    },
    /// A direction has another limit.
    #[error("{direction} is limited to {actual} bit/s on {device}, not to {rate}")]
    OtherRate {
        /// The end that has the filter.
        device: String,
        /// `ingress` or `egress`, seen from the container.
        direction: &'static str,
        /// The limit that it has, in bits per second.
        actual: u128,
        /// The limit that it should have, in bits per second.
        rate: u64,
    },
    /// A direction has another bucket or queue.
    #[error(
        "the token bucket filter on {device} has a buffer of {} ticks and a limit of {} bytes, not {} and {}",
        actual.buffer, actual.limit, wanted.buffer, wanted.limit
    )]
    OtherBucket {
        /// The end that has the filter.
        device: String,
        /// The filter that it has.
        actual: Tbf,
        /// The filter that it should have.
        wanted: Tbf,
    },
    /// The programs don't know of the limit.
    #[error("the map DEVICES does not say that {0} is shaped: the bypass goes past its limit")]
    ShapingUnknown(String),
    /// No call has loaded the programs, or somebody unloaded them.
    #[error("no programs are loaded at {}", .0.display())]
    NotLoaded(PathBuf),
    /// A container has outlived the maps.
    #[error(
        "{device} leads to a container that no map at {} knows: its programs were unloaded, or the bpffs was wiped or mounted anew; recreate the container",
        root.display()
    )]
    LeftBehind {
        /// The host's end.
        device: String,
        /// Where the pins should be.
        root: PathBuf,
    },
    /// The maps don't know the attachment.
    #[error("the map OWNERS has no entry for the attachment")]
    UnknownOwner,
    /// The maps know the attachment by another device.
    #[error("the map OWNERS names another device than {0}")]
    OtherOwner(String),
    /// The programs don't know the host's end.
    #[error("the map DEVICES has no entry for {0}")]
    UnknownDevice(String),
    /// The programs know the ends by other MACs.
    #[error("the map DEVICES has other MACs than {host} and {container}")]
    OtherMacs {
        /// The host's end.
        host: String,
        /// The container's end.
        container: String,
    },
    /// The host's end has another MTU than the ADD gave it, which the programs go by.
    #[error("{host} has the MTU {actual}, and has to have {wanted}")]
    OtherMtu {
        /// The host's end.
        host: String,
        /// The MTU that it has, in bytes.
        actual: u32,
        /// The MTU that it should have, in bytes.
        wanted: u32,
    },
    /// The programs don't know that the device leads to containers of a bridge.
    #[error("the map DEVICES does not know {device} with the gateway's MAC {mac}")]
    UnknownGateway {
        /// The host's end, or the bridge.
        device: String,
        /// The MAC of the device by which the host reaches the container.
        mac: Mac,
    },
    /// The programs know an uplink as it was.
    #[error(
        "the map DEVICES has other addresses, MTU, MAC or reverse path filter than the uplink {0}: `underpass apply` corrects it, as the next ADD or GC does"
    )]
    OtherUplink(String),
    /// The programs sit on a device whose packets pass those of an uplink as well.
    #[error(
        "the programs are attached to {0}, which has become a part of another uplink: packets are translated twice; `underpass apply` corrects it, as the next ADD or GC does"
    )]
    PartOfUplink(String),
    /// The programs keep containers out of other tunnels.
    #[error(
        "the map STATE has other tunnels than the node is an end of: `underpass apply` corrects it, as the next ADD or GC does"
    )]
    OtherTunnels,
    /// The programs send an address elsewhere.
    #[error("the map ENDPOINTS does not send {address} to {host}")]
    OtherEndpoint {
        /// The container's address.
        address: IpAddr,
        /// The host's end.
        host: String,
    },
    /// XDP knows nothing of the container.
    #[error("the map XDP_PODS does not have {0}: XDP sends it nothing")]
    NotInXdp(String),
    /// A program is not where it belongs.
    #[error(
        "program {} is not attached to the {} of {device}: `underpass apply` puts it back on an uplink and on lo, as the next ADD or GC does; a container with its device has to be recreated",
        place.program, place.hook.name()
    )]
    NotAttached {
        /// The program and its place.
        place: Place,
        /// The device.
        device: String,
    },
    /// Nobody serves a host port.
    #[error("host port {} is not mapped to anybody", Text(.0))]
    NotMapped(HostPort),
    /// Somebody else serves a host port.
    #[error(
        "host port {} is served by another container, at {leads_to}: the newest mapping of a port counts",
        Text(port)
    )]
    OtherServer {
        /// The host port.
        port: HostPort,
        /// The place in the other container.
        leads_to: SocketAddr,
    },
    /// A host port leads to another place.
    #[error(
        "host port {} leads to {leads_to} by device number {index}, not to {wanted} by {host}",
        Text(port)
    )]
    OtherDestination {
        /// The host port.
        port: HostPort,
        /// The place that it leads to.
        leads_to: SocketAddr,
        /// The device by which it does.
        index: u32,
        /// The place that it should lead to.
        wanted: SocketAddr,
        /// The host's end.
        host: String,
    },
}

impl Finding {
    /// Makes findings of the programs that are missing on a device.
    pub(crate) fn not_attached(
        missing: Vec<(u32, Place)>,
        device: &str,
    ) -> impl Iterator<Item = Self> {
        missing
            .into_iter()
            .map(move |(_, place)| Self::NotAttached {
                place,
                device: device.to_owned(),
            })
    }
}

/// Everything that is wrong.
#[derive(Default, Debug)]
pub struct Findings(Vec<Finding>);

impl Findings {
    /// Adds one.
    pub fn push(&mut self, finding: Finding) {
        self.0.push(finding);
    }

    /// Adds others.
    pub fn append(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    /// Tells whether nothing is wrong.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over them, in the order in which they were found.
    pub fn iter(&self) -> impl Iterator<Item = &Finding> {
        self.0.iter()
    }

    /// Turns them into an error, unless there are none.
    pub fn into_result(self) -> Result<(), Error> {
        if self.is_empty() {
            return Ok(());
        }
        Err(Error::Broken(self))
    }

    /// The same where the addresses may be leased or not, and `unsure` says why that can't be told: what is wrong comes first.
    pub fn into_result_with(mut self, unsure: Option<Error>) -> Result<(), Error> {
        match unsure {
            Some(unsure) if self.is_empty() => Err(unsure),
            Some(unsure) => {
                self.push(Finding::Lease(Box::new(unsure)));
                self.into_result()
            }
            None => self.into_result(),
        }
    }
}

impl Extend<Finding> for Findings {
    fn extend<T: IntoIterator<Item = Finding>>(&mut self, findings: T) {
        self.0.extend(findings);
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, finding) in self.0.iter().enumerate() {
            if position > 0 {
                f.write_str("; ")?;
            }
            finding.fmt(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_one_line() {
        let mut findings = Findings::default();
        assert_eq!(findings.to_string(), "");
        findings.push(Finding::Down("eth0".to_owned()));
        findings.push(Finding::UnknownOwner);
        assert_eq!(
            findings.to_string(),
            "eth0 is down; the map OWNERS has no entry for the attachment"
        );
        assert!(matches!(findings.into_result(), Err(Error::Broken(_))));
        assert!(Findings::default().into_result().is_ok());
    }
}

//! `runtimeConfig.portMappings`: the host ports that the runtime asks for, checked entry by entry.

use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use serde::Deserialize;
use underpass_abi::{
    addr::Addr,
    flow::protocol,
    port::{self, HostPort},
};
use underpass_cni::{Error, address};

/// The key, for messages.
const KEY: &str = "runtimeConfig.portMappings";

/// A transport that has ports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

/// The addresses of the host that a port is served at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostAddress {
    /// It is served at all, of every family that the container has.
    Every,
    /// It is served at all of IPv4.
    EveryV4,
    /// It is served at all of IPv6.
    EveryV6,
    /// It is served at this one.
    Only(IpAddr),
}

/// A host port that the runtime asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PortMapping {
    /// The transport.
    pub protocol: Protocol,
    /// The addresses of the host that it is served at.
    pub host: HostAddress,
    /// The port of the host.
    pub host_port: u16,
    /// The port of the container that it leads to.
    pub container_port: u16,
}

/// A host port and the place in the container that it leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Binding {
    /// The key in `PORTS`.
    pub port: HostPort,
    /// The container's address.
    pub addr: IpAddr,
    /// The container's port.
    pub container_port: u16,
}

/// An entry as the runtime writes it.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Entry {
    host_port: i64,
    container_port: i64,
    protocol: String,
    #[serde(rename = "hostIP")]
    host_ip: String,
}

/// Checks all entries, each for itself and against the others.
pub(super) fn mappings(entries: &[Entry]) -> Result<Vec<PortMapping>, Error> {
    let mut first_uses: HashMap<HostPort, (usize, u16)> = HashMap::new();
    let mut mappings = Vec::with_capacity(entries.len());
    for (index, entry) in entries.iter().enumerate() {
        let mapping = entry.mapping(index)?;
        for key in mapping.keys() {
            let use_of_it = (index, mapping.container_port);
            let (first, container_port) = *first_uses.entry(key).or_insert(use_of_it);
            // Kubernetes takes the port of all addresses and that of 0.0.0.0 for two. Both may be asked for if they lead to one place.
            if container_port != mapping.container_port {
                return Err(Error::config(format!(
                    "{KEY}[{first}] and [{index}] ask for the same {} port {} of the same addresses, and lead to two of the container: remove one of them",
                    mapping.protocol.name(),
                    mapping.host_port
                )));
            }
        }
        mappings.push(mapping);
    }
    Ok(mappings)
}

/// Refuses a mapping of the UDP port that the tunnels between the nodes have: the programs never serve it.
pub fn keep_out_of_tunnel(mappings: &[PortMapping], tunnel_port: NonZeroU16) -> Result<(), Error> {
    let is_taken = |mapping: &PortMapping| {
        mapping.protocol == Protocol::Udp && mapping.host_port == tunnel_port.get()
    };
    match mappings.iter().position(is_taken) {
        None => Ok(()),
        // There is a mapping for each entry.
        Some(index) => Err(Error::config(format!(
            "invalid hostPort {tunnel_port} in {KEY}[{index}]: it is the tunnelPort of the network, whose UDP is the node's own; map another port"
        ))),
    }
}

/// Says where the host ports lead, for a container with these addresses: to the first of each family. A
/// family that it does not have is left out, and a port that is asked for twice is there once.
#[must_use]
pub fn bindings(mappings: &[PortMapping], addresses: &[IpAddr]) -> Vec<Binding> {
    let first = |family: u8| {
        let is_v4 = family == port::IPV4;
        addresses.iter().copied().find(|ip| ip.is_ipv4() == is_v4)
    };
    let [v4, v6] = [port::IPV4, port::IPV6].map(first);
    let mut bindings = Vec::new();
    let mut seen = HashSet::new();
    for mapping in mappings {
        for port in mapping.keys().filter(|port| seen.insert(*port)) {
            let addr = if port.family == port::IPV4 { v4 } else { v6 };
            bindings.extend(addr.map(|addr| Binding {
                port,
                addr,
                container_port: mapping.container_port,
            }));
        }
    }
    bindings
}

impl Binding {
    /// Names the place in the container.
    #[must_use]
    pub fn destination(&self) -> SocketAddr {
        SocketAddr::new(self.addr, self.container_port)
    }
}

impl Protocol {
    fn parse(text: &str) -> Option<Self> {
        // Kubernetes leaves the protocol out where it means TCP.
        if text.is_empty() {
            return Some(Self::Tcp);
        }
        [Self::Tcp, Self::Udp, Self::Sctp]
            .into_iter()
            .find(|protocol| text.eq_ignore_ascii_case(protocol.name()))
    }

    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }

    /// Gives the number in the IP header.
    fn number(self) -> u8 {
        match self {
            Self::Tcp => protocol::TCP,
            Self::Udp => protocol::UDP,
            Self::Sctp => protocol::SCTP,
        }
    }
}

impl HostAddress {
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self::Every);
        }
        let ip = address::parse_ip(text)?;
        let is_broadcast = matches!(ip, IpAddr::V4(v4) if v4.is_broadcast());
        match ip {
            IpAddr::V4(v4) if v4.is_unspecified() => Some(Self::EveryV4),
            IpAddr::V6(v6) if v6.is_unspecified() => Some(Self::EveryV6),
            // Nobody connects to many, and no answer comes from them.
            ip if ip.is_multicast() || is_broadcast => None,
            ip => Some(Self::Only(ip)),
        }
    }

    /// The address in keys of `PORTS`: zero stands for every address of the family.
    fn addr(self, family: u8) -> Option<Addr> {
        match (self, family) {
            (Self::Every, _) | (Self::EveryV4, port::IPV4) | (Self::EveryV6, port::IPV6) => {
                Some(Addr::default())
            }
            (Self::Only(ip @ IpAddr::V4(_)), port::IPV4)
            | (Self::Only(ip @ IpAddr::V6(_)), port::IPV6) => Some(ip.into()),
            _ => None,
        }
    }
}

impl PortMapping {
    /// The keys in `PORTS`, for a container with both families.
    fn keys(self) -> impl Iterator<Item = HostPort> {
        [port::IPV4, port::IPV6]
            .into_iter()
            .filter_map(move |family| {
                Some(HostPort {
                    addr: self.host.addr(family)?,
                    port: self.host_port.to_be(),
                    protocol: self.protocol.number(),
                    family,
                    reserved: 0,
                })
            })
    }
}

impl Entry {
    /// Refuses what the reference plugin `portmap` refuses, in its words.
    pub(super) fn refuse_like_portmap(&self, index: usize) -> Result<(), Error> {
        for (what, value) in [("container", self.container_port), ("host", self.host_port)] {
            if value <= 0 {
                return Err(
                    Error::config(format!("Invalid {what} port number: {value}"))
                        .with_details(format!("{what}Port in {KEY}[{index}] must be 1 to 65535")),
                );
            }
        }
        Ok(())
    }

    fn mapping(&self, index: usize) -> Result<PortMapping, Error> {
        Ok(PortMapping {
            host_port: port("hostPort", self.host_port, index)?,
            container_port: port("containerPort", self.container_port, index)?,
            protocol: Protocol::parse(&self.protocol).ok_or_else(|| {
                Error::config(format!(
                    "invalid protocol {:?} in {KEY}[{index}]: it must be tcp, udp or sctp",
                    self.protocol
                ))
            })?,
            host: HostAddress::parse(&self.host_ip).ok_or_else(|| {
                Error::config(format!(
                    "invalid hostIP {:?} in {KEY}[{index}]: give a unicast address of IPv4 or IPv6, or none for all of the host's",
                    self.host_ip
                ))
            })?,
        })
    }
}

fn port(key: &str, value: i64, index: usize) -> Result<u16, Error> {
    u16::try_from(value)
        .ok()
        .filter(|port| *port != 0)
        .ok_or_else(|| {
            Error::config(format!(
                "invalid {key} {value} in {KEY}[{index}]: it must be 1 to 65535"
            ))
        })
}

#[cfg(test)]
mod tests;

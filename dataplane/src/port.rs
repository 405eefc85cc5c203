//! The maps of host ports.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use aya::maps::{HashMap, Map, MapData};
use underpass_abi::{
    addr::Addr,
    endpoint::{Device, Owner},
    flow::protocol,
    map,
    node::Tunnels,
    port::{self, HostPort, PortTarget, ShadowedPort},
};

use crate::{
    Changed, Error, Pins,
    map::{entries, found, gone, open},
};

/// Who serves the host's ports, and who would. Whoever changes them holds the lock.
#[derive(Debug)]
pub struct HostPorts {
    serving: HashMap<MapData, HostPort, PortTarget>,
    shadowed: HashMap<MapData, ShadowedPort, PortTarget>,
}

impl HostPorts {
    /// Opens the maps. The pins are complete.
    pub fn open(pins: &Pins) -> Result<Self, Error> {
        Ok(Self {
            serving: open(pins, map::PORTS, Map::HashMap)?,
            shadowed: open(pins, map::SHADOWED_PORTS, Map::HashMap)?,
        })
    }

    /// Finds who serves a port.
    pub fn server(&self, port: &HostPort) -> Result<Option<PortTarget>, Error> {
        found(self.serving.get(port, 0), map::PORTS)
    }

    /// Lists all ports and who serves them.
    pub fn serving(&self) -> Result<Vec<(HostPort, PortTarget)>, Error> {
        entries(&self.serving, map::PORTS)
    }

    /// Lists all older mappings of ports.
    pub fn shadowed(&self) -> Result<Vec<(ShadowedPort, PortTarget)>, Error> {
        entries(&self.shadowed, map::SHADOWED_PORTS)
    }

    /// Tells whether a mapping is kept for later: a newer one serves the port.
    pub fn is_waiting(&self, port: HostPort, owner: Owner) -> Result<bool, Error> {
        let key = ShadowedPort { port, owner };
        found(self.shadowed.get(&key, 0), map::SHADOWED_PORTS).map(|kept| kept.is_some())
    }

    /// Sends a port to a container, whoever served it.
    pub fn serve(&mut self, port: HostPort, target: &PortTarget) -> Result<(), Error> {
        self.serving
            .insert(port, target, 0)
            .map_err(Error::map(map::PORTS))
    }

    /// Gives a port back to the host.
    pub fn close(&mut self, port: &HostPort) -> Result<(), Error> {
        gone(self.serving.remove(port), map::PORTS)
    }

    /// Keeps a mapping for later.
    pub fn shadow(&mut self, port: HostPort, target: &PortTarget) -> Result<(), Error> {
        let key = ShadowedPort {
            port,
            owner: target.owner,
        };
        self.shadowed
            .insert(key, target, 0)
            .map_err(Error::map(map::SHADOWED_PORTS))
    }

    /// Forgets a mapping that was kept for later.
    pub fn forget(&mut self, key: &ShadowedPort) -> Result<(), Error> {
        gone(self.shadowed.remove(key), map::SHADOWED_PORTS)
    }
}

/// Lists the addresses that no host port is served on.
pub fn service_addresses(pins: &Pins) -> Result<BTreeSet<Addr>, Error> {
    const NAME: &str = map::SERVICE_ADDRESSES;
    let known: HashMap<MapData, Addr, u32> = open(pins, NAME, Map::HashMap)?;
    let keys = known.keys().collect::<Result<_, _>>();
    keys.map_err(Error::map(NAME))
}

/// Makes these the addresses that no host port is served on. The caller holds the lock.
pub fn set_service_addresses(pins: &Pins, addresses: &[IpAddr]) -> Result<Changed, Error> {
    const NAME: &str = map::SERVICE_ADDRESSES;
    let before = service_addresses(pins)?;
    let mut known: HashMap<MapData, Addr, u32> = open(pins, NAME, Map::HashMap)?;
    let now: BTreeSet<Addr> = addresses.iter().copied().map(Addr::from).collect();
    for addr in now.difference(&before) {
        known.insert(addr, 1, 0).map_err(Error::map(NAME))?;
    }
    for addr in before.difference(&now) {
        gone(known.remove(addr), NAME)?;
    }
    Ok(if now == before {
        Changed::No
    } else {
        Changed::Yes
    })
}

/// Tells whether the programs leave a port to the node, because tunnels have it: one that the node is an end of, or, for the pod that is
/// mapped to it, the one that its network names.
#[must_use]
pub fn is_closed(port: &HostPort, pod: Option<&Device>, tunnels: &Tunnels) -> bool {
    let named = pod.map_or(0, |pod| pod.tunnel_port);
    let is_named = port.protocol == protocol::UDP && named != 0 && named == port.port;
    let packet = Tunnels::packet(port.protocol, port.port);
    is_named || tunnels.packets.contains(&packet)
}

/// A host port for people: `192.0.2.2:8080/tcp`, the unspecified address where every address is
/// meant.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a>(
    /// The port.
    pub &'a HostPort,
);

impl Text<'_> {
    /// Reads address and port.
    #[must_use]
    pub fn socket(self) -> SocketAddr {
        let HostPort {
            addr, port, family, ..
        } = self.0;
        let ip = match *family {
            _ if *addr != Addr::default() => IpAddr::from(*addr),
            port::IPV4 => Ipv4Addr::UNSPECIFIED.into(),
            _ => Ipv6Addr::UNSPECIFIED.into(),
        };
        SocketAddr::new(ip, u16::from_be(*port))
    }

    /// Reads the protocol's name.
    #[must_use]
    pub fn protocol(self) -> &'static str {
        match self.0.protocol {
            protocol::TCP => "tcp",
            protocol::UDP => "udp",
            protocol::SCTP => "sctp",
            _ => "unknown",
        }
    }
}

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.socket(), self.protocol())
    }
}

/// Reads the place in a container that a port leads to.
#[must_use]
pub fn destination(target: &PortTarget) -> SocketAddr {
    SocketAddr::new(target.addr.into(), u16::from_be(target.port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tunnel_closes_its_port() {
        let port = |protocol| HostPort {
            port: 4789_u16.to_be(),
            protocol,
            ..HostPort::default()
        };
        let (tcp, udp) = (port(protocol::TCP), port(protocol::UDP));
        let pod = Device {
            tunnel_port: udp.port,
            ..Device::default()
        };
        let mut tunnels = Tunnels::default();
        assert!(!is_closed(&udp, None, &tunnels));
        assert!(!is_closed(&udp, Some(&Device::default()), &tunnels));
        assert!(!is_closed(&tcp, Some(&pod), &tunnels));
        assert!(is_closed(&udp, Some(&pod), &tunnels));
        tunnels.packets[0] = Tunnels::packet(protocol::UDP, udp.port);
        assert!(!is_closed(&tcp, None, &tunnels));
        assert!(is_closed(&udp, None, &tunnels));
    }

    #[test]
    fn a_host_port_reads_like_an_address() {
        let any = |family| HostPort {
            port: 8080_u16.to_be(),
            protocol: protocol::UDP,
            family,
            ..HostPort::default()
        };
        assert_eq!(Text(&any(port::IPV4)).to_string(), "0.0.0.0:8080/udp");
        assert_eq!(Text(&any(port::IPV6)).to_string(), "[::]:8080/udp");
        let ip: IpAddr = "192.0.2.2".parse().expect("an address");
        let exact = HostPort {
            addr: ip.into(),
            ..any(port::IPV4)
        };
        assert_eq!(Text(&exact).to_string(), "192.0.2.2:8080/udp");
    }
}

//! Host ports: which container serves a port of the host.

use crate::{addr::Addr, endpoint::Owner, plain};

/// Value of [`HostPort::family`] for IPv4 (`AF_INET`).
pub const IPV4: u8 = 2;
/// Value of [`HostPort::family`] for IPv6 (`AF_INET6`).
pub const IPV6: u8 = 10;

/// Key of `PORTS`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct HostPort {
    /// Address of the host, mapped form; zero: every local address of the family that has no entry
    /// of its own.
    pub addr: Addr,
    /// Port, network order.
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// [`IPV4`] or [`IPV6`].
    pub family: u8,
    /// Zero.
    pub reserved: u32,
}

/// Value of `PORTS`: who serves the port now. The newest mapping of a port is the one that counts.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PortTarget {
    /// Address of the container, mapped form.
    pub addr: Addr,
    /// Attachment that asked for the mapping.
    pub owner: Owner,
    /// Counts upwards with each mapping that is made on the node: tells the newest of several.
    pub serial: u64,
    /// Host veth of the container.
    pub ifindex: u32,
    /// Port of the container, network order.
    pub port: u16,
    /// Zero.
    pub reserved: u16,
}

/// Key of `SHADOWED_PORTS`, whose values are [`PortTarget`]s too: older mappings of a port, which
/// serve again when the newer ones are gone.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct ShadowedPort {
    /// The port.
    pub port: HostPort,
    /// Attachment that asked for the mapping.
    pub owner: Owner,
}

plain!(HostPort, PortTarget, ShadowedPort);

const _: () = assert!(size_of::<HostPort>() == 24);
const _: () = assert!(size_of::<PortTarget>() == 48);
const _: () = assert!(size_of::<ShadowedPort>() == 40);

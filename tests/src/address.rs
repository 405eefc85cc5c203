//! The addresses of a lab, the same plan for both families.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// An address family: each test runs for both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both, in the order of documents.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    const fn choose(self, v4: [u8; 4], v6: [u16; 8]) -> IpAddr {
        match self {
            Self::V4 => IpAddr::V4(Ipv4Addr::from_octets(v4)),
            Self::V6 => IpAddr::V6(Ipv6Addr::from_segments(v6)),
        }
    }

    /// The node's address on its uplink.
    #[must_use]
    pub const fn node(self) -> IpAddr {
        self.choose([192, 0, 2, 2], [0x2001, 0xdb8, 1, 0, 0, 0, 0, 2])
    }

    /// The world's address on the node's link: the node's default gateway.
    #[must_use]
    pub const fn gateway(self) -> IpAddr {
        self.choose([192, 0, 2, 1], [0x2001, 0xdb8, 1, 0, 0, 0, 0, 1])
    }

    /// A server somewhere in the world, behind the gateway.
    #[must_use]
    pub const fn remote(self) -> IpAddr {
        self.choose([198, 51, 100, 7], [0x2001, 0xdb8, 7, 0, 0, 0, 0, 7])
    }

    /// A second server in the world.
    #[must_use]
    pub const fn other_remote(self) -> IpAddr {
        self.choose([198, 51, 100, 8], [0x2001, 0xdb8, 7, 0, 0, 0, 0, 8])
    }

    /// The address of a Service: on no device, the node's firewall translates it.
    #[must_use]
    pub const fn service(self) -> IpAddr {
        self.choose([10, 96, 0, 10], [0xfd00, 0x96, 0, 0, 0, 0, 0, 0x10])
    }

    /// The range that Services get addresses from.
    #[must_use]
    pub const fn services(self) -> &'static str {
        match self {
            Self::V4 => "10.96.0.0/16",
            Self::V6 => "fd00:96::/108",
        }
    }

    /// The address of one of kube-proxy's Services: on no device either, and none is [`Self::service`].
    #[must_use]
    pub const fn cluster_ip(self, number: u8) -> IpAddr {
        let last = number as u16;
        self.choose([10, 96, 1, number], [0xfd00, 0x96, 0, 0, 0, 0, 1, last])
    }

    /// A pod of another node of the cluster. There is none.
    #[must_use]
    pub const fn pod_elsewhere(self, number: u8) -> IpAddr {
        let last = number as u16;
        self.choose([10, 244, 1, number], [0xfd00, 0x244, 1, 0, 0, 0, 0, last])
    }

    /// The range that the nodes of a cluster get their pods' ranges from, [`Self::pod_elsewhere`] included.
    #[must_use]
    pub const fn cluster_pods(self) -> &'static str {
        match self {
            Self::V4 => "10.244.0.0/16",
            Self::V6 => "fd00:244::/32",
        }
    }

    /// An address of the pods' range that no pod of a test gets.
    #[must_use]
    pub const fn unused_pod(self) -> IpAddr {
        self.choose([10, 88, 0, 250], [0xfd00, 0x88, 0, 0, 0, 0, 0, 0xfa])
    }

    /// The unspecified address.
    #[must_use]
    pub const fn any(self) -> IpAddr {
        self.choose([0; 4], [0; 8])
    }

    /// The range that pods get addresses from.
    #[must_use]
    pub const fn pods(self) -> &'static str {
        match self {
            Self::V4 => "10.88.0.0/24",
            Self::V6 => "fd00:88::/64",
        }
    }

    /// The address of the loopback device that every host has.
    #[must_use]
    pub const fn loopback(self) -> IpAddr {
        self.choose([127, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 1])
    }

    /// The pods' gateway: an address of the host's end of each pod's veth.
    #[must_use]
    pub const fn pod_gateway(self) -> IpAddr {
        self.choose([10, 88, 0, 1], [0xfd00, 0x88, 0, 0, 0, 0, 0, 1])
    }

    /// All destinations.
    #[must_use]
    pub const fn everywhere(self) -> &'static str {
        match self {
            Self::V4 => "0.0.0.0/0",
            Self::V6 => "::/0",
        }
    }

    /// Prefix length of a single address.
    #[must_use]
    pub const fn host_bits(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }

    /// Prefix length of the link between node and world.
    #[must_use]
    pub const fn link_bits(self) -> u8 {
        match self {
            Self::V4 => 24,
            Self::V6 => 64,
        }
    }

    /// Bytes of an IP header without options or extension headers.
    #[must_use]
    pub const fn header_len(self) -> usize {
        match self {
            Self::V4 => 20,
            Self::V6 => 40,
        }
    }

    /// The name of the family in nftables expressions.
    #[must_use]
    pub const fn nft(self) -> &'static str {
        match self {
            Self::V4 => "ip",
            Self::V6 => "ip6",
        }
    }

    /// The family of an address.
    #[must_use]
    pub const fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// A port of the server in the world. A UDP server must listen at just that address to answer from it.
    #[must_use]
    pub const fn remote_at(self, port: u16) -> SocketAddr {
        SocketAddr::new(self.remote(), port)
    }

    /// A port of the Service.
    #[must_use]
    pub const fn service_at(self, port: u16) -> SocketAddr {
        SocketAddr::new(self.service(), port)
    }

    /// The unspecified address with a port: where servers of pods listen and clients bind.
    #[must_use]
    pub const fn port(self, port: u16) -> SocketAddr {
        SocketAddr::new(self.any(), port)
    }
}

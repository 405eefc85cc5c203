//! A run of addresses in one subnet.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use thiserror::Error;

/// Addresses from `start` to `end`, both included, except for the gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    subnet: IpNet,
    start: IpAddr,
    end: IpAddr,
    gateway: IpAddr,
}

/// A range as the config has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// The network; required.
    pub subnet: Option<IpNet>,
    /// The first address; by default the one after the network's own.
    pub start: Option<IpAddr>,
    /// The last address; by default the subnet's last, without the broadcast address of IPv4.
    pub end: Option<IpAddr>,
    /// The gateway; by default the address after the network's own. Need not be inside.
    pub gateway: Option<IpAddr>,
}

/// Why bounds are not a range. The words are those of the reference plugin.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum RangeError {
    /// No subnet.
    #[error("IP <nil> not v4 nor v6")]
    NoSubnet,
    /// Nothing is left between network, gateway and broadcast.
    #[error("Network {0} too small to allocate from")]
    TooSmall(IpNet),
    /// The subnet is an address, not a network.
    #[error("Network has host bits set. For a subnet mask of length {} the network address is {}", .0.prefix_len(), .0.network())]
    HostBits(IpNet),
    /// The first address is outside.
    #[error("RangeStart {0} not in network {1}")]
    Start(IpAddr, IpNet),
    /// The first address is behind the last.
    #[error("RangeStart {start} not in network {subnet}")]
    Reversed {
        /// The first address.
        start: IpAddr,
        /// The last address.
        end: IpAddr,
        /// The network.
        subnet: IpNet,
    },
    /// The last address is outside, or before the first.
    #[error("RangeEnd {0} not in network {1}")]
    End(IpAddr, IpNet),
}

impl RangeError {
    /// Says what to do: the known words do not.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::NoSubnet => "each range needs a \"subnet\" such as 10.0.0.0/24".to_owned(),
            Self::TooSmall(subnet) => format!(
                "\"subnet\" must be a /{} or larger",
                subnet.max_prefix_len() - 2
            ),
            Self::HostBits(subnet) => format!("write \"subnet\" as {}", subnet.trunc()),
            Self::Start(_, subnet) => format!("\"rangeStart\" must be an address of {subnet}"),
            Self::Reversed { end, .. } => {
                format!("\"rangeStart\" must not be behind \"rangeEnd\", which is {end}")
            }
            Self::End(_, subnet) => format!(
                "\"rangeEnd\" must be an address of {subnet} that can be given to a container"
            ),
        }
    }
}

impl Range {
    /// Fills in the defaults and checks the bounds.
    pub fn new(bounds: Bounds) -> Result<Self, RangeError> {
        let subnet = bounds.subnet.ok_or(RangeError::NoSubnet)?;
        if subnet.prefix_len() > subnet.max_prefix_len() - 2 {
            return Err(RangeError::TooSmall(subnet));
        }
        if subnet.network() != subnet.addr() {
            return Err(RangeError::HostBits(subnet));
        }
        let first = with_number(subnet.network(), number(subnet.network()) + 1);
        let start = bounds.start.unwrap_or(first);
        if !subnet.contains(&start) {
            return Err(RangeError::Start(start, subnet));
        }
        let behind = |end: &IpAddr| end.is_ipv4() == start.is_ipv4() && start > *end;
        if let (Some(start), Some(end)) = (bounds.start, bounds.end.filter(behind)) {
            return Err(RangeError::Reversed { start, end, subnet });
        }
        let end = bounds.end.unwrap_or_else(|| last(subnet));
        if !subnet.contains(&end) || end < start {
            return Err(RangeError::End(end, subnet));
        }
        Ok(Self {
            subnet,
            start,
            end,
            gateway: bounds.gateway.unwrap_or(first),
        })
    }

    /// The gateway's address.
    #[must_use]
    pub fn gateway(&self) -> IpAddr {
        self.gateway
    }

    /// Whether `ip` lies between the bounds. True also for a gateway that does.
    #[must_use]
    pub fn contains(&self, ip: IpAddr) -> bool {
        self.is_ipv4() == ip.is_ipv4() && (self.start..=self.end).contains(&ip)
    }

    /// Whether some address lies in both.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.is_ipv4() == other.is_ipv4() && self.start <= other.end && other.start <= self.end
    }

    /// The family.
    #[must_use]
    pub fn is_ipv4(&self) -> bool {
        self.start.is_ipv4()
    }

    /// The subnet that it is a part of.
    #[must_use]
    pub fn subnet(&self) -> IpNet {
        self.subnet.trunc()
    }

    /// `ip` with the subnet's prefix length.
    #[must_use]
    pub fn address(&self, ip: IpAddr) -> IpNet {
        // The prefix length comes from a subnet of the same family, so it is in bounds.
        IpNet::new(ip, self.subnet.prefix_len()).unwrap_or_else(|_| ip.into())
    }

    /// How many addresses can be leased; saturates.
    #[must_use]
    pub fn capacity(&self) -> u128 {
        let size = (self.last_number() - self.first_number()).saturating_add(1);
        size - u128::from(self.contains(self.gateway))
    }

    pub(crate) fn first_number(&self) -> u128 {
        number(self.start)
    }

    pub(crate) fn last_number(&self) -> u128 {
        number(self.end)
    }

    /// The address with this number, in the range's family.
    pub(crate) fn numbered(&self, number: u128) -> IpAddr {
        with_number(self.start, number)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.start, self.end)
    }
}

/// An address as a number, most significant byte first.
pub(crate) fn number(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => ip.to_bits().into(),
        IpAddr::V6(ip) => ip.to_bits(),
    }
}

/// The address with this number, in the family of `like`.
fn with_number(like: IpAddr, number: u128) -> IpAddr {
    match (like, u32::try_from(number)) {
        (IpAddr::V4(_), Ok(number)) => Ipv4Addr::from_bits(number).into(),
        _ => Ipv6Addr::from_bits(number).into(),
    }
}

/// The last address for a container. IPv6 has no broadcast address.
fn last(subnet: IpNet) -> IpAddr {
    match subnet {
        IpNet::V4(_) => with_number(subnet.network(), number(subnet.broadcast()) - 1),
        IpNet::V6(_) => subnet.broadcast(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(subnet: &str, start: &str, end: &str) -> Result<Range, String> {
        Range::new(Bounds {
            subnet: subnet.parse().ok(),
            start: start.parse().ok(),
            end: end.parse().ok(),
            gateway: None,
        })
        .map_err(|error| error.to_string())
    }

    fn shown(subnet: &str, start: &str, end: &str) -> String {
        range(subnet, start, end).map_or_else(
            |error| error,
            |range| format!("{range} via {}", range.gateway()),
        )
    }

    #[test]
    fn defaults_leave_out_network_and_broadcast() {
        assert_eq!(
            shown("192.0.2.0/24", "", ""),
            "192.0.2.1-192.0.2.254 via 192.0.2.1"
        );
        assert_eq!(
            shown("192.0.2.0/25", "", ""),
            "192.0.2.1-192.0.2.126 via 192.0.2.1"
        );
        assert_eq!(
            shown("2001:db8:1::/64", "", ""),
            "2001:db8:1::1-2001:db8:1:0:ffff:ffff:ffff:ffff via 2001:db8:1::1"
        );
        assert_eq!(
            shown("10.1.0.0/16", "10.1.2.0", "10.1.2.255"),
            "10.1.2.0-10.1.2.255 via 10.1.0.1"
        );
        assert_eq!(
            shown("0.0.0.0/0", "", ""),
            "0.0.0.1-255.255.255.254 via 0.0.0.1"
        );
        assert_eq!(
            range("::/0", "", "").map(|range| range.capacity()),
            Ok(u128::MAX - 1)
        );
    }

    #[test]
    fn refusals_use_the_known_words() {
        let cases = [
            ("", "", "", "IP <nil> not v4 nor v6"),
            (
                "192.0.2.0/31",
                "",
                "",
                "Network 192.0.2.0/31 too small to allocate from",
            ),
            (
                "2001:db8::/127",
                "",
                "",
                "Network 2001:db8::/127 too small to allocate from",
            ),
            (
                "192.0.2.12/24",
                "",
                "",
                "Network has host bits set. For a subnet mask of length 24 the network address is 192.0.2.0",
            ),
            (
                "2001:db8:1::5/64",
                "",
                "",
                "Network has host bits set. For a subnet mask of length 64 the network address is 2001:db8:1::",
            ),
            (
                "192.0.2.0/24",
                "192.0.3.0",
                "",
                "RangeStart 192.0.3.0 not in network 192.0.2.0/24",
            ),
            (
                "192.0.2.0/24",
                "::1",
                "",
                "RangeStart ::1 not in network 192.0.2.0/24",
            ),
            (
                "192.0.2.0/24",
                "",
                "192.0.4.0",
                "RangeEnd 192.0.4.0 not in network 192.0.2.0/24",
            ),
            (
                "192.0.2.0/24",
                "",
                "192.0.2.0",
                "RangeEnd 192.0.2.0 not in network 192.0.2.0/24",
            ),
            (
                "192.0.2.0/24",
                "192.0.2.50",
                "192.0.2.40",
                "RangeStart 192.0.2.50 not in network 192.0.2.0/24",
            ),
        ];
        for (subnet, start, end, message) in cases {
            assert_eq!(shown(subnet, start, end), message);
        }
    }
}

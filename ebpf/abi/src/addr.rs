//! Addresses: one type per family for the packet's path, one 16-byte form for maps that hold both
//! families.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{Plain, plain};

/// An IPv4 address as it stands in a packet: the four bytes in network order, held in one word for
/// cheap comparison.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Addr4(pub u32);

/// An IPv6 address as it stands in a packet: sixteen bytes in network order, held in two words. (No
/// array: a pair is passed and copied in registers.)
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Addr6(pub u64, pub u64);

/// An address of either family: IPv6, or IPv4 mapped into `::ffff:0:0/96`. Network order. The key
/// of maps that hold both.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Addr(pub u64, pub u64);

plain!(Addr4, Addr6, Addr);

const MAPPED_PREFIX: u64 = u64::from_ne_bytes([0, 0, 0xff, 0xff, 0, 0, 0, 0]);

impl Addr4 {
    /// The address in its 16-byte form.
    #[inline(always)]
    #[must_use]
    pub const fn widen(self) -> Addr {
        let shift = if cfg!(target_endian = "little") {
            32
        } else {
            0
        };
        Addr(0, MAPPED_PREFIX | ((self.0 as u64) << shift))
    }
}

impl Addr6 {
    /// The address in its 16-byte form (the same bytes).
    #[inline(always)]
    #[must_use]
    pub const fn widen(self) -> Addr {
        Addr(self.0, self.1)
    }
}

fn words(bytes: [u8; 16]) -> (u64, u64) {
    let [high, low] = [0, 64].map(|shift| (u128::from_be_bytes(bytes) << shift >> 64) as u64);
    (high.to_be(), low.to_be())
}

fn bytes(high: u64, low: u64) -> [u8; 16] {
    let (high, low) = (u64::from_be(high), u64::from_be(low));
    (u128::from(high) << 64 | u128::from(low)).to_be_bytes()
}

impl From<Ipv4Addr> for Addr4 {
    fn from(addr: Ipv4Addr) -> Self {
        Self(u32::from_ne_bytes(addr.octets()))
    }
}

impl From<Addr4> for Ipv4Addr {
    fn from(addr: Addr4) -> Self {
        Self::from(addr.0.to_ne_bytes())
    }
}

impl From<Ipv6Addr> for Addr6 {
    fn from(addr: Ipv6Addr) -> Self {
        let (high, low) = words(addr.octets());
        Self(high, low)
    }
}

impl From<Addr6> for Ipv6Addr {
    fn from(addr: Addr6) -> Self {
        Self::from(bytes(addr.0, addr.1))
    }
}

impl From<IpAddr> for Addr {
    fn from(addr: IpAddr) -> Self {
        match addr {
            IpAddr::V4(addr) => Addr4::from(addr).widen(),
            IpAddr::V6(addr) => Addr6::from(addr).widen(),
        }
    }
}

impl From<Addr> for IpAddr {
    fn from(addr: Addr) -> Self {
        Ipv6Addr::from(bytes(addr.0, addr.1)).to_canonical()
    }
}

/// What the two packet address types have in common.
pub trait Family: Plain + Ord {
    /// The address in its 16-byte form.
    fn wide(self) -> Addr;
}

impl Family for Addr4 {
    #[inline(always)]
    fn wide(self) -> Addr {
        self.widen()
    }
}

impl Family for Addr6 {
    #[inline(always)]
    fn wide(self) -> Addr {
        self.widen()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families_survive_the_round_trip() {
        for text in [
            "10.1.2.3",
            "0.0.0.0",
            "255.255.255.255",
            "2001:db8::1",
            "::",
            "fe80::1",
        ] {
            let addr: IpAddr = text.parse().expect("an address");
            assert_eq!(IpAddr::from(Addr::from(addr)), addr, "{text}");
        }
    }

    #[test]
    fn a_v4_address_widens_to_its_mapped_form() {
        let mapped: Ipv6Addr = "::ffff:192.0.2.7".parse().expect("an address");
        assert_eq!(
            Addr4::from(Ipv4Addr::new(192, 0, 2, 7)).widen(),
            Addr::from(IpAddr::V6(mapped))
        );
        assert_eq!(Addr4::from(Ipv4Addr::new(192, 0, 2, 7)).widen().0, 0);
    }
}

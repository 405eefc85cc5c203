//! Options of sockets by which ordinary traffic becomes rare: checksums of zero, IP options, extension headers.

use std::{io, os::fd::AsRawFd};

use anyhow::{Context as _, Result};

use crate::Family;

/// `SO_NO_CHECK`, for sending by IPv4.
const NO_CHECK: libc::c_int = 11;
/// `UDP_NO_CHECK6_TX` and `UDP_NO_CHECK6_RX`.
const NO_CHECK_6: [libc::c_int; 2] = [101, 102];

/// One option of a socket.
#[derive(Clone, Debug)]
pub struct Setting {
    level: libc::c_int,
    name: libc::c_int,
    value: Vec<u8>,
}

impl Setting {
    /// An IPv4 header with four bytes more: three that do nothing, and an end.
    #[must_use]
    pub fn padded_header() -> Self {
        Self::new(libc::IPPROTO_IP, libc::IP_OPTIONS, &[1, 1, 1, 0])
    }

    /// An IPv6 extension header of eight bytes, nothing but padding, behind the fixed header.
    #[must_use]
    pub fn extension_header(kind: Extension) -> Self {
        let name = match kind {
            Extension::HopByHop => libc::IPV6_HOPOPTS,
            Extension::Destination => libc::IPV6_DSTOPTS,
        };
        Self::new(libc::IPPROTO_IPV6, name, &[0, 0, 1, 4, 0, 0, 0, 0])
    }

    /// Packets that pass so many routers.
    #[must_use]
    pub fn hops(family: Family, count: u8) -> Self {
        let (level, name) = match family {
            Family::V4 => (libc::IPPROTO_IP, libc::IP_TTL),
            Family::V6 => (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS),
        };
        Self::new(level, name, &i32::from(count).to_ne_bytes())
    }

    /// A connection that ends by a reset when it is closed.
    #[must_use]
    pub fn no_linger() -> Self {
        // `struct linger`: switched on, for no time.
        let value = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
        Self::new(libc::SOL_SOCKET, libc::SO_LINGER, &value)
    }

    /// Packets that nobody may cut: what is too long is refused, as soon as somebody has said so.
    #[must_use]
    pub fn in_one_piece(family: Family) -> Self {
        let (level, name, value) = match family {
            Family::V4 => (
                libc::IPPROTO_IP,
                libc::IP_MTU_DISCOVER,
                libc::IP_PMTUDISC_DO,
            ),
            Family::V6 => (
                libc::IPPROTO_IPV6,
                libc::IPV6_MTU_DISCOVER,
                libc::IPV6_PMTUDISC_DO,
            ),
        };
        Self::new(level, name, &value.to_ne_bytes())
    }

    /// UDP with a checksum of zero, sent and received.
    #[must_use]
    pub fn no_checksum(family: Family) -> Vec<Self> {
        let on = 1i32.to_ne_bytes();
        match family {
            Family::V4 => vec![Self::new(libc::SOL_SOCKET, NO_CHECK, &on)],
            Family::V6 => NO_CHECK_6
                .map(|name| Self::new(libc::IPPROTO_UDP, name, &on))
                .to_vec(),
        }
    }

    /// Whether only a UDP socket has it.
    #[must_use]
    pub fn is_of_udp(&self) -> bool {
        self.level == libc::IPPROTO_UDP || self.name == NO_CHECK
    }

    fn new(level: libc::c_int, name: libc::c_int, value: &[u8]) -> Self {
        let value = value.to_vec();
        Self { level, name, value }
    }
}

/// Extension headers that a host may put into its packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Extension {
    /// For every router on the way.
    HopByHop,
    /// For the destination.
    Destination,
}

/// Sets options of a socket, in their order.
pub(super) fn set(socket: &impl AsRawFd, settings: &[Setting]) -> Result<()> {
    for setting in settings {
        let Setting { level, name, value } = setting;
        let len = libc::socklen_t::try_from(value.len())?;
        // SAFETY: the value has the length given, and the kernel only reads it.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                *level,
                *name,
                value.as_ptr().cast(),
                len,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error()).with_context(|| format!("set {setting:?}"));
        }
    }
    Ok(())
}

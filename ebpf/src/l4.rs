//! What the transport header tells: ports, TCP flags, the kind of an ICMP message.

use underpass_abi::flow::protocol;

use crate::{
    ip::Ip,
    packet::{Load, Short, Zero},
};

/// TCP flags, as in the header's 14th byte.
pub mod tcp {
    /// No more data from the sender.
    pub const FIN: u8 = 1;
    /// A connection opens.
    pub const SYN: u8 = 1 << 1;
    /// The connection is refused or aborted.
    pub const RST: u8 = 1 << 2;
    /// The last of what was written at once: only segments with data have it.
    pub const PSH: u8 = 1 << 3;
    /// The acknowledgement number counts: set in all packets but the first.
    pub const ACK: u8 = 1 << 4;
}

/// What a packet is to us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// It has a tuple: TCP, UDP, SCTP, ICMP echo.
    Flow,
    /// An ICMP error, which quotes a packet.
    Error,
    /// Another ICMP message.
    Control,
    /// A later fragment: its ports were in the first.
    Later,
    /// A protocol without ports that we know of.
    Other,
}

/// How much of the transport header there must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Depth {
    /// All of it.
    Whole,
    /// What an ICMP error quotes at least: 8 bytes (RFC 792).
    Quoted,
}

/// The transport header, as far as it matters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct L4 {
    /// What the packet is.
    pub kind: Kind,
    /// Source port, network order; see [`Tuple::sport`](underpass_abi::flow::Tuple::sport).
    pub sport: u16,
    /// Destination port, network order.
    pub dport: u16,
    /// TCP flags, see [`tcp`]; 0 for others.
    pub tcp_flags: u8,
    /// Length of the transport header in bytes, as far as known.
    pub length: u8,
    /// Type of an ICMP message; 0 for others.
    pub icmp_type: u8,
    /// What only the stack can tell apart. SCTP that begins with something else than data or its
    /// acknowledgement: it opens, keeps or ends an association. ICMP echo with the identifier 0.
    pub control: bool,
}

/// Types of SCTP chunks (RFC 9260, section 3.2; I-DATA: RFC 8260).
mod chunk {
    pub(super) const DATA: u8 = 0;
    pub(super) const SACK: u8 = 3;
    pub(super) const I_DATA: u8 = 64;
}

/// Whether a chunk that begins like this carries data, or acknowledges some.
#[inline(always)]
fn is_data(chunk: Result<u16, Short>) -> bool {
    chunk.is_ok_and(|start| {
        let [kind, _flags] = start.to_ne_bytes();
        matches!(kind, chunk::DATA | chunk::SACK | chunk::I_DATA)
    })
}

/// Length of SCTP's common header, in bytes: the first chunk follows.
const SCTP_HEADER: u32 = 12;

impl L4 {
    const fn without_ports(kind: Kind) -> Self {
        Self {
            kind,
            sport: 0,
            dport: 0,
            tcp_flags: 0,
            length: 8,
            icmp_type: 0,
            control: false,
        }
    }

    /// Length in bytes of the longest transport header, as far as [`Self::parse`] reads it: TCP up to its flags.
    pub const READ: u32 = 14;

    /// Length in bytes of TCP's header without options.
    pub const TCP: u32 = 20;

    /// A later fragment has no transport header.
    pub const LATER: Self = Self::without_ports(Kind::Later);

    /// Bytes that the header of `protocol` has at least, as far as it is read; 0 of a protocol that is not known.
    #[inline(always)]
    #[must_use]
    pub const fn least<I: Ip>(protocol: u8) -> u32 {
        match protocol {
            protocol::TCP => Self::TCP,
            protocol::UDP | protocol::SCTP => 8,
            _ if protocol == I::ICMP => 8,
            _ => 0,
        }
    }

    /// Reads the header of `protocol` at `offset`.
    #[inline(always)]
    pub fn parse<I: Ip, P: Load>(
        packet: &P,
        protocol: u8,
        offset: u32,
        depth: Depth,
    ) -> Result<Self, Short> {
        if protocol == protocol::TCP && depth == Depth::Whole {
            // Words of the header: ports, sequence, acknowledgement, then data offset and flags.
            let words: [u16; 7] = packet.load(offset)?;
            let [data_offset, flags] = words[6].to_ne_bytes();
            return Ok(Self {
                kind: Kind::Flow,
                sport: words[0],
                dport: words[1],
                tcp_flags: flags,
                length: data_offset >> 4 << 2,
                icmp_type: 0,
                control: false,
            });
        }
        if protocol == protocol::TCP || protocol == protocol::UDP || protocol == protocol::SCTP {
            let [sport, dport]: [u16; 2] = packet.load(offset)?;
            let control = protocol == protocol::SCTP && !is_data(packet.load(offset + SCTP_HEADER));
            return Ok(Self {
                kind: Kind::Flow,
                sport,
                dport,
                tcp_flags: 0,
                length: 8,
                icmp_type: 0,
                control,
            });
        }
        if protocol == I::ICMP {
            let [head, _, identifier]: [u16; 3] = packet.load(offset)?;
            let [icmp_type, _code] = head.to_ne_bytes();
            let mut l4 = Self::without_ports(Kind::Control);
            l4.icmp_type = icmp_type;
            // With the identifier 0 a request and its answer have the same tuple both ways.
            l4.control = identifier == 0;
            if icmp_type == I::ECHO_REQUEST {
                (l4.kind, l4.sport) = (Kind::Flow, identifier);
            } else if icmp_type == I::ECHO_REPLY {
                (l4.kind, l4.dport) = (Kind::Flow, identifier);
            } else if I::is_error(icmp_type) {
                l4.kind = Kind::Error;
            }
            return Ok(l4);
        }
        Ok(Self::without_ports(Kind::Other))
    }
}

/// Where a protocol keeps its checksum, and what it covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Checksum {
    /// Offset in the transport header, in bytes.
    pub offset: u32,
    /// Whether it covers the addresses.
    pub pseudo_header: bool,
    /// What a checksum of zero means.
    pub zero: Zero,
}

/// The internet checksum of `protocol`; `None` where there is none (SCTP has a CRC over its own bytes only).
#[inline(always)]
#[must_use]
pub const fn checksum_of(protocol: u8) -> Option<Checksum> {
    match protocol {
        protocol::TCP => Some(Checksum {
            offset: 16,
            pseudo_header: true,
            zero: Zero::IsSum,
        }),
        protocol::UDP => Some(Checksum {
            offset: 6,
            pseudo_header: true,
            zero: Zero::IsAbsent,
        }),
        protocol::ICMP => Some(Checksum {
            offset: 2,
            pseudo_header: false,
            zero: Zero::IsSum,
        }),
        protocol::ICMPV6 => Some(Checksum {
            offset: 2,
            pseudo_header: true,
            zero: Zero::IsSum,
        }),
        _ => None,
    }
}

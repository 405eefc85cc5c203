//! The network header. All that differs between the families is behind [`Ip`]; everything else is generic over it.

pub mod v4;
pub mod v6;

use underpass_abi::{
    Plain,
    addr::Family,
    flow::{FragmentKey, Tuple},
};

pub use self::{v4::V4, v6::V6};
use crate::{
    checksum::{Delta, Summed},
    l4::{Depth, Kind, L4},
    packet::{Covers, Load, Short},
};

/// The bits of a TOS or traffic class that are the DSCP (RFC 2474).
const DSCP: u8 = 0xfc;

/// Which piece of a datagram a packet is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Piece {
    /// All of it.
    Whole,
    /// The first, with the transport header.
    First,
    /// Another one.
    Later,
}

/// A parsed packet: owned, so that nothing refers into the packet when a helper moves it.
#[derive(Clone, Copy, Debug)]
pub struct Head<I: Ip> {
    /// The fixed network header.
    pub header: I::Header,
    /// Addresses and ports; the ports of a later fragment are 0.
    pub tuple: Tuple<I::Addr>,
    /// Offset of the network header, in bytes from the packet's start.
    pub l3: u32,
    /// Offset of the transport header.
    pub l4: u32,
    /// What the packet is.
    pub kind: Kind,
    /// Which piece of its datagram it is.
    pub piece: Piece,
    /// Whether the network header carries nothing unusual: no options, no extension headers, no fragment.
    pub plain: bool,
    /// TCP flags; 0 for others.
    pub tcp_flags: u8,
    /// Length of the transport header in bytes, as far as known.
    pub l4_length: u8,
    /// ICMP type; 0 for others.
    pub icmp_type: u8,
    /// See [`L4::control`].
    pub control: bool,
    /// Identification of a fragmented datagram, as it stands in the packet.
    pub identification: u32,
}

/// Where the network header ends and what follows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Next {
    /// Protocol number of the transport.
    pub protocol: u8,
    /// Offset of the transport header.
    pub l4: u32,
    /// Which piece of its datagram the packet is.
    pub piece: Piece,
    /// See [`Head::plain`].
    pub plain: bool,
    /// See [`Head::identification`].
    pub identification: u32,
}

impl Next {
    /// What follows a header without options that has a whole datagram behind it.
    #[inline(always)]
    const fn plain(protocol: u8, l4: u32) -> Self {
        Self {
            protocol,
            l4,
            piece: Piece::Whole,
            plain: true,
            identification: 0,
        }
    }
}

const _: () = assert!(has_length_of_header::<V4>() && has_length_of_header::<V6>());

const fn has_length_of_header<I: Ip>() -> bool {
    size_of::<I::Header>() == I::HEADER_LENGTH as usize
}

/// One IP family.
pub trait Ip: Copy + 'static {
    /// Its addresses.
    type Addr: Family + Summed;
    /// Its fixed header.
    type Header: Plain;

    /// Ethernet type, network order.
    const ETHER_TYPE: u16;
    /// Length of the fixed header, in bytes.
    const HEADER_LENGTH: u32;
    /// Protocol number of its ICMP.
    const ICMP: u8;
    /// ICMP type of an echo request.
    const ECHO_REQUEST: u8;
    /// ICMP type of an echo reply.
    const ECHO_REPLY: u8;
    /// What a change of addresses means to a checksum with a pseudo header.
    const PSEUDO: Covers;

    /// Whether an ICMP type is an error, which quotes the packet that caused it.
    fn is_error(icmp_type: u8) -> bool;

    /// Source and destination.
    fn addresses(header: &Self::Header) -> (Self::Addr, Self::Addr);

    /// What the protocol of a datagram adds to what its pieces are known by, see [`FragmentKey::protocol`].
    fn protocol_of_pieces(protocol: u8) -> u32;

    /// What of the header besides addresses a route may depend on: the TOS of IPv4; the traffic class and
    /// flow label of IPv6, in network order.
    fn class(header: &Self::Header) -> u32;

    /// The differentiated services code point, in the upper six bits of the byte that it has in a header; without what marks congestion (ECN).
    fn dscp(header: &Self::Header) -> u8;

    /// TTL, or hop limit.
    fn ttl(header: &Self::Header) -> u8;

    /// Length of the packet in bytes, as the header says; 0 if it does not (jumbograms).
    fn length(header: &Self::Header) -> u32;

    /// Walks over options or extension headers. `l3` is the header's offset.
    fn next<P: Load>(packet: &P, header: &Self::Header, l3: u32) -> Result<Next, Short>;

    /// Replaces the addresses, the header's own checksum included.
    fn set_addresses(header: &mut Self::Header, src: Self::Addr, dst: Self::Addr);

    /// Takes one off the TTL, the header's own checksum included. What no checksum of the packet makes good for is returned.
    fn decrement_ttl(header: &mut Self::Header) -> Delta;

    /// What [`Ip::next`] says of a header without options, extension headers or fragments; `None` if it has any.
    fn next_plain(header: &Self::Header, l3: u32) -> Option<Next>;

    /// Whether the packet ends, as its header says, before its transport header does. What follows that end in its frame is none of it: of a first
    /// piece, ports and the flags of TCP would come with the next (RFC 1858).
    #[inline(always)]
    fn ends_before(header: &Self::Header, l3: u32, next: &Next) -> bool {
        let length = Self::length(header);
        length != 0 && length + l3 < next.l4 + L4::least::<Self>(next.protocol)
    }

    /// As [`Ip::parse`], for packets whose network header carries nothing unusual: no loop, no branch that depends on how long the frame is.
    #[inline(always)]
    fn parse_plain<P: Load>(packet: &P, l3: u32) -> Option<Head<Self>> {
        let header: Self::Header = packet.load(l3).ok()?;
        let next = Self::next_plain(&header, l3)?;
        if Self::ends_before(&header, l3, &next) {
            return None;
        }
        let l4 = L4::parse::<Self, P>(packet, next.protocol, next.l4, Depth::Whole).ok()?;
        Some(Head::new(header, l3, next, l4))
    }

    /// Reads the packet whose network header is at `l3`.
    #[inline(always)]
    fn parse<P: Load>(packet: &P, l3: u32, depth: Depth) -> Result<Head<Self>, Short> {
        let header: Self::Header = packet.load(l3)?;
        let next = Self::next(packet, &header, l3)?;
        if next.piece != Piece::Later
            && depth == Depth::Whole
            && Self::ends_before(&header, l3, &next)
        {
            return Err(Short);
        }
        let l4 = match next.piece {
            Piece::Later => L4::LATER,
            Piece::Whole | Piece::First => {
                L4::parse::<Self, P>(packet, next.protocol, next.l4, depth)?
            }
        };
        Ok(Head::new(header, l3, next, l4))
    }
}

impl<I: Ip> Head<I> {
    #[inline(always)]
    fn new(header: I::Header, l3: u32, next: Next, l4: L4) -> Self {
        let (src, dst) = I::addresses(&header);
        Self {
            header,
            tuple: Tuple::new(next.protocol, src, l4.sport, dst, l4.dport),
            l3,
            l4: next.l4,
            kind: l4.kind,
            piece: next.piece,
            plain: next.plain,
            tcp_flags: l4.tcp_flags,
            l4_length: l4.length,
            icmp_type: l4.icmp_type,
            control: l4.control,
            identification: next.identification,
        }
    }

    /// What the pieces of one datagram have in common.
    #[inline(always)]
    #[must_use]
    pub fn fragment_key(&self) -> FragmentKey<I::Addr> {
        FragmentKey {
            src: self.tuple.src,
            dst: self.tuple.dst,
            identification: self.identification,
            protocol: I::protocol_of_pieces(self.tuple.protocol),
        }
    }

    /// Length of network and transport header in bytes.
    #[inline(always)]
    #[must_use]
    pub fn headers_length(&self) -> u32 {
        self.l4 - self.l3 + u32::from(self.l4_length)
    }
}

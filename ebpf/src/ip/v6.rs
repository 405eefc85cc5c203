//! IPv6 (RFC 8200).

use underpass_abi::{addr::Addr6, flow::protocol};

use super::{DSCP, Ip, Next, Piece};
use crate::{
    checksum::Delta,
    packet::{Covers, Load, Short},
};

/// The family.
#[derive(Clone, Copy, Debug)]
pub struct V6;

/// The fixed header, words in network order.
pub type Header6 = [u64; 5];

// The header as words: 0 version, class, flow label, payload length, next header, hop limit; 1 and 2 source; 3 and 4 destination.

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;

/// How many extension headers are walked over; a packet with more has a protocol that we don't know.
pub const MAX_EXTENSIONS: usize = 6;

const OFFSET_MASK: u16 = 0xfff8;
const MORE_FRAGMENTS: u16 = 1;

impl Ip for V6 {
    type Addr = Addr6;
    type Header = Header6;

    const ETHER_TYPE: u16 = 0x86ddu16.to_be();
    const HEADER_LENGTH: u32 = 40;
    const ICMP: u8 = protocol::ICMPV6;
    const ECHO_REQUEST: u8 = 128;
    const ECHO_REPLY: u8 = 129;
    const PSEUDO: Covers = Covers::Pseudo6;

    /// Destination unreachable, packet too big, time exceeded, parameter problem, and those that are yet to come (RFC 4443, 2.1).
    #[inline(always)]
    fn is_error(icmp_type: u8) -> bool {
        icmp_type < 128
    }

    #[inline(always)]
    fn addresses(header: &Header6) -> (Addr6, Addr6) {
        (Addr6(header[1], header[2]), Addr6(header[3], header[4]))
    }

    #[inline(always)]
    fn class(header: &Header6) -> u32 {
        /// All but the version.
        const MASK: u8 = 0x0f;
        let [class, label0, label1, label2, ..] = header[0].to_ne_bytes();
        u32::from_ne_bytes([class & MASK, label0, label1, label2])
    }

    #[inline(always)]
    fn dscp(header: &Header6) -> u8 {
        let [high, low, ..] = header[0].to_ne_bytes();
        (high << 4 | low >> 4) & DSCP
    }

    #[inline(always)]
    fn protocol_of_pieces(_: u8) -> u32 {
        0
    }

    #[inline(always)]
    fn ttl(header: &Header6) -> u8 {
        header[0].to_ne_bytes()[7]
    }

    #[inline(always)]
    fn length(header: &Header6) -> u32 {
        let [_, _, _, _, high, low, _, _] = header[0].to_ne_bytes();
        match u16::from_be_bytes([high, low]) {
            0 => 0,
            payload => Self::HEADER_LENGTH + u32::from(payload),
        }
    }

    #[inline(always)]
    fn next<P: Load>(packet: &P, header: &Header6, l3: u32) -> Result<Next, Short> {
        let first = header[0].to_ne_bytes();
        if first[0] >> 4 != 6 {
            return Err(Short);
        }
        let mut next = Next::plain(first[6], l3 + Self::HEADER_LENGTH);
        for _ in 0..MAX_EXTENSIONS {
            match next.protocol {
                HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => {
                    let [protocol, length]: [u8; 2] = packet.load(next.l4)?;
                    next.protocol = protocol;
                    next.l4 += (u32::from(length) + 1) * 8;
                }
                AUTHENTICATION => {
                    let [protocol, length]: [u8; 2] = packet.load(next.l4)?;
                    next.protocol = protocol;
                    next.l4 += (u32::from(length) + 2) * 4;
                }
                FRAGMENT => {
                    let [head, offset, high, low]: [u16; 4] = packet.load(next.l4)?;
                    let offset = u16::from_be(offset);
                    next.protocol = head.to_ne_bytes()[0];
                    next.l4 += 8;
                    next.identification = u32::from(high) << 16 | u32::from(low);
                    if offset & OFFSET_MASK != 0 {
                        next.piece = Piece::Later;
                        next.plain = false;
                        return Ok(next);
                    }
                    // An "atomic" fragment (RFC 6946) is a whole datagram.
                    if offset & MORE_FRAGMENTS != 0 {
                        next.piece = Piece::First;
                    }
                }
                _ => return Ok(next),
            }
            next.plain = false;
        }
        Ok(next)
    }

    #[inline(always)]
    fn next_plain(header: &Header6, l3: u32) -> Option<Next> {
        let first = header[0].to_ne_bytes();
        // A protocol that is an extension header has no ports, hence no flow: nobody asks for more.
        (first[0] >> 4 == 6).then_some(Next::plain(first[6], l3 + Self::HEADER_LENGTH))
    }

    #[inline(always)]
    fn set_addresses(header: &mut Header6, src: Addr6, dst: Addr6) {
        [header[1], header[2]] = [src.0, src.1];
        [header[3], header[4]] = [dst.0, dst.1];
    }

    #[inline(always)]
    fn decrement_ttl(header: &mut Header6) -> Delta {
        // The same for whatever else is in the word.
        const ONE_LESS: Delta = Delta::of64(u64::from_ne_bytes([0, 0, 0, 0, 0, 0, 0, 1]), 0);
        let mut bytes = header[0].to_ne_bytes();
        bytes[7] = bytes[7].wrapping_sub(1);
        header[0] = u64::from_ne_bytes(bytes);
        ONE_LESS
    }
}

//! IPv4 (RFC 791).

use underpass_abi::{addr::Addr4, flow::protocol};

use super::{DSCP, Ip, Next, Piece};
use crate::{
    checksum::{Delta, Summed},
    packet::{Covers, Load, Short},
};

/// The family.
#[derive(Clone, Copy, Debug)]
pub struct V4;

/// The fixed header, words in network order.
pub type Header4 = [u32; 5];

// The header as words: 0 version, length, TOS, total length; 1 identification, flags and offset; 2 TTL, protocol, checksum.

const OFFSET_MASK: u16 = 0x1fff;
const MORE_FRAGMENTS: u16 = 0x2000;

#[inline(always)]
fn halves(word: u32) -> (u16, u16) {
    let [a, b, c, d] = word.to_ne_bytes();
    (u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d]))
}

#[inline(always)]
fn joined(first: u16, second: u16) -> u32 {
    let ([a, b], [c, d]) = (first.to_ne_bytes(), second.to_ne_bytes());
    u32::from_ne_bytes([a, b, c, d])
}

/// The checksum of a header whose TTL is one less: what [`Delta::apply`] gives, in a third of the instructions. As `ip_decrease_ttl` of the kernel does,
/// it adds that one, and what overflows, and has 0 where the sum would be all ones.
#[inline(always)]
const fn one_hop_less(checksum: u16) -> u16 {
    let sum = checksum as u32 + 0x0100_u16.to_be() as u32;
    let sum = sum + (sum >= 0xffff) as u32;
    #[expect(clippy::cast_possible_truncation, reason = "the overflow is in it")]
    let sum = sum as u16;
    sum
}

impl Ip for V4 {
    type Addr = Addr4;
    type Header = Header4;

    const ETHER_TYPE: u16 = 0x0800u16.to_be();
    const HEADER_LENGTH: u32 = 20;
    const ICMP: u8 = protocol::ICMP;
    const ECHO_REQUEST: u8 = 8;
    const ECHO_REPLY: u8 = 0;
    const PSEUDO: Covers = Covers::Pseudo4;

    /// Destination unreachable, source quench, time exceeded, parameter problem.
    #[inline(always)]
    fn is_error(icmp_type: u8) -> bool {
        matches!(icmp_type, 3 | 4 | 11 | 12)
    }

    #[inline(always)]
    fn addresses(header: &Header4) -> (Addr4, Addr4) {
        (Addr4(header[3]), Addr4(header[4]))
    }

    #[inline(always)]
    fn class(header: &Header4) -> u32 {
        let [_, tos, _, _] = header[0].to_ne_bytes();
        u32::from(tos)
    }

    #[inline(always)]
    fn dscp(header: &Header4) -> u8 {
        let [_, tos, _, _] = header[0].to_ne_bytes();
        tos & DSCP
    }

    #[inline(always)]
    fn protocol_of_pieces(protocol: u8) -> u32 {
        u32::from(protocol)
    }

    #[inline(always)]
    fn ttl(header: &Header4) -> u8 {
        header[2].to_ne_bytes()[0]
    }

    #[inline(always)]
    fn length(header: &Header4) -> u32 {
        u32::from(u16::from_be(halves(header[0]).1))
    }

    #[inline(always)]
    fn next<P: Load>(_packet: &P, header: &Header4, l3: u32) -> Result<Next, Short> {
        let version_and_length = header[0].to_ne_bytes()[0];
        let length = u32::from(version_and_length & 0xf) * 4;
        if version_and_length >> 4 != 4 || length < Self::HEADER_LENGTH {
            return Err(Short);
        }
        let (identification, offset) = halves(header[1]);
        let offset = u16::from_be(offset);
        let piece = if offset & OFFSET_MASK != 0 {
            Piece::Later
        } else if offset & MORE_FRAGMENTS != 0 {
            Piece::First
        } else {
            Piece::Whole
        };
        Ok(Next {
            protocol: header[2].to_ne_bytes()[1],
            l4: l3 + length,
            piece,
            plain: length == Self::HEADER_LENGTH && piece == Piece::Whole,
            identification: u32::from(identification),
        })
    }

    #[inline(always)]
    fn next_plain(header: &Header4, l3: u32) -> Option<Next> {
        let (_, offset) = halves(header[1]);
        if header[0].to_ne_bytes()[0] != 0x45
            || u16::from_be(offset) & (OFFSET_MASK | MORE_FRAGMENTS) != 0
        {
            return None;
        }
        Some(Next::plain(
            header[2].to_ne_bytes()[1],
            l3 + Self::HEADER_LENGTH,
        ))
    }

    #[inline(always)]
    fn set_addresses(header: &mut Header4, src: Addr4, dst: Addr4) {
        let delta = Addr4(header[3]).delta(src).and(Addr4(header[4]).delta(dst));
        let (ttl_and_protocol, checksum) = halves(header[2]);
        header[2] = joined(ttl_and_protocol, delta.apply(checksum));
        header[3] = src.0;
        header[4] = dst.0;
    }

    #[inline(always)]
    fn decrement_ttl(header: &mut Header4) -> Delta {
        let (old, checksum) = halves(header[2]);
        let [ttl, protocol] = old.to_ne_bytes();
        let new = u16::from_ne_bytes([ttl.wrapping_sub(1), protocol]);
        header[2] = joined(new, one_hop_less(checksum));
        Delta::NONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_hop_less_is_a_change_of_a_word() {
        for ttl in [2, 64, 128, 255] {
            let [old, new] = [ttl, ttl - 1].map(|ttl| u16::from_ne_bytes([ttl, 6]));
            for checksum in 0..=u16::MAX {
                let wanted = Delta::of16(old, new).apply(checksum);
                assert_eq!(one_hop_less(checksum), wanted, "of {checksum:#06x}");
            }
        }
    }
}

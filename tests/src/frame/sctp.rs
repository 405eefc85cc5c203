//! SCTP packets, made and read without a stack that speaks it.

use std::net::SocketAddr;

use etherparse::{IpNumber, NetSlice, SlicedPacket};

use super::{Ends, HOPS, written};

/// Its protocol number.
pub const PROTOCOL: u8 = 132;

const HEADER: usize = 12;

/// The verification tag of every association here, the same in both directions.
const TAG: u32 = 0x1234_5678;

/// Chunk types.
pub mod chunk {
    /// Data.
    pub const DATA: u8 = 0;
    /// Opens an association.
    pub const INIT: u8 = 1;
    /// The answer to [`INIT`].
    pub const INIT_ACK: u8 = 2;
    /// What was received.
    pub const SACK: u8 = 3;
    /// Is anybody there?
    pub const HEARTBEAT: u8 = 4;
    /// The answer to [`HEARTBEAT`].
    pub const HEARTBEAT_ACK: u8 = 5;
    /// The third packet of an association.
    pub const COOKIE_ECHO: u8 = 10;
    /// The answer to [`COOKIE_ECHO`].
    pub const COOKIE_ACK: u8 = 11;
}

impl Ends {
    /// An SCTP packet with one chunk of this type.
    #[must_use]
    pub fn sctp(&self, sport: u16, dport: u16, chunk: u8, content: &[u8]) -> Vec<u8> {
        let mut packet = unsummed(sport, dport, chunk, content);
        let sum = crc32c(&packet);
        packet[8..HEADER].copy_from_slice(&sum.to_le_bytes());
        written(|frame| self.ip(HOPS).write(frame, IpNumber(PROTOCOL), &packet))
    }

    /// An SCTP packet as its sender leaves it where a device fills in the checksum.
    #[must_use]
    pub fn unsummed_sctp(&self, sport: u16, dport: u16, chunk: u8, content: &[u8]) -> Vec<u8> {
        let packet = unsummed(sport, dport, chunk, content);
        written(|frame| self.ip(HOPS).write(frame, IpNumber(PROTOCOL), &packet))
    }
}

/// Header with a checksum of 0, and a chunk padded to words. Tags are such that connection tracking follows: who opens an association has
/// none to send yet, and tells its own in the first word of what it sends, as the one who answers does.
fn unsummed(sport: u16, dport: u16, chunk: u8, content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + content.len()).expect("a chunk that fits a packet");
    let tag = if chunk == chunk::INIT { 0 } else { TAG };
    let mut content = content.to_vec();
    if matches!(chunk, chunk::INIT | chunk::INIT_ACK) {
        let own = content.iter_mut().zip(TAG.to_be_bytes());
        own.for_each(|(byte, tag)| *byte = tag);
    }
    let mut packet = [
        &sport.to_be_bytes()[..],
        &dport.to_be_bytes(),
        &tag.to_be_bytes(),
        &[0; 4],
        &[chunk, 0],
        &length.to_be_bytes(),
        &content,
    ]
    .concat();
    packet.resize(packet.len().next_multiple_of(4), 0);
    packet
}

/// What an SCTP packet says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sctp {
    /// Who sent it.
    pub src: SocketAddr,
    /// Who it is for.
    pub dst: SocketAddr,
    /// Type of its first chunk.
    pub chunk: u8,
    /// The checksum as it stands.
    pub sum: u32,
    /// The checksum as it should be.
    pub expected_sum: u32,
}

/// Reads a frame; `None` if it carries no SCTP.
#[must_use]
pub fn read(frame: &[u8]) -> Option<Sctp> {
    let summary = super::read(frame)?;
    let packet = SlicedPacket::from_ethernet(frame).ok()?;
    let payload = match packet.net? {
        NetSlice::Ipv4(ip) => ip.payload().payload,
        NetSlice::Ipv6(ip) => ip.payload().payload,
        NetSlice::Arp(_) => return None,
    };
    if summary.protocol != PROTOCOL || payload.len() <= HEADER {
        return None;
    }
    let port = |at: usize| u16::from_be_bytes([payload[at], payload[at + 1]]);
    let mut zeroed = payload.to_vec();
    zeroed[8..HEADER].fill(0);
    Some(Sctp {
        src: SocketAddr::new(summary.src, port(0)),
        dst: SocketAddr::new(summary.dst, port(2)),
        chunk: payload[HEADER],
        sum: u32::from_le_bytes(payload[8..HEADER].try_into().ok()?),
        expected_sum: crc32c(&zeroed),
    })
}

/// The `CRC32c` of all bytes (RFC 9260, appendix A).
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 }
        })
    })
}

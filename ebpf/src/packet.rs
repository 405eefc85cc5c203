//! Access to a packet's bytes, the one trait between the programs and their tests.

use underpass_abi::Plain;

use crate::{checksum::Delta, crc32c};

/// The packet ends before the bytes that were asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Short;

/// What a change of L4 checksum makes good, see [`Packet::replace_l4_checksum`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Covers {
    /// Bytes that the checksum covers and that lie in the packet: ports, an echo identifier, a quoted header.
    Payload,
    /// Addresses of the IPv4 pseudo header.
    Pseudo4,
    /// Addresses of the IPv6 pseudo header; no other checksum makes good for them.
    Pseudo6,
}

/// Whether a checksum of zero says "there is none" (UDP), or is a sum like any other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Zero {
    /// Zero stays zero, and a sum that comes out as zero is written as `0xffff`.
    IsAbsent,
    /// Zero is a sum.
    IsSum,
}

/// A packet that can be read, from its link-layer header on (or from its IP header, where the device has no link-layer header).
pub trait Load {
    /// The `T` at `offset` bytes from the packet's start.
    fn load<T: Plain>(&self, offset: u32) -> Result<T, Short>;
}

/// A packet that can be changed.
pub trait Packet: Load {
    /// Overwrites the bytes at `offset`. Checksums are the caller's business.
    fn store<T: Plain>(&mut self, offset: u32, value: &T) -> Result<(), Short>;

    /// Corrects the L4 checksum at `offset` for changed bytes.
    ///
    /// A packet whose checksum is still to be filled in by its device carries the sum of its pseudo header only: such a packet takes
    /// changes of addresses, and ignores those of its payload.
    fn replace_l4_checksum(
        &mut self,
        offset: u32,
        delta: Delta,
        covers: Covers,
        zero: Zero,
    ) -> Result<(), Short>;

    /// Tells the packet that bytes changed which no checksum inside it makes good for (the hop limit of IPv6): the sum over all
    /// bytes that some devices deliver must follow.
    fn account(&mut self, delta: Delta);

    /// [`crc32c::change`]; programs keep it apart from everything else.
    #[inline(always)]
    fn crc32c_change(&self, word: u32, length: u32) -> u32 {
        crc32c::change(word, length)
    }
}

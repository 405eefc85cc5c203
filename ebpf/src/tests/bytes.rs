//! A packet in memory, with the checksum offloads of the kernel's `sk_buff`.

use std::{any::Any, ops::Range, vec::Vec};

use underpass_abi::Plain;

use crate::{
    checksum::Delta,
    packet::{Covers, Load, Packet, Short, Zero},
};

/// `skb->ip_summed`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Summed {
    /// `CHECKSUM_NONE`: the checksums in the packet are all there is.
    None,
    /// `CHECKSUM_PARTIAL`: the transport checksum is the sum of the pseudo header; the device fills in the rest.
    Partial,
    /// `CHECKSUM_COMPLETE`: the device delivered the sum of all bytes from the network header on.
    Complete(u16),
}

/// A packet in memory.
#[derive(Clone, Debug)]
pub(super) struct Bytes {
    pub(super) bytes: Vec<u8>,
    pub(super) summed: Summed,
}

/// The ones' complement sum of words in memory order, an odd byte padded with zero.
pub(super) fn sum(bytes: &[u8]) -> u16 {
    bytes.chunks(2).fold(0, |sum, word| {
        plus(
            sum,
            u16::from_ne_bytes([word[0], word.get(1).copied().unwrap_or(0)]),
        )
    })
}

/// The `CRC32c` of all bytes (RFC 9260, appendix A), bit by bit.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 }
        })
    })
}

/// Ones' complement addition.
pub(super) fn plus(a: u16, b: u16) -> u16 {
    let (sum, carry) = a.overflowing_add(b);
    sum + u16::from(carry)
}

/// Whether two sums are equal: ones' complement has two zeros.
pub(super) fn same(a: u16, b: u16) -> bool {
    a % 0xffff == b % 0xffff
}

/// The change in 16 bits.
fn change(delta: Delta) -> u16 {
    sum(&delta.wsum().to_ne_bytes())
}

impl Bytes {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self {
            bytes,
            summed: Summed::None,
        }
    }

    /// With the sum that a device delivers.
    pub(super) fn summed_from(bytes: Vec<u8>, l3: u32) -> Self {
        let summed = Summed::Complete(sum(&bytes[l3 as usize..]));
        Self { bytes, summed }
    }

    fn range(&self, offset: u32, length: usize) -> Result<Range<usize>, Short> {
        let start = usize::try_from(offset).map_err(|_| Short)?;
        let end = start
            .checked_add(length)
            .filter(|end| *end <= self.bytes.len())
            .ok_or(Short)?;
        Ok(start..end)
    }
}

/// The types that the code under test loads and stores: the crate allows no unsafe code, not even to read any [`Plain`] from bytes.
macro_rules! for_each_plain {
    ($macro:ident) => {
        $macro! { [u8; 2], [u32; 1], [u16; 2], [u16; 3], [u16; 4], [u16; 7], [u32; 5], [u64; 5] }
    };
}

trait Words: Plain + Sized {
    fn read(bytes: &[u8]) -> Self;
    fn write(&self, bytes: &mut [u8]);
}

macro_rules! words {
    ($([$word:ty; $n:literal]),+) => {$(
        impl Words for [$word; $n] {
            fn read(bytes: &[u8]) -> Self {
                let mut words = bytes.chunks_exact(size_of::<$word>());
                [(); $n].map(|()| {
                    let word = words.next().expect("the caller sliced the size of the array");
                    <$word>::from_ne_bytes(word.try_into().expect("chunks have the size of a word"))
                })
            }

            fn write(&self, bytes: &mut [u8]) {
                for (to, word) in bytes.chunks_exact_mut(size_of::<$word>()).zip(self) {
                    to.copy_from_slice(&word.to_ne_bytes());
                }
            }
        }
    )+};
}
for_each_plain!(words);

fn read<T: Plain>(bytes: &[u8]) -> T {
    macro_rules! read_as {
        ($($words:ty),+) => {
            if let Some(value) = (&u16::from_ne_bytes([bytes[0], bytes[1]]) as &dyn Any).downcast_ref::<T>() {
                return *value;
            }
            $(if size_of::<$words>() == bytes.len() && let Some(value) = (&<$words>::read(bytes) as &dyn Any).downcast_ref::<T>() {
                return *value;
            })+
        };
    }
    for_each_plain!(read_as);
    panic!("add {} to for_each_plain!", std::any::type_name::<T>());
}

fn write<T: Plain>(bytes: &mut [u8], value: &T) {
    let value: &dyn Any = value;
    if let Some(word) = value.downcast_ref::<u16>() {
        return bytes.copy_from_slice(&word.to_ne_bytes());
    }
    macro_rules! write_as {
        ($($words:ty),+) => {
            $(if let Some(words) = value.downcast_ref::<$words>() {
                return words.write(bytes);
            })+
        };
    }
    for_each_plain!(write_as);
    panic!("add {} to for_each_plain!", std::any::type_name::<T>());
}

impl Load for Bytes {
    fn load<T: Plain>(&self, offset: u32) -> Result<T, Short> {
        let range = self.range(offset, size_of::<T>())?;
        Ok(read(&self.bytes[range]))
    }
}

impl Packet for Bytes {
    fn store<T: Plain>(&mut self, offset: u32, value: &T) -> Result<(), Short> {
        let range = self.range(offset, size_of::<T>())?;
        write(&mut self.bytes[range], value);
        Ok(())
    }

    fn replace_l4_checksum(
        &mut self,
        offset: u32,
        delta: Delta,
        covers: Covers,
        zero: Zero,
    ) -> Result<(), Short> {
        let before: u16 = self.load(offset)?;
        if zero == Zero::IsAbsent && before == 0 {
            return Ok(());
        }
        let mut after = match (self.summed, covers) {
            (Summed::Partial, Covers::Payload) => before,
            (Summed::Partial, Covers::Pseudo4 | Covers::Pseudo6) => plus(before, change(delta)),
            (Summed::None | Summed::Complete(_), _) => !plus(!before, change(delta)),
        };
        if let (Summed::Complete(sum), Covers::Pseudo4) = (self.summed, covers) {
            // The field changed, and the addresses that it changed for are made good by the header's own checksum.
            self.summed = Summed::Complete(plus(sum, !change(delta)));
        }
        if zero == Zero::IsAbsent && after == 0 {
            after = 0xffff;
        }
        self.store(offset, &after)
    }

    fn account(&mut self, delta: Delta) {
        if let Summed::Complete(sum) = self.summed {
            self.summed = Summed::Complete(plus(sum, change(delta)));
        }
    }
}

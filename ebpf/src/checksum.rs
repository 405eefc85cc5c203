//! The internet checksum's incremental update, as a value.
//!
//! RFC 1624, equation 3: `HC' = ~(~HC + ~m + m')` in ones' complement arithmetic, which is the form that never turns a valid sum
//! into the other zero. A [`Delta`] is the sum of all `~m + m'`. Ones' complement addition does not mind the byte order as long as it
//! is the same on both sides (RFC 1071, section 2 B), so all words are used as they stand in the packet.

use underpass_abi::addr::{Addr4, Addr6};

/// The sum of `~old + new` over changed words, not folded to 16 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Delta(u64);

impl Delta {
    /// No change.
    pub const NONE: Self = Self(0);

    /// One 16-bit word changed. It must lie at an even offset from the start of what the checksum covers.
    #[inline(always)]
    #[must_use]
    pub const fn of16(old: u16, new: u16) -> Self {
        Self(!old as u64 + new as u64)
    }

    /// One 32-bit word changed.
    #[inline(always)]
    #[must_use]
    pub const fn of32(old: u32, new: u32) -> Self {
        Self(!old as u64 + new as u64)
    }

    /// One 64-bit word changed.
    #[inline(always)]
    #[must_use]
    pub const fn of64(old: u64, new: u64) -> Self {
        let old = !old;
        Self((old >> 32) + (old & 0xffff_ffff) + (new >> 32) + (new & 0xffff_ffff))
    }

    /// Both changes.
    #[inline(always)]
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    /// The change in 32 bits, as the kernel's `__wsum` holds it.
    #[inline(always)]
    #[must_use]
    pub const fn wsum(self) -> u32 {
        let sum = (self.0 >> 32) + (self.0 & 0xffff_ffff);
        let sum = (sum >> 32) + (sum & 0xffff_ffff);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "folded twice: fits 32 bits"
        )]
        let sum = sum as u32;
        sum
    }

    /// A word that was not there before.
    #[inline(always)]
    #[must_use]
    pub const fn plus16(self, word: u16) -> Self {
        Self(self.0 + word as u64)
    }

    /// The change in 16 bits.
    #[inline(always)]
    #[must_use]
    pub const fn sum(self) -> u16 {
        fold(self.wsum() as u64)
    }

    /// The checksum after the change.
    #[inline(always)]
    #[must_use]
    pub const fn apply(self, checksum: u16) -> u16 {
        !fold(self.wsum() as u64 + !checksum as u64)
    }
}

#[inline(always)]
const fn fold(sum: u64) -> u16 {
    let sum = (sum >> 32) + (sum & 0xffff_ffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    #[expect(clippy::cast_possible_truncation, reason = "folded: fits 16 bits")]
    let sum = sum as u16;
    sum
}

/// Addresses whose change can be summed.
pub trait Summed: Copy {
    /// The change from `self` to `new`.
    fn delta(self, new: Self) -> Delta;

    /// The sum of its own words.
    fn words(self) -> Delta;
}

impl Summed for Addr4 {
    #[inline(always)]
    fn delta(self, new: Self) -> Delta {
        Delta::of32(self.0, new.0)
    }

    #[inline(always)]
    fn words(self) -> Delta {
        Delta::of32(u32::MAX, self.0)
    }
}

impl Summed for Addr6 {
    #[inline(always)]
    fn delta(self, new: Self) -> Delta {
        Delta::of64(self.0, new.0).and(Delta::of64(self.1, new.1))
    }

    #[inline(always)]
    fn words(self) -> Delta {
        Delta::of64(u64::MAX, self.0).and(Delta::of64(u64::MAX, self.1))
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    fn full(words: &[u16]) -> u16 {
        !fold(words.iter().map(|word| u64::from(*word)).sum())
    }

    proptest! {
        #[test]
        fn an_update_gives_what_a_full_sum_gives(mut words in proptest::collection::vec(any::<u16>(), 8..40), at in 0usize..4, new in any::<[u16; 4]>()) {
            // A sum over words that are not all zero never is 0xffff, so there is one form of each sum only.
            words.push(1);
            let before = full(&words);
            let old: Vec<u16> = words[at..at + 4].to_vec();
            words[at..at + 4].copy_from_slice(&new);
            let after = full(&words);

            let by16 = (0..4).fold(Delta::NONE, |delta, i| delta.and(Delta::of16(old[i], new[i])));
            prop_assert_eq!(by16.apply(before), after);

            let word32 = |w: &[u16]| u32::from(w[1]) << 16 | u32::from(w[0]);
            let by32 = Delta::of32(word32(&old), word32(&new)).and(Delta::of32(word32(&old[2..]), word32(&new[2..])));
            prop_assert_eq!(by32.apply(before), after);

            let word64 = |w: &[u16]| u64::from(word32(&w[2..])) << 32 | u64::from(word32(w));
            prop_assert_eq!(Delta::of64(word64(&old), word64(&new)).apply(before), after);
        }
    }

    #[test]
    fn the_example_of_rfc_1624() {
        // Section 4: a sum of 0xDD2F, a field that goes from 0x5555 to 0x3285, a result of 0x0000.
        assert_eq!(Delta::of16(0x5555, 0x3285).apply(0xdd2f), 0x0000);
    }
}

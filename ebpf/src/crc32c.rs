//! The checksum of SCTP, corrected for a change of its ports without reading its payload.
//!
//! A CRC is linear: the CRCs of two messages of one length differ by what the difference of the messages gives, without initial value
//! and final complement. Here the difference is one 32-bit word at the front and zeros behind it, so it is the word's polynomial times
//! a power of x, modulo the CRC's own polynomial.
//!
//! Everything is in the reflected form that `CRC32c` is defined with (RFC 9260, appendix A): the lowest bit is the coefficient of x^31.
//! A word of the packet is in this form if its first byte is the lowest.

/// The polynomial 0x1EDC6F41, reflected, without its coefficient of x^32.
const POLYNOMIAL: u32 = 0x82f6_3b78;
/// The polynomial 1, reflected.
const ONE: u32 = 1 << 31;

/// How many hexadecimal digits a length has: 64 KiB at most.
const DIGITS: usize = 4;

/// `x^(8 * digit * 16^place)`, at `place << 4 | digit`: what so many bytes of zero multiply by.
static POWERS: [u32; DIGITS << 4] = powers();

/// How the `CRC32c` of `length` bytes (at most 65,535) changes with their first 32-bit word: what to combine it with by exclusive or.
/// `word` is the exclusive or of the old word and the new one, as a number whose lowest byte comes first in the packet; so is the result.
#[inline(always)]
#[must_use]
pub fn change(word: u32, length: u32) -> u32 {
    let mut product = word;
    for place in 0..DIGITS {
        let digit = length >> (4 * place) & 0xf;
        product = multiply(product, POWERS[place << 4 | digit as usize]);
    }
    product
}

/// The product of two polynomials of degree 31 modulo the CRC's own.
///
/// No bit decides where to go: the verifier would follow both ways each time. It also tells a mask of a constant by a bit from one of
/// a variable, and follows both values of the former, hence the table.
#[inline(always)]
const fn multiply(a: u32, b: u32) -> u32 {
    // The coefficient of x^0 is bit 63, that of x^62 is bit 1.
    let a = (a as u64) << 32;
    let mut product = 0;
    let mut power = 0;
    while power < 32 {
        // Hidden from the compiler, so that it neither unrolls the loop, for which it would take a third of the stack, nor makes a
        // branch of the mask.
        let shift = core::hint::black_box(power);
        product ^= a >> shift & 0u64.wrapping_sub((b >> (31 - shift) & 1) as u64);
        power += 1;
    }
    #[expect(clippy::cast_possible_truncation, reason = "both halves, one by one")]
    let (low, mut high) = ((product >> 32) as u32, product as u32);
    let mut digit = 0;
    while digit < 8 {
        high = high >> 4 ^ REDUCED[(high & 0xf) as usize];
        digit += 1;
    }
    low ^ high
}

/// The polynomials of x^32 to x^35 modulo the CRC's own: x^35 is the lowest bit of the index.
static REDUCED: [u32; 16] = reduced();

const fn reduced() -> [u32; 16] {
    let mut reduced = [0; 16];
    let mut index = 0;
    while index < 16 {
        let mut rest = index;
        let mut bit = 0;
        while bit < 4 {
            rest = if rest & 1 == 1 {
                rest >> 1 ^ POLYNOMIAL
            } else {
                rest >> 1
            };
            bit += 1;
        }
        reduced[index as usize] = rest;
        index += 1;
    }
    reduced
}

const fn powers() -> [u32; DIGITS << 4] {
    let mut powers = [ONE; DIGITS << 4];
    // x^8, then x^(8 * 16), and so on.
    let mut step = ONE >> 8;
    let mut place = 0;
    while place < DIGITS {
        let mut digit = 1;
        while digit < 16 {
            let index = place << 4 | digit;
            powers[index] = multiply(powers[index - 1], step);
            digit += 1;
        }
        step = multiply(powers[place << 4 | 15], step);
        place += 1;
    }
    powers
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;
    use crate::tests::crc32c;

    #[test]
    fn the_plain_sum_is_the_one_of_rfc_3720() {
        // Appendix B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
    }

    proptest! {
        #[test]
        fn a_change_gives_what_a_plain_sum_gives(
            mut bytes in proptest::collection::vec(any::<u8>(), 4..3000), new in any::<[u8; 4]>(),
        ) {
            let before = crc32c(&bytes);
            let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) ^ u32::from_le_bytes(new);
            bytes[..4].copy_from_slice(&new);
            let length = u32::try_from(bytes.len()).expect("a short packet");
            prop_assert_eq!(before ^ change(word, length), crc32c(&bytes));
        }
    }

    #[test]
    fn every_length_has_its_power() {
        let mut expected = ONE;
        for length in 0..=0xffff {
            assert_eq!(change(ONE, length), expected, "{length}");
            expected = multiply(expected, ONE >> 8);
        }
    }
}

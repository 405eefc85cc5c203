//! The proof that a packet carries of itself: a keyed hash of its tuple, written to `skb->hash` where the packet enters the stack and
//! compared where it leaves.

use underpass_abi::{
    addr::{Addr, Family},
    flow::Tuple,
};

// Odd 64-bit constants with no structure of their own: the fractional parts of the golden ratio and of the square root of 3.
const FACTORS: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xbb67_ae85_84ca_a73b];

/// The fingerprint of a tuple and a DSCP (as [`Ip::dscp`](crate::ip::Ip::dscp)) under the node's secret key: a rule that gives packets another class
/// must see all of them.
///
/// Two tuples agree by chance once in 2^32. A sender who does not know the key can't aim for it, and sees at
/// most the 16 bits that a tunnel's outer source port shows.
#[inline(always)]
#[must_use]
pub fn fingerprint<A: Family>(key: [u64; 2], tuple: &Tuple<A>, dscp: u8) -> u32 {
    let Addr(src_high, src_low) = tuple.src.wide();
    let Addr(dst_high, dst_low) = tuple.dst.wide();
    let rest = u64::from(dscp) << 40
        | u64::from(tuple.sport) << 24
        | u64::from(tuple.dport) << 8
        | u64::from(tuple.protocol);
    let factors = [FACTORS[0] ^ key[0] << 1, FACTORS[1] ^ key[1] << 1];
    let mut hash = key[0];
    hash = mix(hash ^ src_high, factors);
    hash = mix(hash ^ src_low, factors);
    hash = mix(hash ^ dst_high, factors);
    hash = mix(hash ^ dst_low, factors);
    hash = mix(hash ^ rest ^ key[1], factors);
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the upper half is folded in"
    )]
    let folded = (hash ^ hash >> 32) as u32;
    folded
}

/// The sum of a tuple under the node's key: a fingerprint for less than half its price, of packets that whoever sends them gains nothing by forging. Two
/// tuples of which netfilter makes one of the other agree by chance.
#[inline(always)]
#[must_use]
pub fn sum<A: Family>(key: [u64; 2], tuple: &Tuple<A>) -> u32 {
    let Addr(src_high, src_low) = tuple.src.wide();
    let Addr(dst_high, dst_low) = tuple.dst.wide();
    let ports = u64::from(tuple.sport) << 16 | u64::from(tuple.dport);
    let src = (key[0] ^ src_high).wrapping_mul(FACTORS[1]) ^ src_low;
    let dst = (key[1] ^ dst_high).wrapping_mul(FACTORS[0]) ^ dst_low;
    // A change of the source must not be taken back by the same change of the destination: 1:1 NAT may make both.
    let sum = (src ^ src >> 32).wrapping_mul(FACTORS[0]) ^ dst;
    let sum = (sum ^ sum >> 29 ^ ports << 32).wrapping_mul(FACTORS[0]);
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the lower half is folded in"
    )]
    let folded = (sum >> 32 ^ sum) as u32;
    folded
}

/// Two rounds, with factors that only this node knows: a change of the top bit passes one multiplication unchanged, whatever the factor,
/// so after one round a sender could tell what change of the next word takes it back.
#[inline(always)]
const fn mix(value: u64, factors: [u64; 2]) -> u64 {
    let value = value.wrapping_mul(factors[0]);
    let value = (value ^ value >> 29).wrapping_mul(factors[1]);
    value ^ value >> 29
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use underpass_abi::addr::{Addr4, Addr6};

    use super::*;

    #[test]
    fn neighbours_of_a_tuple_have_other_fingerprints() {
        let mut seen = HashSet::new();
        for src in 0..64u32 {
            for port in 0..64u16 {
                for protocol in [6, 17] {
                    let tuple = Tuple::new(protocol, Addr4(src), port, Addr4(9), 80);
                    assert!(seen.insert(fingerprint([1, 2], &tuple, 0)), "{tuple:?}");
                    assert!(
                        seen.insert(fingerprint([1, 2], &tuple.reversed(), 0)),
                        "reverse of {tuple:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn neighbours_of_a_tuple_have_other_sums() {
        let mut seen = HashSet::new();
        for src in 0..64 {
            for port in 0..64 {
                let [near, far] = [src, 9].map(|last: u64| Addr6(0xfd, last.to_be()));
                let tuple = Tuple::new(6, near, port, far, 80);
                assert!(seen.insert(sum([1, 2], &tuple)), "{tuple:?}");
                let back = tuple.reversed();
                assert!(seen.insert(sum([1, 2], &back)), "{back:?}");
            }
        }
    }

    /// As netfilter may do with both addresses of a packet.
    #[test]
    fn one_change_of_both_addresses_matters() {
        let (src, dst) = (Addr6(0xfd00, 0x1234), Addr6(0x2001, 0x5678));
        let before = Tuple::new(6, src, 1, dst, 2);
        for change in (0..64).map(|bit| 1_u64 << bit) {
            for turn in 0..64 {
                let other = change.rotate_right(turn);
                let after = Tuple::new(
                    6,
                    Addr6(src.0, src.1 ^ change),
                    1,
                    Addr6(dst.0, dst.1 ^ other),
                    2,
                );
                for key in [[1, 2], [0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210]] {
                    assert_ne!(sum(key, &before), sum(key, &after), "{change:x} {other:x}");
                }
            }
        }
    }

    #[test]
    fn the_key_matters() {
        let tuple = Tuple::new(6, Addr4(1), 2, Addr4(3), 4);
        let under = |key| fingerprint(key, &tuple, 0);
        assert_ne!(under([1, 2]), under([1, 3]));
        assert_ne!(under([1, 2]), under([2, 2]));
    }

    #[test]
    fn the_class_matters() {
        let tuple = Tuple::new(6, Addr4(1), 2, Addr4(3), 4);
        let seen: HashSet<u32> = (0..64)
            .map(|dscp| fingerprint([1, 2], &tuple, dscp << 2))
            .collect();
        assert_eq!(seen.len(), 64);
    }
}

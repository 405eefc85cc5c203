//! Canonical keys and fingerprints: what the two directions of a flow have in common, and what they have not.

use proptest::prelude::*;
use underpass_abi::{
    addr::{Addr6, Family},
    flow::{End, Tuple},
};

use super::{datagram::any_ends, family::Model, for_both_families};
use crate::fingerprint::fingerprint;

fn any_tuple<I: Model>() -> impl Strategy<Value = Tuple<I::Addr>> {
    // Few ports, so that both ends are equal every now and then.
    (any_ends::<I>(), any::<u8>(), any::<Option<[bool; 2]>>()).prop_map(
        |((src, dst, sport, dport), protocol, few)| {
            let (sport, dport) = few.map_or((sport, dport), |[a, b]| (a.into(), b.into()));
            Tuple::new(protocol, src, sport, dst, dport)
        },
    )
}

fn tag<A: Family>(tuple: Tuple<A>) -> u32 {
    tuple.key().0.tag()
}

for_both_families! {
    #[test]
    fn both_directions_have_one_key(tuple in any_tuple::<I>()) {
        let (key, end) = tuple.key();
        let (reverse, reverse_end) = tuple.reversed().key();
        prop_assert_eq!(key, reverse);
        prop_assert_eq!(tuple.reversed().reversed(), tuple);
        if tuple == tuple.reversed() {
            prop_assert_eq!((end, reverse_end), (End::A, End::A));
        } else {
            prop_assert_eq!(end, reverse_end.other());
        }
        prop_assert_eq!(key.0, if end == End::A { tuple } else { tuple.reversed() });
        prop_assert!((key.0.src, key.0.sport) <= (key.0.dst, key.0.dport));
    }

    #[test]
    fn a_tag_knows_every_part_of_its_key(tuple in any_tuple::<I>(), bit in 0..16u32) {
        prop_assert_eq!(tag(tuple), tag(tuple.reversed()));
        // One part alone that is another: an entry of the same two hosts, or of the same port of another host.
        for changed in [
            Tuple { sport: tuple.sport ^ 1 << bit, ..tuple },
            Tuple { dport: tuple.dport ^ 1 << bit, ..tuple },
            Tuple { protocol: tuple.protocol ^ 1 << (bit % 8), ..tuple },
        ] {
            let is_turned = (tuple.key().1 == End::A) != (changed.key().1 == End::A);
            prop_assert!(is_turned || tag(changed) != tag(tuple), "{changed:?}");
        }
    }

    #[test]
    fn other_flows_have_other_keys(a in any_tuple::<I>(), b in any_tuple::<I>()) {
        prop_assert_eq!(a.key().0 == b.key().0, a == b || a == b.reversed());
    }

    #[test]
    fn fingerprints_tell_directions_apart(tuple in any_tuple::<I>(), key in any::<[u64; 2]>()) {
        let reversed = tuple.reversed();
        prop_assert_eq!(fingerprint(key, &tuple, 0) == fingerprint(key, &reversed, 0), tuple == reversed);
    }

    #[test]
    fn fingerprints_tell_neighbours_apart(tuple in any_tuple::<I>(), key in any::<[u64; 2]>(), port in 0..16u32) {
        let change = 1 << port;
        let source = Tuple { sport: tuple.sport ^ change, ..tuple };
        let destination = Tuple { dport: tuple.dport ^ change, ..tuple };
        let protocol = Tuple { protocol: tuple.protocol ^ 1 << (port & 7), ..tuple };
        for other in [source, destination, protocol] {
            prop_assert_ne!(fingerprint(key, &tuple, 0), fingerprint(key, &other, 0));
        }
    }
}

/// A change of the top bit passes a multiplication, whatever the factor. No change of one word may take back what became of
/// another's.
#[test]
fn no_change_cancels_another_under_every_key() {
    let tuple = Tuple::new(6, Addr6(1, 2), 3, Addr6(4, 5), 6);
    let top = 1 << 63;
    let mut seen = 0;
    for key in (0..256u64).map(|i| [i.wrapping_mul(0x1234_5678_9abc_def1), !i]) {
        for shift in 1..64 {
            let after = top | top >> shift;
            let src = Addr6(tuple.src.0 ^ top, tuple.src.1 ^ after);
            seen += u32::from(
                fingerprint(key, &tuple, 0) == fingerprint(key, &Tuple { src, ..tuple }, 0),
            );
            let dst = Addr6(tuple.dst.0 ^ top, tuple.dst.1 ^ after);
            seen += u32::from(
                fingerprint(key, &tuple, 0) == fingerprint(key, &Tuple { dst, ..tuple }, 0),
            );
        }
    }
    assert_eq!(seen, 0);
}

//! ICMP errors, by what they quote.

use underpass_tests::{
    frame::{Ends, as_fragment},
    prelude::*,
};

use super::{PORT, SOURCE};

/// An ICMP error of a pod: that a packet of `quoted` did not reach its destination.
pub(super) fn unreachable(ends: &Ends, quoted: &Ends, sport: u16, dport: u16) -> Vec<u8> {
    let kind = match Family::of(ends.src) {
        V4 => 3,
        V6 => 1,
    };
    ends.icmp(kind, 1, [0; 4], &quoted.udp(sport, dport, b"quoted")[14..])
}

/// What [`unreachable`] says in shapes that the kernel takes: a quote whose version it does not look at, two pieces of which the first quotes nothing,
/// and (of IPv6) an error of a type that nobody knows.
pub(super) fn unusual(ends: &Ends, quoted: &Ends) -> Vec<Vec<Vec<u8>>> {
    /// Of Ethernet.
    const OUTSIDE: usize = 14;
    let family = Family::of(ends.src);
    let quote = quoted.udp(SOURCE, PORT, b"quoted").split_off(OUTSIDE);
    let mut another = quote.clone();
    another[0] ^= 0x10;
    let (kind, number) = match family {
        V4 => (3, 1),
        V6 => (1, 58),
    };
    let whole = ends.icmp(kind, 1, [0; 4], &quote);
    let (head, rest) = whole[OUTSIDE + family.header_len()..].split_at(8);
    let pieces = [
        as_fragment(&ends.protocol(number, head), 0, true),
        as_fragment(&ends.protocol(number, rest), 1, false),
    ];
    let mut shapes = vec![vec![ends.icmp(kind, 1, [0; 4], &another)], pieces.to_vec()];
    if family == V6 {
        shapes.push(vec![ends.icmp(100, 0, [0; 4], &quote)]);
    }
    shapes
}

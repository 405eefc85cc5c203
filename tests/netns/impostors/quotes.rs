//! ICMP errors, by what they quote.

use underpass_abi::flow::protocol;
use underpass_tests::{
    frame::{Ends, as_fragment},
    prelude::*,
};

use super::{PORT, SOURCE};

/// Of Ethernet, in bytes.
const OUTSIDE: usize = 14;

/// An ICMP error of a pod: that a packet of `quoted` did not reach its destination.
pub(super) fn unreachable(ends: &Ends, quoted: &Ends, sport: u16, dport: u16) -> Vec<u8> {
    about(ends, &quoted.udp(sport, dport, b"quoted")[OUTSIDE..])
}

/// The same about a packet as it is.
fn about(ends: &Ends, quote: &[u8]) -> Vec<u8> {
    let kind = match Family::of(ends.src) {
        V4 => 3,
        V6 => 1,
    };
    ends.icmp(kind, 1, [0; 4], quote)
}

/// What [`unreachable`] says in shapes that the kernel takes: a quote whose version it does not look at, two pieces of which the first quotes nothing,
/// and (of IPv6) an error of a type that nobody knows.
pub(super) fn unusual(ends: &Ends, quoted: &Ends) -> Vec<Vec<Vec<u8>>> {
    let family = Family::of(ends.src);
    let quote = quoted.udp(SOURCE, PORT, b"quoted").split_off(OUTSIDE);
    let mut another = quote.clone();
    another[0] ^= 0x10;
    let number = match family {
        V4 => protocol::ICMP,
        V6 => protocol::ICMPV6,
    };
    let whole = about(ends, &quote);
    let (head, rest) = whole[OUTSIDE + family.header_len()..].split_at(8);
    let pieces = vec![
        as_fragment(&ends.protocol(number, head), 0, true),
        as_fragment(&ends.protocol(number, rest), 1, false),
    ];
    let mut shapes = vec![vec![about(ends, &another)], pieces];
    if family == V6 {
        shapes.push(vec![ends.icmp(100, 0, [0; 4], &quote)]);
    }
    shapes
}

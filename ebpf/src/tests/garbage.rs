//! Whatever the bytes are, nothing panics and nothing lies outside the packet.

use std::vec::Vec;

use proptest::{collection::vec as bytes_of, prelude::*};

use super::{
    bytes::{Bytes, Summed},
    datagram::{any_body, any_ends, datagram},
    family::Model,
    for_both_families,
};
use crate::{
    error::{quoted, translate_error},
    ip::{Head, Ip as _},
    l4::{Depth, Kind},
    translate::translate,
};

/// Packets that a few flipped bytes made something else, and cut somewhere.
fn broken<I: Model>() -> impl Strategy<Value = (Vec<u8>, u32)> {
    let flips = bytes_of((any::<prop::sample::Index>(), any::<u8>()), 0..6);
    (
        datagram::<I>(any_body()),
        flips,
        any::<prop::sample::Index>(),
    )
        .prop_map(|(datagram, flips, end)| {
            let mut packet = datagram.packet();
            for (at, byte) in flips {
                // Most of what is decided is decided in the first bytes.
                let at = at.index(packet.len().min(80));
                packet[at] = byte;
            }
            packet.truncate(end.index(packet.len() + 1));
            (packet, datagram.l3())
        })
}

for_both_families! {
    #[test]
    fn broken_packets_do_no_harm((packet, l3) in broken::<I>(), (src, dst, sport, dport) in any_ends::<I>()) {
        for summed in [Summed::None, Summed::Partial, Summed::Complete(0)] {
            let mut packet = Bytes { bytes: packet.clone(), summed };
            let length = packet.bytes.len();
            if let Some(plain) = I::parse_plain(&packet, l3) && plain.kind == Kind::Flow {
                let head: Head<I> = I::parse(&packet, l3, Depth::Whole).expect("what the short way reads, the long way does");
                prop_assert_eq!(plain.tuple, head.tuple);
                prop_assert_eq!((plain.l4, plain.piece), (head.l4, head.piece));
            }
            let Ok(mut head) = I::parse(&packet, l3, Depth::Whole) else { continue };
            let head: &mut Head<I> = &mut head;
            let mut new = head.tuple;
            (new.src, new.dst) = (src, dst);
            if let Ok(mut inner) = quoted(&packet, head) {
                let _: Result<(), _> = translate_error(&mut packet, head, &mut inner, &new, src, dst);
            }
            if head.kind == Kind::Flow && head.tuple.protocol != I::ICMP {
                (new.sport, new.dport) = (sport, dport);
            }
            let _: Result<(), _> = translate(&mut packet, head, &new);
            prop_assert_eq!(packet.bytes.len(), length);
        }
    }

    #[test]
    fn noise_does_no_harm(mut packet in bytes_of(any::<u8>(), 0..300), first in any::<u8>()) {
        if let Some(byte) = packet.first_mut() {
            *byte = if I::HEADER_LENGTH == 20 { 0x40 } else { 0x60 } | first & 0xf;
        }
        let packet = Bytes::new(packet);
        let Ok(head) = I::parse(&packet, 0, Depth::Whole) else { return Ok(()) };
        let head: Head<I> = head;
        prop_assert!(head.l4 >= I::HEADER_LENGTH);
        if head.kind == Kind::Flow {
            prop_assert!((head.l4 as usize) < packet.bytes.len());
        }
        if let Ok(inner) = quoted(&packet, &head) {
            prop_assert!(inner.l4 >= head.l4 + 8 + I::HEADER_LENGTH);
        }
    }
}

//! A translated packet is the packet that would have been built with the new tuple in the first place.

use proptest::{collection::vec as bytes_of, prelude::*};
use underpass_abi::flow::Tuple;

use super::{
    bytes::{Bytes, Summed, crc32c, same, sum},
    datagram::{
        Body, Cut, Datagram, SctpSum, UdpSum, any_body, any_ends, any_offset, any_summed, datagram,
    },
    family::Model,
    for_both_families,
};
use crate::{
    ip::{Head, Ip as _, Piece},
    l4::{Depth, Kind},
    packet::{Covers, Packet as _},
    translate::{Untranslatable, translate},
};

/// Translates as the programs do: parse, change, store the network header.
fn translated<I: Model>(packet: &mut Bytes, l3: u32, new: &Tuple<I::Addr>) -> Head<I> {
    let mut head: Head<I> = I::parse(packet, l3, Depth::Whole).expect("a whole packet");
    translate(packet, &mut head, new).expect("a whole packet");
    packet.store(head.l3, &head.header).expect("a whole packet");
    head
}

/// Whether no checksum in the packet makes good for changed ports: a device's sum then doesn't follow. Nobody looks at it, because
/// these packets have no checksum that could be checked with it.
fn is_unsummed<I: Model>(datagram: &Datagram<I>) -> bool {
    matches!(datagram.body, Body::Sctp(_) | Body::Udp(UdpSum::Absent))
}

/// The first piece of an SCTP packet keeps its ports, or can't be translated.
fn translatable<I: Model>(datagram: Datagram<I>) -> Datagram<I> {
    let cut = match (datagram.cut, &datagram.body) {
        (Cut::First, Body::Sctp(_)) => Cut::Whole,
        (cut, _) => cut,
    };
    Datagram { cut, ..datagram }
}

for_both_families! {
    #[test]
    fn a_translated_packet_is_as_if_built_so(datagram in datagram::<I>(any_body()), ends in any_ends::<I>()) {
        let datagram = translatable(datagram);
        let wanted = datagram.between(ends);
        let mut packet = Bytes::new(datagram.packet());
        let head: Head<I> = translated(&mut packet, datagram.l3(), &wanted.tuple());
        prop_assert_eq!(&packet.bytes, &wanted.packet());
        prop_assert_eq!(head.tuple, wanted.tuple());
        prop_assert_eq!(packet.summed, Summed::None);

        let again: Head<I> = I::parse(&packet, head.l3, Depth::Whole).expect("a whole packet");
        prop_assert_eq!(again.tuple, wanted.tuple());
        prop_assert_eq!(again.header, head.header);
    }

    #[test]
    fn a_later_piece_that_was_told_its_ports_gets_addresses_only(
        datagram in datagram::<I>(any_body()), offset in any_offset(), told in any::<[u16; 2]>(), ends in any_ends::<I>(),
    ) {
        let datagram = Datagram { cut: Cut::Later(offset, true), ..datagram };
        let mut packet = Bytes::new(datagram.packet());
        let mut head: Head<I> = I::parse(&packet, datagram.l3(), Depth::Whole).expect("a whole packet");
        (head.kind, [head.tuple.sport, head.tuple.dport]) = (Kind::Flow, told);
        let (src, dst, sport, dport) = ends;
        let new = Tuple { src, dst, sport, dport, ..head.tuple };
        translate(&mut packet, &mut head, &new).expect("a whole packet");
        packet.store(head.l3, &head.header).expect("a whole packet");
        prop_assert_eq!(packet.bytes, datagram.between(ends).packet());
        prop_assert_eq!(head.tuple, new);
    }

    #[test]
    fn there_and_back_is_the_same_packet(datagram in datagram::<I>(any_body()), ends in any_ends::<I>()) {
        let datagram = translatable(datagram);
        let mut packet = Bytes::new(datagram.packet());
        translated::<I>(&mut packet, datagram.l3(), &datagram.between(ends).tuple());
        translated::<I>(&mut packet, datagram.l3(), &datagram.tuple());
        prop_assert_eq!(packet.bytes, datagram.packet());
    }

    #[test]
    fn a_packet_for_a_device_that_sums_keeps_the_sum_of_its_pseudo_header(
        datagram in datagram::<I>(any_summed()), ends in any_ends::<I>(),
    ) {
        let datagram = Datagram { cut: Cut::Whole, ..datagram };
        let wanted = datagram.between(ends);
        let mut packet = datagram.partial();
        translated::<I>(&mut packet, datagram.l3(), &wanted.tuple());
        prop_assert_eq!(packet.bytes, wanted.partial().bytes);
    }

    #[test]
    fn the_sum_of_a_device_follows(datagram in datagram::<I>(any_body()), ends in any_ends::<I>()) {
        let mut wanted = datagram.between(ends).tuple();
        if is_unsummed(&datagram) {
            (wanted.sport, wanted.dport) = (datagram.tuple().sport, datagram.tuple().dport);
        }
        let mut packet = Bytes::summed_from(datagram.packet(), datagram.l3());
        let mut head: Head<I> = translated(&mut packet, datagram.l3(), &wanted);
        let delta = I::decrement_ttl(&mut head.header);
        packet.store(head.l3, &head.header).expect("a whole packet");
        packet.account(delta);
        if I::PSEUDO == Covers::Pseudo6 && head.piece != Piece::Later && matches!(datagram.body, Body::Udp(UdpSum::Absent)) {
            // As little as its ports: such a datagram is for tunnels (RFC 6935).
            return Ok(());
        }
        let Summed::Complete(delivered) = packet.summed else { panic!("the mode stays") };
        prop_assert!(same(delivered, sum(&packet.bytes[datagram.link.len()..])), "{packet:?}");
    }

    #[test]
    fn the_ttl_goes_down_by_one(datagram in datagram::<I>(any_body())) {
        let mut packet = Bytes::new(datagram.packet());
        let mut head: Head<I> = I::parse(&packet, datagram.l3(), Depth::Whole).expect("a whole packet");
        let ttl = I::ttl(&head.header);
        I::decrement_ttl(&mut head.header);
        prop_assert_eq!(I::ttl(&head.header), ttl - 1);
        packet.store(head.l3, &head.header).expect("a whole packet");

        let mut wanted = datagram;
        match &mut wanted.headers {
            etherparse::IpHeaders::Ipv4(header, _) => header.time_to_live -= 1,
            etherparse::IpHeaders::Ipv6(header, _) => header.hop_limit -= 1,
        }
        prop_assert_eq!(packet.bytes, wanted.packet());
    }

    #[test]
    fn a_udp_checksum_never_becomes_none(datagram in datagram::<I>(Just(Body::Udp(UdpSum::Present))), ends in any_ends::<I>()) {
        let datagram = Datagram { cut: Cut::Whole, ..datagram };
        // The one source port with which the new packet sums up to zero.
        let aim = |sport| datagram.between((ends.0, ends.1, sport, ends.3));
        let checksum = |datagram: &Datagram<I>| u16::from_be_bytes([datagram.transport()[6], datagram.transport()[7]]);
        let wanted = aim(checksum(&aim(0)));
        prop_assert_eq!(checksum(&wanted), 0xffff);
        let mut packet = Bytes::new(datagram.packet());
        translated::<I>(&mut packet, datagram.l3(), &wanted.tuple());
        prop_assert_eq!(&packet.bytes, &wanted.packet());
        translated::<I>(&mut packet, datagram.l3(), &datagram.tuple());
        prop_assert_eq!(packet.bytes, datagram.packet());
    }

    #[test]
    fn the_checksum_of_sctp_follows_its_ports(
        datagram in datagram::<I>(Just(Body::Sctp(SctpSum::Present))), data in bytes_of(any::<u8>(), 0..2000), ends in any_ends::<I>(),
    ) {
        let datagram = Datagram { cut: Cut::Whole, data, ..datagram };
        let mut packet = Bytes::new(datagram.packet());
        let head: Head<I> = translated(&mut packet, datagram.l3(), &datagram.between(ends).tuple());
        let mut sctp = packet.bytes.split_off(head.l4 as usize);
        let told = u32::from_le_bytes(sctp[8..12].try_into().expect("4 bytes"));
        sctp[8..12].fill(0);
        prop_assert_eq!(told, crc32c(&sctp));
    }

    #[test]
    fn a_first_piece_of_sctp_keeps_its_ports_or_can_not_be_translated(
        datagram in datagram::<I>(any::<bool>().prop_map(|pending| Body::Sctp(if pending { SctpSum::Pending } else { SctpSum::Present }))),
        (src, dst, sport, dport) in any_ends::<I>(),
    ) {
        let datagram = Datagram { cut: Cut::First, ..datagram };
        let mut packet = Bytes::new(datagram.packet());
        let kept = datagram.between((src, dst, datagram.sport, datagram.dport));
        translated::<I>(&mut packet, datagram.l3(), &kept.tuple());
        prop_assert_eq!(&packet.bytes, &kept.packet());

        let moved = datagram.between((src, dst, sport, dport));
        prop_assume!(moved.tuple() != kept.tuple());
        let mut head: Head<I> = I::parse(&packet, datagram.l3(), Depth::Whole).expect("a first piece");
        prop_assert_eq!(translate(&mut packet, &mut head, &moved.tuple()), Err(Untranslatable::Piece));
    }
}

//! Parsing, held against etherparse's.

use std::{vec, vec::Vec};

use etherparse::{IpHeaders, TcpHeader, UdpHeader};
use proptest::prelude::*;

use super::{
    bytes::Bytes,
    datagram::{Body, Cut, Datagram, any_body, any_flow, any_offset, datagram},
    family::Model,
    for_both_families,
};
use crate::{
    ip::{Head, Ip, V6, v6::MAX_EXTENSIONS},
    l4::{Depth, Kind, tcp},
    packet::Short,
};

fn parse<I: Ip>(packet: &[u8], l3: u32, depth: Depth) -> Result<Head<I>, Short> {
    I::parse(&Bytes::new(packet.to_vec()), l3, depth)
}

fn parse_plain<I: Ip>(packet: &[u8], l3: u32) -> Option<Head<I>> {
    I::parse_plain(&Bytes::new(packet.to_vec()), l3)
}

/// All that must be the same of two parsed packets; the identification counts in fragments alone.
macro_rules! same_head {
    ($a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        prop_assert_eq!(a.tuple, b.tuple);
        prop_assert_eq!(
            (a.l3, a.l4, a.kind, a.piece, a.plain),
            (b.l3, b.l4, b.kind, b.piece, b.plain)
        );
        prop_assert_eq!(
            (a.tcp_flags, a.l4_length, a.icmp_type),
            (b.tcp_flags, b.l4_length, b.icmp_type)
        );
    }};
}

fn kind<I: Model>(datagram: &Datagram<I>) -> Kind {
    match (datagram.cut, &datagram.body) {
        (Cut::Later(..), _) => Kind::Later,
        (_, Body::Other(_)) => Kind::Other,
        (_, Body::Icmp([icmp_type, _], _)) if I::ERRORS.contains(icmp_type) => Kind::Error,
        (_, Body::Icmp(..)) => Kind::Control,
        (_, Body::Tcp(_) | Body::Udp(_) | Body::Sctp(_) | Body::EchoRequest | Body::EchoReply) => {
            Kind::Flow
        }
    }
}

for_both_families! {
    #[test]
    fn a_packet_is_what_etherparse_says(datagram in datagram::<I>(any_body())) {
        let packet = datagram.packet();
        let l3 = datagram.l3();
        let head: Head<I> = parse(&packet, l3, Depth::Whole).expect("a whole packet");
        prop_assert_eq!(head.tuple, datagram.tuple());
        prop_assert_eq!(head.kind, kind(&datagram));
        prop_assert_eq!(head.piece, datagram.piece());

        let (headers, payload) = IpHeaders::from_slice(&packet[l3 as usize..]).expect("a packet of etherparse's own");
        prop_assert_eq!(payload.fragmented, datagram.cut != Cut::Whole);
        prop_assert_eq!(head.tuple.protocol, payload.ip_number.0);
        prop_assert_eq!(head.l4 as usize, packet.len() - payload.payload.len());
        let plain = datagram.cut == Cut::Whole && headers.header_len() == I::HEADER_LENGTH as usize;
        prop_assert_eq!(head.plain, plain);
        let ttl = match &headers {
            IpHeaders::Ipv4(header, _) => header.time_to_live,
            IpHeaders::Ipv6(header, _) => header.hop_limit,
        };
        prop_assert_eq!(I::ttl(&head.header), ttl);
        let class = match &headers {
            IpHeaders::Ipv4(header, _) => u32::from(header.dscp.value() << 2 | header.ecn.value()),
            IpHeaders::Ipv6(header, _) => {
                (u32::from(header.traffic_class) << 20 | header.flow_label.value()).to_be()
            }
        };
        prop_assert_eq!(I::class(&head.header), class);

        if head.kind != Kind::Flow {
            return Ok(());
        }
        let ports = (u16::from_be(head.tuple.sport), u16::from_be(head.tuple.dport));
        match &datagram.body {
            Body::Tcp(_) => {
                let (header, _) = TcpHeader::from_slice(payload.payload).expect("a TCP header");
                prop_assert_eq!(ports, (header.source_port, header.destination_port));
                prop_assert_eq!(usize::from(head.l4_length), header.header_len());
                prop_assert_eq!(head.headers_length() as usize, headers.header_len() + header.header_len());
                let flags = [tcp::FIN, tcp::SYN, tcp::RST, tcp::ACK].map(|flag| head.tcp_flags & flag != 0);
                prop_assert_eq!(flags, [header.fin, header.syn, header.rst, header.ack]);
            }
            Body::Udp(_) => {
                let (header, _) = UdpHeader::from_slice(payload.payload).expect("a UDP header");
                prop_assert_eq!(ports, (header.source_port, header.destination_port));
                prop_assert_eq!(head.headers_length() as usize, headers.header_len() + 8);
            }
            _ => {}
        }
    }

    #[test]
    fn a_cut_packet_is_short_or_the_same(datagram in datagram::<I>(any_body())) {
        let packet = datagram.packet();
        for depth in [Depth::Whole, Depth::Quoted] {
            let whole: Head<I> = parse(&packet, datagram.l3(), depth).expect("a whole packet");
            prop_assert_eq!(whole.tuple, datagram.tuple());
            for length in 0..packet.len() {
                match parse::<I>(&packet[..length], datagram.l3(), depth) {
                    Ok(head) => same_head!(head, whole),
                    // Eight bytes of a transport header are enough for an error's quote.
                    Err(Short) if depth == Depth::Quoted => prop_assert!(length < whole.l4 as usize + 8),
                    Err(Short) => prop_assert!(length < whole.l4 as usize + 20),
                }
                if let Some(head) = parse_plain::<I>(&packet[..length], datagram.l3()) && head.kind == Kind::Flow {
                    prop_assert_eq!(head.tuple, whole.tuple);
                }
            }
        }
    }

    #[test]
    fn the_short_way_sees_the_same_flows(datagram in datagram::<I>(any_flow())) {
        let packet = datagram.packet();
        let head: Head<I> = parse(&packet, datagram.l3(), Depth::Whole).expect("a whole packet");
        match parse_plain::<I>(&packet, datagram.l3()).filter(|plain| plain.kind == Kind::Flow) {
            Some(plain) => same_head!(plain, head),
            None => prop_assert!(!head.plain, "the short way misses {head:?}"),
        }
    }

    #[test]
    fn pieces_of_one_datagram_have_one_key(first in datagram::<I>(any_flow()), offset in any_offset(), more in any::<bool>()) {
        // Extension headers behind the fragment header are in the first piece only.
        let headers = I::bare();
        let first = Datagram { cut: Cut::First, headers, ..first };
        let later = Datagram { cut: Cut::Later(offset, more), ..first.clone() };
        let head: Head<I> = parse(&first.packet(), first.l3(), Depth::Whole).expect("the first piece");
        let tail: Head<I> = parse(&later.packet(), later.l3(), Depth::Whole).expect("a later piece");
        prop_assert_eq!(head.fragment_key(), tail.fragment_key());
        let other = Datagram { identification: first.identification ^ 1, ..later };
        let tail: Head<I> = parse(&other.packet(), other.l3(), Depth::Whole).expect("a later piece");
        prop_assert_ne!(head.fragment_key(), tail.fragment_key());
    }

    #[test]
    fn another_version_is_refused(datagram in datagram::<I>(any_body()), flip in 1..16u8) {
        let mut packet = datagram.packet();
        let l3 = datagram.l3();
        packet[l3 as usize] ^= flip << 4;
        prop_assert!(parse::<I>(&packet, l3, Depth::Whole).is_err());
        prop_assert!(parse_plain::<I>(&packet, l3).is_none());
    }
}

/// An IPv6 packet with a TCP header behind `count` extension headers of destination options.
fn with_extensions(count: usize) -> Vec<u8> {
    let mut packet = vec![0; 40];
    (packet[0], packet[6]) = (0x60, if count == 0 { 6 } else { 60 });
    for left in (0..count).rev() {
        packet.extend([if left == 0 { 6 } else { 60 }, 0, 1, 4, 0, 0, 0, 0]);
    }
    packet.extend([0, 80, 1, 0]);
    packet.extend([0; 16]);
    packet
}

#[test]
fn extension_headers_are_walked_over_up_to_a_number() {
    // The order that RFC 8200, section 4.1, recommends has so many; ESP comes on top, and hides the rest.
    const { assert!(MAX_EXTENSIONS >= 6) };
    for count in 0..=MAX_EXTENSIONS {
        let head: Head<V6> =
            parse(&with_extensions(count), 0, Depth::Whole).expect("a whole packet");
        assert_eq!(
            (head.kind, u16::from_be(head.tuple.sport)),
            (Kind::Flow, 80),
            "{count} extension headers"
        );
        assert_eq!(head.plain, count == 0, "{count} extension headers");
    }
    let head: Head<V6> =
        parse(&with_extensions(MAX_EXTENSIONS + 1), 0, Depth::Whole).expect("a whole packet");
    assert_eq!((head.kind, head.tuple.sport), (Kind::Other, 0));
}

/// An IPv4 packet of SCTP with these chunks.
fn with_chunks(chunks: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 20 + 12];
    (packet[0], packet[9]) = (0x45, 132);
    packet.extend(chunks);
    packet
}

#[test]
fn what_is_no_data_of_sctp_is_for_connection_tracking() {
    // RFC 9260, section 3.2, and RFC 8260: DATA, SACK, I-DATA.
    for kind in 0..=u8::MAX {
        let packet = with_chunks(&[kind, 0, 0, 4]);
        let whole: Head<crate::ip::V4> = parse(&packet, 0, Depth::Whole).expect("a whole packet");
        let is_data = matches!(kind, 0 | 3 | 64);
        assert_eq!(whole.control, !is_data, "a chunk of type {kind}");
        let plain: Head<crate::ip::V4> = parse_plain(&packet, 0).expect("a plain packet");
        assert_eq!(plain.control, whole.control, "a chunk of type {kind}");
    }
    let head: Head<crate::ip::V4> =
        parse(&with_chunks(&[]), 0, Depth::Whole).expect("a packet without chunks");
    assert!(head.control);
}

#[test]
fn an_ipv4_header_of_less_than_its_fixed_length_is_refused() {
    let mut packet = vec![0; 60];
    for words in 0..5 {
        packet[0] = 0x40 | words;
        assert!(
            parse::<crate::ip::V4>(&packet, 0, Depth::Whole).is_err(),
            "a header of {words} words"
        );
    }
}

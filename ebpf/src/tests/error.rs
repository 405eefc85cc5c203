//! ICMP errors about translated packets: the message, and the packet inside it.

use std::vec::Vec;

use proptest::{prelude::*, sample::select};

use super::{
    bytes::{Bytes, Summed, same, sum},
    datagram::{Body, Cut, Datagram, Ends, UdpSum, any_ends, any_flow, datagram},
    family::Model,
    for_both_families,
};
use crate::{
    error::{quoted, translate_error},
    ip::{Head, Ip as _, V6},
    l4::{Depth, Kind},
    packet::Packet as _,
};

/// An ICMP error, and the packet that it is about.
#[derive(Clone, Debug)]
struct Message<I: Model> {
    outer: Datagram<I>,
    inner: Datagram<I>,
    /// How many bytes of the transport are quoted; all, if there are fewer.
    depth: usize,
}

impl<I: Model> Message<I> {
    /// The bytes of the inner packet that are quoted.
    fn quote(&self) -> Vec<u8> {
        let mut quote = self.inner.network();
        quote.truncate(self.inner_l4() + self.depth);
        quote
    }

    fn inner_l4(&self) -> usize {
        let packet = Bytes::new(self.inner.network());
        let head: Head<I> = I::parse(&packet, 0, Depth::Whole).expect("a whole packet");
        head.l4 as usize
    }

    fn packet_with(&self, quote: Vec<u8>) -> Vec<u8> {
        Datagram {
            data: quote,
            ..self.outer.clone()
        }
        .packet()
    }

    /// The message as it should be with other ends, and the quoted packet with its own new ones.
    fn wanted(&self, outer: Ends<I>, inner: Ends<I>) -> (Self, Vec<u8>) {
        let wanted = Self {
            outer: self.outer.between(outer),
            inner: self.inner.between(inner),
            depth: self.depth,
        };
        let mut quote = wanted.quote();
        if let (Body::Tcp(_), 17) = (&self.inner.body, self.depth) {
            // Half a checksum is quoted: that can't be made right.
            let at = self.inner_l4() + 16;
            quote[at] = self.quote()[at];
        }
        if let Body::Sctp(_) = self.inner.body
            && (self.depth < 12 || self.inner.cut == Cut::First)
        {
            // Part of a checksum, or one of more than was seen: that can't be made right either.
            let sum = self.inner_l4() + 8..quote.len().min(self.inner_l4() + 12);
            quote[sum.clone()].copy_from_slice(&self.quote()[sum]);
        }
        let packet = wanted.packet_with(quote);
        (wanted, packet)
    }
}

fn message<I: Model>() -> impl Strategy<Value = Message<I>> {
    let error = (select(I::ERRORS), any::<u8>(), any::<[u8; 4]>());
    let body = error.prop_map(|(icmp_type, code, rest)| Body::Icmp([icmp_type, code], rest));
    let depth = prop_oneof![3 => Just(8), 2 => Just(20), 1 => 8..200usize, 3 => Just(1000)];
    (datagram::<I>(body), datagram::<I>(any_flow()), depth).prop_map(|(outer, inner, depth)| {
        // A later fragment has no ports to translate, and errors about one are not sent (RFC 1122, section 3.2.2).
        let cut = if inner.cut == Cut::First {
            Cut::First
        } else {
            Cut::Whole
        };
        Message {
            outer: Datagram {
                cut: Cut::Whole,
                ..outer
            },
            inner: Datagram { cut, ..inner },
            depth,
        }
    })
}

fn translated<I: Model>(
    packet: &mut Bytes,
    message: &Message<I>,
    wanted: &Message<I>,
) -> (Head<I>, Head<I>) {
    let mut head: Head<I> =
        I::parse(packet, message.outer.l3(), Depth::Whole).expect("a whole message");
    assert_eq!(head.kind, Kind::Error);
    let mut inner = quoted(packet, &head).expect("at least 8 bytes of the transport");
    assert_eq!(
        (inner.kind, inner.tuple),
        (Kind::Flow, message.inner.tuple())
    );
    let (src, dst) = (wanted.outer.src, wanted.outer.dst);
    translate_error(
        packet,
        &mut head,
        &mut inner,
        &wanted.inner.tuple(),
        src,
        dst,
    )
    .expect("a whole message");
    packet
        .store(head.l3, &head.header)
        .expect("a whole message");
    (head, inner)
}

for_both_families! {
    #[test]
    fn a_translated_error_is_as_if_built_so(message in message::<I>(), outer in any_ends::<I>(), inner in any_ends::<I>()) {
        let (wanted, bytes) = message.wanted(outer, inner);
        let mut packet = Bytes::new(message.packet_with(message.quote()));
        let (head, quote) = translated(&mut packet, &message, &wanted);
        prop_assert_eq!(&packet.bytes, &bytes);
        prop_assert_eq!(head.tuple, wanted.outer.tuple());
        prop_assert_eq!(quote.tuple, wanted.inner.tuple());
    }

    #[test]
    fn ports_may_stay(message in message::<I>(), outer in any_ends::<I>(), (src, dst, ..) in any_ends::<I>()) {
        let (wanted, bytes) = message.wanted(outer, (src, dst, message.inner.sport, message.inner.dport));
        let mut packet = Bytes::new(message.packet_with(message.quote()));
        translated(&mut packet, &message, &wanted);
        prop_assert_eq!(packet.bytes, bytes);
    }

    #[test]
    fn the_sum_of_a_device_follows(message in message::<I>(), outer in any_ends::<I>(), inner in any_ends::<I>()) {
        let (wanted, _) = message.wanted(outer, inner);
        let l3 = message.outer.l3();
        let mut packet = Bytes::summed_from(message.packet_with(message.quote()), l3);
        translated(&mut packet, &message, &wanted);
        let Summed::Complete(delivered) = packet.summed else { panic!("the mode stays") };
        prop_assert!(same(delivered, sum(&packet.bytes[l3 as usize..])), "{packet:?}");
    }

    #[test]
    fn a_quoted_udp_checksum_never_becomes_none(
        message in message::<I>(), outer in any_ends::<I>(), (src, dst, _, dport) in any_ends::<I>(),
    ) {
        let inner = Datagram { body: Body::Udp(UdpSum::Present), ..message.inner };
        let message = Message { inner, ..message };
        // The one source port with which the quoted packet sums up to zero.
        let aim = |sport| message.inner.between((src, dst, sport, dport));
        let checksum = |datagram: &Datagram<I>| u16::from_be_bytes([datagram.transport()[6], datagram.transport()[7]]);
        let sport = checksum(&aim(0));
        prop_assert_eq!(checksum(&aim(sport)), 0xffff);

        let (wanted, bytes) = message.wanted(outer, (src, dst, sport, dport));
        let mut packet = Bytes::new(message.packet_with(message.quote()));
        translated(&mut packet, &message, &wanted);
        prop_assert_eq!(packet.bytes, bytes);
    }

    #[test]
    fn a_quote_cut_too_early_is_short(message in message::<I>(), length in 0..4usize) {
        let mut quote = message.quote();
        quote.truncate(message.inner_l4() + length);
        let packet = Bytes::new(message.packet_with(quote));
        let head: Head<I> = I::parse(&packet, message.outer.l3(), Depth::Whole).expect("a whole message");
        prop_assert!(quoted(&packet, &head).is_err());
    }
}

proptest! {
    #[test]
    fn an_error_for_a_device_that_sums_keeps_the_sum_of_its_pseudo_header(
        message in message::<V6>(), outer_ends in any_ends::<V6>(), inner_ends in any_ends::<V6>(),
    ) {
        let partial = |message: &Message<V6>| Datagram { data: message.quote(), ..message.outer.clone() }.partial();
        let inner = Datagram { cut: Cut::Whole, ..message.inner };
        let message = Message { depth: 1000, inner, ..message };
        let (wanted, _) = message.wanted(outer_ends, inner_ends);
        let mut packet = partial(&message);
        translated(&mut packet, &message, &wanted);
        prop_assert_eq!(packet.bytes, partial(&wanted).bytes);
    }
}

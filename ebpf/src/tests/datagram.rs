//! Datagrams as plain values, and the packets that etherparse makes of them.

use std::{vec, vec::Vec};

use etherparse::{IpFragOffset, IpHeaders, IpNumber, Ipv6FragmentHeader, PacketBuilder, TcpHeader};
use proptest::{collection::vec as bytes_of, prelude::*};
use underpass_abi::flow::{Tuple, protocol};

use super::{
    bytes::{Bytes, Summed, crc32c, sum},
    family::Model,
};
use crate::ip::{Ip, Piece};

/// Which piece of a datagram to build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cut {
    Whole,
    First,
    /// Offset in units of 8 bytes, and whether more pieces follow.
    Later(u16, bool),
}

/// Whether a UDP datagram has a checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum UdpSum {
    Present,
    Absent,
}

/// Whether an SCTP packet has its checksum, or leaves it to a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SctpSum {
    Present,
    Pending,
}

/// What a datagram carries.
#[derive(Clone, Debug)]
pub(super) enum Body {
    Tcp(TcpHeader),
    Udp(UdpSum),
    Sctp(SctpSum),
    EchoRequest,
    EchoReply,
    /// Another ICMP message: type and code, and the four bytes after the checksum.
    Icmp([u8; 2], [u8; 4]),
    Other(u8),
}

/// A datagram, or a piece of it.
#[derive(Clone, Debug)]
pub(super) struct Datagram<I: Model> {
    /// The link-layer header.
    pub(super) link: Vec<u8>,
    pub(super) headers: IpHeaders,
    pub(super) cut: Cut,
    pub(super) identification: u32,
    pub(super) src: I::Addr,
    pub(super) dst: I::Addr,
    /// Host order; the identifier of an echo.
    pub(super) sport: u16,
    pub(super) dport: u16,
    pub(super) body: Body,
    pub(super) data: Vec<u8>,
}

impl<I: Model> Datagram<I> {
    pub(super) const fn protocol(&self) -> u8 {
        match self.body {
            Body::Tcp(_) => protocol::TCP,
            Body::Udp(_) => protocol::UDP,
            Body::Sctp(_) => protocol::SCTP,
            Body::EchoRequest | Body::EchoReply | Body::Icmp(..) => I::ICMP,
            Body::Other(protocol) => protocol,
        }
    }

    pub(super) const fn piece(&self) -> Piece {
        match self.cut {
            Cut::Whole => Piece::Whole,
            Cut::First => Piece::First,
            Cut::Later(..) => Piece::Later,
        }
    }

    /// The tuple that the packet has.
    pub(super) fn tuple(&self) -> Tuple<I::Addr> {
        let (sport, dport) = match (self.cut, &self.body) {
            (Cut::Later(..), _) | (_, Body::Icmp(..) | Body::Other(_)) => (0, 0),
            (_, Body::Tcp(_) | Body::Udp(_) | Body::Sctp(_)) => (self.sport, self.dport),
            (_, Body::EchoRequest) => (self.sport, 0),
            (_, Body::EchoReply) => (0, self.sport),
        };
        Tuple::new(
            self.protocol(),
            self.src,
            sport.to_be(),
            self.dst,
            dport.to_be(),
        )
    }

    /// The same datagram between other ends.
    pub(super) fn between(&self, (src, dst, sport, dport): Ends<I>) -> Self {
        Self {
            src,
            dst,
            sport,
            dport,
            ..self.clone()
        }
    }

    /// The packet, with its link-layer header.
    pub(super) fn packet(&self) -> Vec<u8> {
        [self.link.clone(), self.network()].concat()
    }

    /// Offset of the network header.
    pub(super) fn l3(&self) -> u32 {
        self.link.len().try_into().expect("0 or 14")
    }

    fn bare(&self) -> IpHeaders {
        let mut bare = I::bare();
        I::address(&mut bare, self.src, self.dst);
        bare
    }

    /// The packet from its network header on.
    pub(super) fn network(&self) -> Vec<u8> {
        let payload = match self.cut {
            Cut::Whole => self.transport(),
            Cut::First => {
                let mut transport = self.transport();
                transport.truncate(transport.len() / 8 * 8);
                transport
            }
            Cut::Later(..) => self.data.clone(),
        };
        let mut headers = self.headers.clone();
        I::address(&mut headers, self.src, self.dst);
        cut(&mut headers, self.cut, self.identification);
        headers.set_next_headers(IpNumber(self.protocol()));
        headers
            .set_payload_len(payload.len())
            .expect("a short packet");
        let mut packet = Vec::new();
        headers.write(&mut packet).expect("headers in their order");
        packet.extend(payload);
        packet
    }

    /// The whole datagram's transport header and data.
    pub(super) fn transport(&self) -> Vec<u8> {
        let bare = self.bare();
        let network = bare.header_len();
        let mut packet = Vec::new();
        let builder = PacketBuilder::ip(bare);
        match &self.body {
            Body::Tcp(header) => {
                let mut header = header.clone();
                (header.source_port, header.destination_port) = (self.sport, self.dport);
                builder
                    .tcp_header(header)
                    .write(&mut packet, &self.data)
                    .expect("a TCP packet");
            }
            Body::Udp(sum) => {
                builder
                    .udp(self.sport, self.dport)
                    .write(&mut packet, &self.data)
                    .expect("a UDP packet");
                if *sum == UdpSum::Absent {
                    packet[network + 6..network + 8].fill(0);
                }
            }
            Body::Sctp(sum) => {
                let mut data = [
                    &self.sport.to_be_bytes()[..],
                    &self.dport.to_be_bytes(),
                    &[0; 8],
                    &self.data,
                ]
                .concat();
                if *sum == SctpSum::Present {
                    let crc = crc32c(&data);
                    data[8..12].copy_from_slice(&crc.to_le_bytes());
                }
                builder
                    .write(&mut packet, IpNumber(protocol::SCTP), &data)
                    .expect("an SCTP packet");
            }
            Body::EchoRequest => {
                packet = I::icmp(builder, [I::ECHO_REQUEST, 0], self.echo(), &self.data);
            }
            Body::EchoReply => {
                packet = I::icmp(builder, [I::ECHO_REPLY, 0], self.echo(), &self.data);
            }
            Body::Icmp(head, rest) => packet = I::icmp(builder, *head, *rest, &self.data),
            Body::Other(protocol) => builder
                .write(&mut packet, IpNumber(*protocol), &self.data)
                .expect("a packet"),
        }
        packet.split_off(network)
    }

    fn echo(&self) -> [u8; 4] {
        let [high, low] = self.sport.to_be_bytes();
        [high, low, 0, 7]
    }

    /// Where the transport header has its checksum.
    pub(super) const fn checksum_offset(&self) -> Option<usize> {
        match self.body {
            Body::Tcp(_) => Some(16),
            Body::Udp(_) => Some(6),
            Body::EchoRequest | Body::EchoReply | Body::Icmp(..) => Some(2),
            Body::Sctp(_) | Body::Other(_) => None,
        }
    }

    /// The packet as this host sends it to a device that sums: TCP and UDP, whole.
    pub(super) fn partial(&self) -> Bytes {
        let mut bytes = self.packet();
        let transport = self.transport().len();
        let at = bytes.len() - transport + self.checksum_offset().expect("TCP or UDP");
        let bare = self.bare();
        let mut headers = Vec::new();
        bare.write(&mut headers).expect("bare headers");
        // Both pseudo headers sum up to the addresses, the length and the protocol number.
        let addresses = if headers.len() == 20 { 12 } else { 8 };
        let length = u16::try_from(transport)
            .expect("a short packet")
            .to_be_bytes();
        let pseudo = [&headers[addresses..], &length, &[0, self.protocol()]].concat();
        bytes[at..at + 2].copy_from_slice(&sum(&pseudo).to_ne_bytes());
        Bytes {
            bytes,
            summed: Summed::Partial,
        }
    }
}

fn cut(headers: &mut IpHeaders, cut: Cut, identification: u32) {
    let (offset, more) = match cut {
        Cut::Whole => (0, false),
        Cut::First => (0, true),
        Cut::Later(offset, more) => (offset, more),
    };
    let offset = IpFragOffset::try_new(offset).expect("13 bits");
    match headers {
        IpHeaders::Ipv4(header, _) => {
            header.identification = (identification & 0xffff).try_into().expect("16 bits");
            (header.fragment_offset, header.more_fragments) = (offset, more);
        }
        IpHeaders::Ipv6(_, extensions) => {
            // A whole datagram may have a fragment header of its own.
            if cut != Cut::Whole {
                extensions.fragment = Some(Ipv6FragmentHeader::new(
                    IpNumber(0),
                    offset,
                    more,
                    identification,
                ));
            }
            if offset != IpFragOffset::ZERO {
                // These belong to what was cut to pieces.
                extensions.auth = None;
                if let Some(routing) = &mut extensions.routing {
                    routing.final_destination_options = None;
                }
            }
        }
    }
}

/// Source, destination, their ports (host order).
pub(super) type Ends<I> = (<I as Ip>::Addr, <I as Ip>::Addr, u16, u16);

pub(super) fn any_ends<I: Model>() -> impl Strategy<Value = Ends<I>> {
    (I::any_addr(), I::any_addr(), any::<u16>(), any::<u16>())
}

fn any_tcp() -> impl Strategy<Value = Body> {
    (any::<u32>(), any::<u32>(), any::<[bool; 6]>(), 0..=10usize).prop_map(
        |(sequence, acknowledgment, flags, options)| {
            let mut header = TcpHeader::new(0, 0, sequence, 1024);
            header.acknowledgment_number = acknowledgment;
            [
                header.fin, header.syn, header.rst, header.psh, header.ack, header.urg,
            ] = flags;
            header
                .set_options_raw(&vec![1; options * 4])
                .expect("at most 40 bytes");
            Body::Tcp(header)
        },
    )
}

/// Bodies whose checksum a device may fill in.
pub(super) fn any_summed() -> impl Strategy<Value = Body> {
    prop_oneof![any_tcp(), Just(Body::Udp(UdpSum::Present))]
}

/// Bodies of flows: what can be translated.
pub(super) fn any_flow() -> impl Strategy<Value = Body> {
    prop_oneof![
        3 => any_tcp(),
        3 => prop_oneof![3 => Just(UdpSum::Present), 1 => Just(UdpSum::Absent)].prop_map(Body::Udp),
        2 => prop_oneof![3 => Just(SctpSum::Present), 1 => Just(SctpSum::Pending)].prop_map(Body::Sctp),
        1 => Just(Body::EchoRequest),
        1 => Just(Body::EchoReply),
    ]
}

/// Bodies of everything.
pub(super) fn any_body() -> impl Strategy<Value = Body> {
    prop_oneof![
        6 => any_flow(),
        1 => any::<([u8; 2], [u8; 4])>()
            .prop_filter("an echo has a body of its own", |([head, _], _)| ![0, 8, 128, 129].contains(head))
            .prop_map(|(head, rest)| Body::Icmp(head, rest)),
        // GRE, ESP, OSPF, an experiment.
        1 => prop_oneof![Just(47), Just(50), Just(89), Just(253)].prop_map(Body::Other),
    ]
}

/// Offsets of later fragments, in units of 8 bytes; each bit of the field alone every now and then.
pub(super) fn any_offset() -> impl Strategy<Value = u16> {
    prop_oneof![1..0x2000u16, (0..13u32).prop_map(|bit| 1 << bit)]
}

fn any_cut() -> impl Strategy<Value = Cut> {
    prop_oneof![
        6 => Just(Cut::Whole),
        1 => Just(Cut::First),
        1 => (any_offset(), any::<bool>()).prop_map(|(offset, more)| Cut::Later(offset, more)),
    ]
}

/// Datagrams with a body of these.
pub(super) fn datagram<I: Model>(
    body: impl Strategy<Value = Body>,
) -> impl Strategy<Value = Datagram<I>> {
    let link = prop_oneof![Just(Vec::new()), bytes_of(any::<u8>(), 14)];
    let data = bytes_of(any::<u8>(), 8..80);
    let network = (I::any_headers(), any_cut(), any::<u32>());
    (link, network, any_ends::<I>(), body, data).prop_map(
        |(link, (headers, cut, identification), (src, dst, sport, dport), body, data)| Datagram {
            link,
            headers,
            cut,
            identification,
            src,
            dst,
            sport,
            dport,
            body,
            data,
        },
    )
}

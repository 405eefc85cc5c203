//! Frames to send and to read: Ethernet, IP of both families and what it carries.

pub mod sctp;

use std::{fmt::Debug, net::IpAddr};

use anyhow::{Context as _, Result};
use etherparse::{
    EtherType, Ethernet2Header, Icmpv4Type, Icmpv6Type, IpFragOffset, IpNumber, IpSlice,
    Ipv4Header, Ipv6ExtensionSlice, Ipv6FragmentHeader, Ipv6Header, NetSlice, PacketBuilder,
    PacketBuilderStep, SlicedPacket, TransportSlice, ip_number,
};

/// Hop limit of frames made here.
pub const HOPS: u8 = 64;

/// Both ends of a frame: MACs and IP addresses, which need not be anybody's own.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    /// Ethernet source.
    pub src_mac: [u8; 6],
    /// Ethernet destination.
    pub dst_mac: [u8; 6],
    /// IP source.
    pub src: IpAddr,
    /// IP destination, of the same family.
    pub dst: IpAddr,
}

impl Ends {
    /// The same with another IP source.
    #[must_use]
    pub const fn from_ip(mut self, src: IpAddr) -> Self {
        self.src = src;
        self
    }

    /// The same with another Ethernet source.
    #[must_use]
    pub const fn from_mac(mut self, src_mac: [u8; 6]) -> Self {
        self.src_mac = src_mac;
        self
    }

    /// The same with another IP destination.
    #[must_use]
    pub const fn to_ip(mut self, dst: IpAddr) -> Self {
        self.dst = dst;
        self
    }

    /// # Panics
    /// If source and destination are of different families.
    fn ip(&self, hops: u8) -> PacketBuilderStep<etherparse::IpHeaders> {
        let ethernet = PacketBuilder::ethernet2(self.src_mac, self.dst_mac);
        match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => ethernet.ipv4(src.octets(), dst.octets(), hops),
            (IpAddr::V6(src), IpAddr::V6(dst)) => ethernet.ipv6(src.octets(), dst.octets(), hops),
            (src, dst) => panic!("{src} and {dst} are of different families"),
        }
    }

    /// A datagram.
    #[must_use]
    pub fn udp(&self, sport: u16, dport: u16, payload: &[u8]) -> Vec<u8> {
        self.udp_with_hops(sport, dport, payload, HOPS)
    }

    /// A datagram with a given hop limit.
    #[must_use]
    pub fn udp_with_hops(&self, sport: u16, dport: u16, payload: &[u8], hops: u8) -> Vec<u8> {
        written(|frame| self.ip(hops).udp(sport, dport).write(frame, payload))
    }

    /// The first segment of a connection.
    #[must_use]
    pub fn syn(&self, sport: u16, dport: u16) -> Vec<u8> {
        self.segment((sport, dport), "S", (1, 0), &[])
    }

    /// A segment that no connection has: it begins and ends one.
    #[must_use]
    pub fn syn_fin(&self, sport: u16, dport: u16) -> Vec<u8> {
        self.segment((sport, dport), "SF", (1, 0), &[])
    }

    /// A segment that ends a connection at once.
    #[must_use]
    pub fn rst(&self, sport: u16, dport: u16) -> Vec<u8> {
        self.segment((sport, dport), "R", (1, 0), &[])
    }

    /// A segment in the middle of a connection.
    #[must_use]
    pub fn ack(&self, sport: u16, dport: u16, payload: &[u8]) -> Vec<u8> {
        self.segment((sport, dport), "A", (1, 1), payload)
    }

    /// A segment with these flags (of `SAFR`), sequence number and acknowledgement.
    ///
    /// # Panics
    /// If one of the flags is none.
    #[must_use]
    pub fn segment(
        &self,
        (sport, dport): (u16, u16),
        flags: &str,
        (sequence, acknowledged): (u32, u32),
        payload: &[u8],
    ) -> Vec<u8> {
        let empty = self.ip(HOPS).tcp(sport, dport, sequence, 64_000);
        let segment = flags.chars().fold(empty, |segment, flag| match flag {
            'S' => segment.syn(),
            'A' => segment.ack(acknowledged),
            'F' => segment.fin(),
            'R' => segment.rst(),
            _ => panic!("{flag} is no flag"),
        });
        written(|frame| segment.write(frame, payload))
    }

    /// An ICMP or `ICMPv6` message by type and code; `rest` is the header's second word.
    #[must_use]
    pub fn icmp(&self, kind: u8, code: u8, rest: [u8; 4], payload: &[u8]) -> Vec<u8> {
        let (type_u8, code_u8, bytes5to8) = (kind, code, rest);
        written(|frame| match self.src {
            IpAddr::V4(_) => self
                .ip(HOPS)
                .icmpv4(Icmpv4Type::Unknown {
                    type_u8,
                    code_u8,
                    bytes5to8,
                })
                .write(frame, payload),
            // Neighbour discovery asks for a hop limit of 255.
            IpAddr::V6(_) => self
                .ip(u8::MAX)
                .icmpv6(Icmpv6Type::Unknown {
                    type_u8,
                    code_u8,
                    bytes5to8,
                })
                .write(frame, payload),
        })
    }

    /// A packet of any IP protocol.
    #[must_use]
    pub fn protocol(&self, number: u8, payload: &[u8]) -> Vec<u8> {
        written(|frame| self.ip(HOPS).write(frame, IpNumber(number), payload))
    }

    /// A frame of any `EtherType`.
    #[must_use]
    pub fn ether_type(&self, number: u16, payload: &[u8]) -> Vec<u8> {
        let header = Ethernet2Header {
            source: self.src_mac,
            destination: self.dst_mac,
            ether_type: EtherType(number),
        };
        let mut frame = header.to_bytes().to_vec();
        frame.extend_from_slice(payload);
        frame
    }
}

/// A MAC as it is written.
#[must_use]
pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Reads a MAC.
pub fn mac(text: &str) -> Result<[u8; 6]> {
    let bytes = text
        .split(':')
        .map(|part| u8::from_str_radix(part, 16))
        .collect::<Result<Vec<_>, _>>()
        .with_context(|| format!("{text} is no MAC"))?;
    bytes
        .try_into()
        .ok()
        .with_context(|| format!("{text} is no MAC"))
}

fn written<E: Debug>(write: impl FnOnce(&mut Vec<u8>) -> Result<(), E>) -> Vec<u8> {
    let mut frame = Vec::new();
    write(&mut frame).expect("a vector takes every packet that fits a length field");
    frame
}

/// A frame's packet cut to a fragment: `offset` in units of 8 bytes, payload as it is.
///
/// # Panics
/// If the frame carries no IP, or the offset does not fit its field.
#[must_use]
pub fn as_fragment(frame: &[u8], offset: u16, more: bool) -> Vec<u8> {
    as_fragment_of(0x1234, frame, offset, more)
}

/// As [`as_fragment`], of the datagram with this identification.
///
/// # Panics
/// As that.
#[must_use]
pub fn as_fragment_of(datagram: u16, frame: &[u8], offset: u16, more: bool) -> Vec<u8> {
    let (ethernet, packet) = frame.split_at(Ethernet2Header::LEN);
    let mut fragment = ethernet.to_vec();
    let offset = IpFragOffset::try_new(offset).expect("an offset below 8192");
    if packet[0] >> 4 == 4 {
        let (mut header, payload) = Ipv4Header::from_slice(packet).expect("an IPv4 header");
        header.identification = datagram;
        header.fragment_offset = offset;
        header.more_fragments = more;
        header.header_checksum = header.calc_header_checksum();
        fragment.extend_from_slice(&header.to_bytes());
        fragment.extend_from_slice(payload);
    } else {
        let (mut header, payload) = Ipv6Header::from_slice(packet).expect("an IPv6 header");
        let extension = Ipv6FragmentHeader::new(header.next_header, offset, more, datagram.into());
        header.next_header = ip_number::IPV6_FRAG;
        header.payload_length += 8;
        fragment.extend_from_slice(&header.to_bytes());
        fragment.extend_from_slice(&extension.to_bytes());
        fragment.extend_from_slice(payload);
    }
    fragment
}

/// A VLAN tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tag {
    kind: u16,
    control: u16,
}

impl Tag {
    /// That of IEEE 802.1Q, with this priority and number.
    #[must_use]
    pub const fn customer(control: u16) -> Self {
        Self::new(0x8100, control)
    }

    /// That of IEEE 802.1ad, with this priority and number.
    #[must_use]
    pub const fn provider(control: u16) -> Self {
        Self::new(0x88a8, control)
    }

    /// A tag of this `EtherType`.
    #[must_use]
    pub const fn new(kind: u16, control: u16) -> Self {
        Self { kind, control }
    }

    /// A frame with the tag on it.
    #[must_use]
    pub fn put_on(self, frame: &[u8]) -> Vec<u8> {
        let mut tagged = frame.to_vec();
        let bytes = [self.kind.to_be_bytes(), self.control.to_be_bytes()].concat();
        tagged.splice(12..12, bytes);
        tagged
    }
}

/// The VLAN tag of a frame, if it has one.
#[must_use]
pub fn tag(frame: &[u8]) -> Option<Tag> {
    let &[k0, k1, c0, c1] = frame.get(12..16)? else {
        return None;
    };
    let kind = u16::from_be_bytes([k0, k1]);
    matches!(kind, 0x8100 | 0x88a8).then(|| Tag::new(kind, u16::from_be_bytes([c0, c1])))
}

/// The IP header's addresses and hop limit, and the ports if there are any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Summary {
    /// IP source.
    pub src: IpAddr,
    /// IP destination.
    pub dst: IpAddr,
    /// TTL or hop limit.
    pub hops: u8,
    /// Protocol after extension headers.
    pub protocol: u8,
    /// Source and destination port, of TCP and UDP.
    pub ports: Option<(u16, u16)>,
}

/// Reads a frame; `None` if it carries no IP.
#[must_use]
pub fn read(frame: &[u8]) -> Option<Summary> {
    let packet = SlicedPacket::from_ethernet(frame).ok()?;
    let ports = match packet.transport {
        Some(TransportSlice::Tcp(tcp)) => Some((tcp.source_port(), tcp.destination_port())),
        Some(TransportSlice::Udp(udp)) => Some((udp.source_port(), udp.destination_port())),
        _ => None,
    };
    let (src, dst, hops, protocol): (IpAddr, IpAddr, _, _) = match packet.net? {
        NetSlice::Ipv4(ip) => {
            let header = ip.header();
            (
                header.source_addr().into(),
                header.destination_addr().into(),
                header.ttl(),
                header.protocol(),
            )
        }
        NetSlice::Ipv6(ip) => {
            let header = ip.header();
            (
                header.source_addr().into(),
                header.destination_addr().into(),
                header.hop_limit(),
                ip.payload().ip_number,
            )
        }
        NetSlice::Arp(_) => return None,
    };
    Some(Summary {
        src,
        dst,
        hops,
        protocol: protocol.0,
        ports,
    })
}

/// Source of an IP packet, and both addresses of the packet that it quotes if it is an ICMP error. Works on truncated packets.
#[must_use]
pub fn sources(frame: &[u8]) -> Vec<IpAddr> {
    let Some(summary) = read(frame) else {
        return Vec::new();
    };
    let mut found = vec![summary.src];
    found.extend(quoted(frame).into_iter().flatten());
    found
}

fn quoted(frame: &[u8]) -> Option<[IpAddr; 2]> {
    let packet = SlicedPacket::from_ethernet(frame).ok()?;
    let inner = match packet.transport? {
        TransportSlice::Icmpv4(icmp) if matches!(icmp.type_u8(), 3 | 5 | 11 | 12) => icmp.payload(),
        TransportSlice::Icmpv6(icmp) if icmp.type_u8() < 128 => icmp.payload(),
        _ => return None,
    };
    // The quote is cut short: only its fixed header is sure to be there.
    match inner.first()? >> 4 {
        4 => {
            let src: [u8; 4] = inner.get(12..16)?.try_into().ok()?;
            let dst: [u8; 4] = inner.get(16..20)?.try_into().ok()?;
            Some([src.into(), dst.into()])
        }
        6 => {
            let src: [u8; 16] = inner.get(8..24)?.try_into().ok()?;
            let dst: [u8; 16] = inner.get(24..40)?.try_into().ok()?;
            Some([src.into(), dst.into()])
        }
        _ => None,
    }
}

/// Tells whether a frame ends with a segment as [`Ends::syn`] makes it.
#[must_use]
pub fn is_syn(frame: &[u8]) -> bool {
    let start = frame.len().saturating_sub(20);
    // Its sequence number and flags.
    frame.get(start + 4..start + 8) == Some(&[0, 0, 0, 1]) && frame.get(start + 13) == Some(&2)
}

/// Whether a frame carries the ICMP error of a router that got a packet with no hops left.
#[must_use]
pub fn is_time_exceeded(frame: &[u8]) -> bool {
    let packet = SlicedPacket::from_ethernet(frame);
    match packet.ok().and_then(|packet| packet.transport) {
        Some(TransportSlice::Icmpv4(icmp)) => icmp.type_u8() == 11,
        Some(TransportSlice::Icmpv6(icmp)) => icmp.type_u8() == 3,
        _ => false,
    }
}

/// Whether a frame carries a fragment other than a whole datagram.
#[must_use]
pub fn is_fragment(frame: &[u8]) -> bool {
    IpSlice::from_slice(frame.get(Ethernet2Header::LEN..).unwrap_or_default())
        .is_ok_and(|ip| ip.is_fragmenting_payload())
}

/// Where in its datagram a piece begins, in units of eight bytes; `None` for a whole packet.
#[must_use]
pub fn piece_at(frame: &[u8]) -> Option<u16> {
    if !is_fragment(frame) {
        return None;
    }
    match IpSlice::from_slice(frame.get(Ethernet2Header::LEN..)?).ok()? {
        IpSlice::Ipv4(packet) => Some(packet.header().fragments_offset().value()),
        IpSlice::Ipv6(packet) => packet
            .extensions()
            .clone()
            .into_iter()
            .find_map(|extension| match extension {
                Ipv6ExtensionSlice::Fragment(header) => Some(header.fragment_offset().value()),
                _ => None,
            }),
    }
}

/// Protocol number of a packet that no translation knows.
pub const UNKNOWN_PROTOCOL: u8 = ip_number::EXPERIMENTAL_AND_TESTING_0.0;

//! What of a packet the families build differently.

use std::{fmt::Debug, net::Ipv6Addr, vec, vec::Vec};

use etherparse::{
    IpAuthHeader, IpFragOffset, IpHeaders, IpNumber, Ipv4Extensions, Ipv4Header, Ipv6Extensions,
    Ipv6FragmentHeader, Ipv6Header, Ipv6RawExtHeader, Ipv6RoutingExtensions, PacketBuilderStep,
};
use proptest::{option, prelude::*};
use underpass_abi::addr::{Addr4, Addr6};

use crate::ip::{Ip, V4, V6};

/// A family whose packets can be built.
pub(super) trait Model: Ip<Addr: Debug> + Debug {
    /// ICMP types that quote a packet.
    const ERRORS: &'static [u8];
    /// Any address; the same one every now and then.
    fn any_addr() -> BoxedStrategy<Self::Addr>;
    /// Network headers with all that may stand in them but fragments.
    fn any_headers() -> BoxedStrategy<IpHeaders>;
    /// Network headers with nothing unusual.
    fn bare() -> IpHeaders;
    /// Sets the addresses.
    fn address(headers: &mut IpHeaders, src: Self::Addr, dst: Self::Addr);
    /// An ICMP message of the family behind the headers, with type, code and the four bytes after the checksum.
    fn icmp(
        headers: PacketBuilderStep<IpHeaders>,
        head: [u8; 2],
        rest: [u8; 4],
        data: &[u8],
    ) -> Vec<u8>;
}

impl Model for V4 {
    const ERRORS: &'static [u8] = &[3, 4, 11, 12];

    fn any_addr() -> BoxedStrategy<Addr4> {
        prop_oneof![9 => any::<u32>(), 1 => Just(7)]
            .prop_map(Addr4)
            .boxed()
    }

    fn any_headers() -> BoxedStrategy<IpHeaders> {
        (
            1..=255u8,
            any::<bool>(),
            option::of(0..=10usize),
            any::<u8>(),
        )
            .prop_map(|(ttl, dont_fragment, options, option)| {
                let mut header = Ipv4Header {
                    time_to_live: ttl,
                    dont_fragment,
                    ..Ipv4Header::default()
                };
                let options = vec![option; options.unwrap_or(0) * 4];
                header.options = options[..].try_into().expect("at most 40 bytes, in words");
                IpHeaders::Ipv4(header, Ipv4Extensions::default())
            })
            .boxed()
    }

    fn bare() -> IpHeaders {
        IpHeaders::Ipv4(
            Ipv4Header {
                time_to_live: 64,
                ..Ipv4Header::default()
            },
            Ipv4Extensions::default(),
        )
    }

    fn address(headers: &mut IpHeaders, src: Addr4, dst: Addr4) {
        if let IpHeaders::Ipv4(header, _) = headers {
            (header.source, header.destination) = (src.0.to_ne_bytes(), dst.0.to_ne_bytes());
        }
    }

    fn icmp(
        headers: PacketBuilderStep<IpHeaders>,
        [head, code]: [u8; 2],
        rest: [u8; 4],
        data: &[u8],
    ) -> Vec<u8> {
        let mut packet = Vec::new();
        headers
            .icmpv4_raw(head, code, rest)
            .write(&mut packet, data)
            .expect("an ICMP packet");
        packet
    }
}

fn any_options() -> impl Strategy<Value = Option<Ipv6RawExtHeader>> {
    let header = (0..4usize, any::<u8>()).prop_map(|(units, byte)| {
        Ipv6RawExtHeader::new_raw(IpNumber(0), &vec![byte; 6 + 8 * units])
            .expect("6 bytes, and 8 more each time")
    });
    option::weighted(0.3, header)
}

/// What RFC 4443 keeps for errors.
const BELOW_128: [u8; 128] = {
    let mut types = [0; 128];
    let mut icmp_type = 0;
    while icmp_type < 128 {
        types[icmp_type as usize] = icmp_type;
        icmp_type += 1;
    }
    types
};

impl Model for V6 {
    const ERRORS: &'static [u8] = &BELOW_128;

    fn any_addr() -> BoxedStrategy<Addr6> {
        prop_oneof![9 => any::<[u64; 2]>(), 1 => Just([7, 7])]
            .prop_map(|[high, low]| Addr6(high, low))
            .boxed()
    }

    fn any_headers() -> BoxedStrategy<IpHeaders> {
        let auth = (0..4usize, any::<u8>()).prop_map(|(words, byte)| {
            IpAuthHeader::new(IpNumber(0), 1, 2, &vec![byte; words * 4]).expect("in words")
        });
        let routing =
            (any_options(), any_options()).prop_map(|(routing, final_destination_options)| {
                Some(Ipv6RoutingExtensions {
                    routing: routing?,
                    final_destination_options,
                })
            });
        let atomic = any::<u32>()
            .prop_map(|id| Ipv6FragmentHeader::new(IpNumber(0), IpFragOffset::ZERO, false, id));
        let extensions = (
            any_options(),
            any_options(),
            routing,
            option::weighted(0.2, atomic),
            option::weighted(0.2, auth),
        )
            .prop_map(
                |(hop_by_hop_options, destination_options, routing, fragment, auth)| {
                    Ipv6Extensions {
                        hop_by_hop_options,
                        destination_options,
                        routing,
                        fragment,
                        auth,
                    }
                },
            );
        (
            1..=255u8,
            any::<u8>(),
            prop_oneof![Just(Ipv6Extensions::default()), extensions],
        )
            .prop_map(|(hop_limit, traffic_class, extensions)| {
                IpHeaders::Ipv6(
                    Ipv6Header {
                        hop_limit,
                        traffic_class,
                        ..Ipv6Header::default()
                    },
                    extensions,
                )
            })
            .boxed()
    }

    fn bare() -> IpHeaders {
        IpHeaders::Ipv6(
            Ipv6Header {
                hop_limit: 64,
                ..Ipv6Header::default()
            },
            Ipv6Extensions::default(),
        )
    }

    fn address(headers: &mut IpHeaders, src: Addr6, dst: Addr6) {
        if let IpHeaders::Ipv6(header, _) = headers {
            let bytes = |addr: Addr6| Ipv6Addr::from(addr).octets();
            (header.source, header.destination) = (bytes(src), bytes(dst));
        }
    }

    fn icmp(
        headers: PacketBuilderStep<IpHeaders>,
        [head, code]: [u8; 2],
        rest: [u8; 4],
        data: &[u8],
    ) -> Vec<u8> {
        let mut packet = Vec::new();
        headers
            .icmpv6_raw(head, code, rest)
            .write(&mut packet, data)
            .expect("an ICMPv6 packet");
        packet
    }
}

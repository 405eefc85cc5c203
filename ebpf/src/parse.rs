//! Parsing into [`Work`], for the stages of the slow path.

use aya_ebpf::bindings::__sk_buff;
use underpass_ebpf::{
    error,
    l4::{Depth, Kind, L4},
};

use crate::{
    fragment,
    kernel::{ETHERNET, global::global, net::Net, skb::Skb, work_area::WorkArea},
    model::work::Work,
};

global!(
    /// Parses the packet whose network header is at `l3` (0 or [`ETHERNET`]) into [`Work::head`], and finds its
    /// [`Work::place`]. A later fragment is given the ports of its first.
    pub fn parse_packet<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff, l3: u32) -> bool {
        // The verifier knows by this that it is small.
        let l3 = l3 & ETHERNET;
        let headers = Skb::new(ctx).linear(l3 + I::HEADER_LENGTH + L4::READ);
        // Of no protocol that is known it may be an extension header.
        let parsed = I::parse_plain(&headers, l3).filter(|head| head.kind != Kind::Other);
        let Some(parsed) = parsed else {
            return parse_unusual(work, ctx, l3);
        };
        let Work { head, place, .. } = &mut **work;
        *head = parsed;
        place.set(&head.tuple);
        true
    }
);

global!(
    /// Parses a packet with options, extension headers or less than is usual, as [`parse_packet`] does.
    fn parse_unusual<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff, l3: u32) -> bool {
        let Work { head, place, .. } = &mut **work;
        let Ok(parsed) = I::parse(&Skb::new(ctx), l3, Depth::Whole) else {
            return false;
        };
        *head = parsed;
        fragment::complete(head);
        place.set(&head.tuple);
        true
    }
);

global!(
    /// Parses the packet that the ICMP error in [`Work::head`] quotes into [`Work::inner`].
    pub fn parse_quote<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> bool {
        let Work { head, inner, .. } = &mut **work;
        let Ok(parsed) = error::quoted(&Skb::new(ctx), head) else {
            return false;
        };
        *inner = parsed;
        true
    }
);

//! Parsing into [`Work`], for the stages of the slow path.

use aya_ebpf::bindings::__sk_buff;
use underpass_ebpf::{error, l4::Depth};

use crate::{
    fragment,
    kernel::{maps::Work, net::Net, skb::Skb},
};

/// The packet is in [`Work`].
pub const PARSED: u32 = 0;
/// The packet is shorter than its headers.
pub const SHORT: u32 = 1;

/// Parses the packet whose network header is at `l3` into [`Work::head`], and finds its
/// [`Work::place`]. A later fragment is given the ports of its first.
#[inline(always)]
pub fn whole<I: Net>(ctx: *mut __sk_buff, l3: u32) -> u32 {
    let Some(Work { head, place, .. }) = I::work() else {
        return SHORT;
    };
    let Ok(parsed) = I::parse(&Skb::new(ctx), l3, Depth::Whole) else {
        return SHORT;
    };
    *head = parsed;
    fragment::complete(head);
    place.set(&head.tuple);
    PARSED
}

/// Parses the packet that the ICMP error in [`Work::head`] quotes into [`Work::inner`].
#[inline(always)]
pub fn quoted<I: Net>(ctx: *mut __sk_buff) -> u32 {
    let Some(Work { head, inner, .. }) = I::work() else {
        return SHORT;
    };
    let Ok(parsed) = error::quoted(&Skb::new(ctx), head) else {
        return SHORT;
    };
    *inner = parsed;
    PARSED
}

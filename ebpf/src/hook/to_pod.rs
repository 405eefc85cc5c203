//! What the stack delivers to a pod: learned if it came through unchanged, else whatever was learned for its tuple is forgotten.

use aya_ebpf::bindings::__sk_buff;
use underpass_ebpf::l4::Kind;

use crate::{
    ETHERNET,
    call::Call,
    maps::Work,
    skb::Skb,
    stage::{learn, parse::PARSED},
    verdict::PASS,
};

/// IPv4 and IPv6.
#[inline(always)]
pub fn deliver<I: Call>(ctx: *mut __sk_buff) -> i32 {
    let skb = Skb::new(ctx);
    let Some(Work { head, .. }) = I::work() else { return PASS };
    if I::parse_whole(ctx, ETHERNET) != PARSED {
        return PASS;
    }
    if head.kind == Kind::Flow {
        if learn::is_unchanged::<I>(&skb, head) {
            I::learn_pod(ctx, skb.ingress_ifindex(), skb.ifindex());
        } else {
            I::forget();
        }
    }
    PASS
}

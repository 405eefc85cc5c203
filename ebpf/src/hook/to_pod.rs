//! What the stack delivers to a pod: learned if it came through unchanged, else whatever was
//! learned for its tuple is forgotten.

use aya_ebpf::bindings::__sk_buff;
use underpass_ebpf::l4::Kind;

use crate::{
    ETHERNET,
    call::Call,
    flow::{entry, learn},
    kernel::{
        maps::Work,
        skb::Skb,
        verdict::{ERROR, PASS, code},
    },
    nat::{hairpin, host_port, translate},
    parse::PARSED,
};

/// IPv4 and IPv6.
#[inline(always)]
pub fn ip<I: Call>(ctx: *mut __sk_buff) -> i32 {
    match I::deliver(ctx) {
        ERROR => I::error_to_pod(ctx, I::parse_quoted(ctx)),
        code => code,
    }
}

/// Everything else than ICMP errors, whose verdict is [`ERROR`].
#[inline(always)]
pub fn deliver<I: Call>(ctx: *mut __sk_buff) -> i32 {
    let mut skb = Skb::new(ctx);
    if skb.is_bypassed() {
        // From a process of the host to a host port: `from_host` has dealt with it. Or from the bypass, on its way to the queue of this
        // device, which shapes.
        skb.unmark();
        return PASS;
    }
    let Some(Work { head, .. }) = I::work() else {
        return PASS;
    };
    if I::parse_whole(ctx, ETHERNET) != PARSED {
        return PASS;
    }
    if head.kind == Kind::Flow {
        if learn::is_unchanged::<I>(&skb, head) {
            I::learn_pod(ctx, skb.arrival(), skb.ifindex());
        } else {
            I::forget();
        }
        return I::arrive(ctx);
    }
    if head.kind == Kind::Error {
        return ERROR;
    }
    PASS
}

/// What comes back from a host port gets the address and port that the pod asked for: here, since
/// the stack takes no packet with an address of its own as the source.
#[inline(always)]
pub fn arrive<I: Call>(ctx: *mut __sk_buff) -> i32 {
    if I::copy_live() == entry::PRESENT
        && I::work().is_some_and(|work| {
            work.half.rewrite & host_port::FROM_PORT == host_port::FROM_PORT
                && hairpin::is_answer(work.half.rewrite, work.state)
        })
    {
        hairpin::note::<I>();
        if let Err(verdict) = translate::as_known::<I>(&Skb::new(ctx)) {
            return code(Err(verdict));
        }
    }
    PASS
}

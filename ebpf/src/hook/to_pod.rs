//! What the stack delivers to a pod: learned if it came through unchanged, else whatever was
//! learned for its tuple is forgotten.

use aya_ebpf::bindings::__sk_buff;
use underpass_ebpf::l4::Kind;

use crate::{
    flow::{
        join::forget,
        learn::{self, learn_to_pod},
        tracking::look_up,
    },
    icmp_error::error_to_pod,
    kernel::{
        ETHERNET,
        global::global,
        net::Net,
        skb::Skb,
        verdict::{Step, Verdict},
    },
    model::{
        direction::{FROM_PORT, is_answer},
        work::Work,
    },
    nat::{mapping, translate},
    parse::{parse_packet, parse_quote},
};

/// IPv4 and IPv6.
#[inline(always)]
pub fn ip<I: Net>(ctx: *mut __sk_buff) -> Step<Verdict> {
    deliver::<I>(ctx)?;
    error_to_pod::<I>(ctx, parse_quote::<I>(ctx))
}

global!(
    /// Deals with everything else than ICMP errors, which are left to the next stage.
    fn deliver<I: Net>(ctx: *mut __sk_buff) -> Step<()> {
        let mut skb = Skb::new(ctx);
        if skb.is_bypassed() {
            // From a process of the host to a host port: `from_host` has dealt with it. Or from the
            // bypass, on its way to the queue of this device, which shapes.
            skb.unmark();
            return Err(Verdict::STACK);
        }
        let Some(Work { head, .. }) = I::work() else {
            return Err(Verdict::STACK);
        };
        if !parse_packet::<I>(ctx, ETHERNET) {
            return Err(Verdict::STACK);
        }
        if head.kind == Kind::Flow {
            if learn::is_unchanged::<I>(&skb, head) {
                learn_to_pod::<I>(ctx, skb.arrival(), skb.ifindex());
            } else {
                forget::<I>();
            }
            return Err(arrive::<I>(ctx)?);
        }
        if head.kind == Kind::Error {
            return Ok(());
        }
        Err(Verdict::STACK)
    }
);

global!(
    /// Gives what comes back from a host port the address and port that the pod asked for: here, since
    /// the stack takes no packet with an address of its own as the source.
    fn arrive<I: Net>(ctx: *mut __sk_buff) -> Step<Verdict> {
        if look_up::<I>()
            && I::work().is_some_and(|work| {
                work.half.rewrite & FROM_PORT == FROM_PORT
                    && is_answer(work.half.rewrite, work.state)
            })
        {
            mapping::note::<I>();
            translate::as_known::<I>(&Skb::new(ctx))?;
        }
        Ok(Verdict::STACK)
    }
);

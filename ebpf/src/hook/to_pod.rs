//! What the stack delivers to a pod: learned if it came through unchanged, else whatever was
//! learned for its tuple is forgotten.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{addr::Family as _, endpoint::device as flags};
use underpass_ebpf::l4::Kind;

use crate::{
    bypass::straight,
    flow::{
        join::{ends_on_bypass, forget},
        learn::{Learned, learn_to_pod},
        signed,
        tracking::look_up,
        translated::learn_translated,
    },
    icmp_error::error_to_pod,
    kernel::{
        ETHERNET, container,
        global::global,
        maps::device,
        net::Net,
        skb::Skb,
        verdict::{Step, Verdict},
        work_area::WorkArea,
    },
    model::direction::{FROM_PORT, is_answer},
    nat::{mapping, translate},
    parse::{parse_packet, parse_quote},
};

/// IPv4 and IPv6.
#[inline(always)]
pub fn ip<I: Net>(ctx: *mut __sk_buff) -> Step<Verdict> {
    let mut skb = Skb::new(ctx);
    if skb.is_bypassed() {
        // From a process of the host to a host port: `from_host` has dealt with it. Or from the bypass,
        // on its way to the queue of this device, which shapes.
        skb.unmark();
        return Ok(Verdict::STACK);
    }
    let has_bypass = device(skb.ifindex()).is_some_and(|own| own.flags & flags::BYPASS != 0);
    if !has_bypass && straight::has_arrived::<I>(ctx) {
        skb.unmark();
        return Ok(Verdict::STACK);
    }
    // SAFETY: this is the only view, but for those that it is lent for.
    let Some(mut work) = (unsafe { WorkArea::<I>::open() }) else {
        return Ok(Verdict::STACK);
    };
    let work = &mut work;
    deliver(work, ctx, has_bypass)?;
    let is_quoted = parse_quote(work, ctx);
    error_to_pod(work, ctx, is_quoted)
}

global!(
    /// Deals with everything else than ICMP errors, which are left to the next stage. Where the pod has no bypass there is nothing to learn from what
    /// other pods send to it.
    fn deliver<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff, has_bypass: bool) -> Step<()> {
        let skb = Skb::new(ctx);
        if !parse_packet(work, ctx, ETHERNET) {
            return Err(Verdict::STACK);
        }
        if work.head.kind == Kind::Flow {
            if has_bypass || !is_of_pod(&skb) {
                if let Some(sign) = signed::came_through::<I>(&skb, &work.head) {
                    let (from, to) = (skb.arrival(), skb.ifindex());
                    if learn_to_pod(work, ctx, sign, from, to) == Learned::Plain {
                        return Err(Verdict::STACK);
                    }
                } else if learn_translated(work, ctx, skb.arrival(), skb.ifindex()) {
                    return Err(Verdict::STACK);
                } else if container::owns(skb.arrival(), work.head.tuple.src.wide())
                    || !ends_on_bypass(work)
                {
                    // The sender's own, or nobody's conversation.
                    forget(work);
                }
            }
            return Err(arrive(work, ctx)?);
        }
        if work.head.kind == Kind::Error {
            return Ok(());
        }
        Err(Verdict::STACK)
    }
);

/// Whether a pod sent the packet.
#[inline(always)]
fn is_of_pod(skb: &Skb) -> bool {
    device(skb.arrival()).is_some_and(|from| from.flags & flags::POD != 0)
}

global!(
    /// Gives what comes back from a host port the address and port that the pod asked for: here, since
    /// the stack takes no packet with an address of its own as the source.
    fn arrive<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> Step<Verdict> {
        if look_up(work)
            && ({
                work.half.rewrite & FROM_PORT == FROM_PORT
                    && is_answer(work.half.rewrite, work.state)
            })
        {
            mapping::note(work)?;
            translate::as_known(work, &Skb::new(ctx))?;
        }
        Ok(Verdict::STACK)
    }
);

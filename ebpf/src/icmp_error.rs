//! ICMP errors about translated flows, in both directions. They are few: the stack forwards them,
//! we only rewrite. But those about TCP that began past strict connection tracking go past it as well: it
//! has forgotten such a connection, and would call them invalid.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    endpoint::{LOOPBACK, device as flags},
    flow::{Flow, action, rewrite, state},
};
use underpass_ebpf::{error::translate_error, ip::Head, l4::Kind, packet::Packet};

use crate::{
    flow::entry::{find, is_owned},
    kernel::{
        ETHERNET, container,
        global::{global, number},
        maps::{device, endpoint, stamp},
        net::Net,
        skb::Skb,
        verdict::{Step, Verdict},
        work_area::WorkArea,
    },
    model::{
        direction::{FROM_PORT, TO_PORT, TWICE, half_of, is_answer, outgoing},
        work::{Place, Work},
    },
    nat::{hairpin, masquerade},
};

global!(
    /// An error from the world, in [`Work::head`], what it quotes in [`Work::inner`] if that could be
    /// quoted: if it is about what a masqueraded flow sent, it is the pod's.
    pub fn error_from_wire<I: Net>(
        work: &mut WorkArea<I>,
        ctx: *mut __sk_buff,
        is_quoted: bool,
    ) -> Step<Verdict> {
        let mut skb = Skb::new(ctx);
        let Work {
            inner,
            partner: quote,
            partner_place,
            ..
        } = &mut **work;
        let Some(flow) = subject::<I>(inner, partner_place, is_quoted) else {
            return Ok(Verdict::STACK);
        };
        // Others are known to connection tracking: the stack judges the error as related to them.
        let is_sticky = flow.state & state::STICKY != 0;
        let mut is_past_tracking = is_sticky && was_just_heard(flow);
        let half = half_of(flow, partner_place.end);
        if !is_owned::<I>(half, inner.tuple.dst) {
            return Ok(Verdict::STACK);
        }
        if half.rewrite & rewrite::DST != 0 {
            let sent = outgoing::<I>(half, inner.tuple.protocol);
            // What the error is about was noted in the entry that has the pod's own tuple.
            if is_sticky && !is_past_tracking {
                partner_place.set(&sent);
                is_past_tracking = find::<I>(&partner_place.key).is_some_and(was_just_heard);
            }
            *quote = sent.reversed();
            rewrite(work, ctx, Names::Receiver)?;
        }
        if half.action != action::PEER || !is_past_tracking || work.head.l3 != ETHERNET {
            return Ok(if half.rewrite & rewrite::DST != 0 && skb.is_at_bridge() {
                skb.receive_again()
            } else {
                Verdict::STACK
            });
        }
        skb.deliver(half)
    }
);

/// Whether one of an entry's directions had a packet since the last change on the node, and not long ago.
#[inline(always)]
fn was_just_heard<A>(flow: &mut Flow<A>) -> bool {
    /// Ticks in which a router's answer comes.
    const SOON: u64 = 8;
    let now = stamp();
    flow.halves
        .iter()
        .any(|half| now.wrapping_sub(half.stamp) <= SOON)
}

global!(
    /// An error that the stack delivers to a pod, about what the pod sent to a host port of another: it
    /// quotes what that one got.
    pub fn error_to_pod<I: Net>(
        work: &mut WorkArea<I>,
        ctx: *mut __sk_buff,
        is_quoted: bool,
    ) -> Step<Verdict> {
        let Work {
            head,
            inner,
            partner: quote,
            partner_place,
            ..
        } = &mut **work;
        let Some(flow) = subject::<I>(inner, partner_place, is_quoted) else {
            return Ok(Verdict::STACK);
        };
        let flow_state = flow.state;
        let half = half_of(flow, partner_place.end);
        if half.rewrite & FROM_PORT != FROM_PORT || !is_answer(half.rewrite, flow_state) {
            return Ok(Verdict::STACK);
        }
        *quote = outgoing::<I>(half, inner.tuple.protocol).reversed();
        let named = if is_its_own(head, inner) {
            Names::Sender
        } else {
            Names::Nobody
        };
        rewrite(work, ctx, named)?;
        Ok(Verdict::STACK)
    }
);

global!(
    /// An error to the world, as for [`error_from_wire`], from a pod or from this host: what it quotes must
    /// have the tuple that the world knows.
    pub fn error_to_wire<I: Net>(
        work: &mut WorkArea<I>,
        ctx: *mut __sk_buff,
        is_quoted: bool,
    ) -> Step<Verdict> {
        let Work {
            head,
            inner,
            partner: quote,
            partner_place,
            ..
        } = &mut **work;
        let sender = endpoint(head.tuple.src.wide());
        let mut must_translate = false;
        if let Some(sender) = sender
            && let Some(pod) = device(sender.ifindex)
        {
            must_translate = masquerade::is_wanted::<I>(pod, head.tuple.dst);
        }
        let refused = if must_translate {
            Verdict::dropped(Counter::DropUntranslated)
        } else {
            Verdict::STACK
        };
        let Some(flow) = subject::<I>(inner, partner_place, is_quoted) else {
            return Ok(refused);
        };
        if let Some(sender) = sender
            && (inner.tuple.src != head.tuple.dst
                || !container::owns(sender.ifindex, inner.tuple.dst.wide()))
        {
            // About a flow of somebody else, or to somebody else than who has it with the pod.
            return Ok(refused);
        }
        let half = half_of(flow, partner_place.end);
        if half.rewrite & rewrite::SRC == 0 {
            // Known, and not translated: a pod that answers to its own address.
            return Ok(Verdict::STACK);
        }
        *quote = outgoing::<I>(half, inner.tuple.protocol).reversed();
        let named = if sender.is_some() {
            Names::Sender
        } else {
            Names::Nobody
        };
        rewrite(work, ctx, named)?;
        Ok(Verdict::STACK)
    }
);

global!(
    /// An error from a pod, as for [`error_from_wire`]: if it quotes what came from a process of this host, or
    /// from the pod itself, to a host port, it goes back there; if it quotes the answer of a host port, or one to a flow beside
    /// such a port's, it is for the container that has answered.
    pub fn error_from_pod<I: Net>(
        work: &mut WorkArea<I>,
        ctx: *mut __sk_buff,
        is_quoted: bool,
    ) -> Step<()> {
        let mut skb = Skb::new(ctx);
        let is_finishing = skb.ifindex() == LOOPBACK;
        let unknown = if is_finishing {
            Err(Verdict::dropped(Counter::DropNoFlow))
        } else {
            Ok(())
        };
        let Work {
            head,
            inner,
            partner: quote,
            partner_place,
            ..
        } = &mut **work;
        let quoted = is_quoted.then_some(&*inner);
        if !is_finishing && !may_have_got(skb.ifindex(), quoted, partner_place) {
            return Err(Verdict::dropped(Counter::DropNoFlow));
        }
        let Some(flow) = subject::<I>(inner, partner_place, is_quoted) else {
            return unknown;
        };
        let flow_state = flow.state;
        let half = half_of(flow, partner_place.end);
        let is_turned = half.rewrite & TWICE == TWICE
            && (is_finishing
                || half.action == action::HOST
                || container::is_same(half.out_ifindex, skb.ifindex()));
        // To another container: by the stack, as the questions go.
        let is_early = !is_turned
            && !is_finishing
            && half.rewrite & TO_PORT == TO_PORT
            && !is_answer(half.rewrite, flow_state);
        if !(is_turned || is_early) || !is_owned::<I>(half, inner.tuple.dst) {
            return unknown;
        }
        if !is_finishing && !container::is_same(half.in_ifindex, skb.ifindex()) {
            return unknown;
        }
        if is_turned && !is_finishing && half.action == action::HOST {
            return Err(hairpin::return_to_host(work, &mut skb)?);
        }
        *quote = outgoing::<I>(half, inner.tuple.protocol).reversed();
        let named = if is_its_own(head, inner) {
            Names::Both
        } else {
            Names::Receiver
        };
        rewrite(work, ctx, named)?;
        Err(if is_finishing || is_early {
            Verdict::STACK
        } else {
            skb.deliver(half)?
        })
    }
);

/// Whether the quoted packet may have come to the pod behind a host veth: one that must not send from others' addresses gets what is for its own, and what
/// the way of a flow leads to it. About other packets it has nothing to say; connection tracking asks only to whom it says that. Nor about what can't be
/// read here: the kernel, which puts pieces together and looks at no version, may read it.
#[inline(always)]
fn may_have_got<I: Net>(pod: u32, quoted: Option<&Head<I>>, place: &mut Place<I>) -> bool {
    if device(pod).is_none_or(|pod| pod.flags & flags::ANTI_SPOOF == 0) {
        return true;
    }
    let Some(quoted) = quoted else {
        return false;
    };
    let dst = quoted.tuple.dst;
    if container::owns(pod, dst.wide()) || I::is_local_scope(dst) {
        return true;
    }
    place.set(&quoted.tuple);
    find::<I>(&place.key)
        .is_some_and(|flow| container::is_same(half_of(flow, place.end).out_ifindex, pod))
}

/// The flow of the packet that an error quotes; [`Place::end`] sends what goes the other way, as the
/// error does.
#[inline(always)]
fn subject<I: Net>(
    inner: &Head<I>,
    place: &mut Place<I>,
    is_quoted: bool,
) -> Option<&'static mut Flow<I::Addr>> {
    if !is_quoted || inner.kind != Kind::Flow {
        return None;
    }
    place.set(&inner.tuple.reversed());
    // The stack translates errors about what it has translated.
    find::<I>(&place.key).filter(|flow| flow.state & state::BY_STACK == 0)
}

/// Whether the quoted packet was for the error's sender itself, that has another address in the new quote. A router keeps its own.
#[inline(always)]
fn is_its_own<I: Net>(head: &Head<I>, inner: &Head<I>) -> bool {
    head.tuple.src == inner.tuple.dst
}

number!(
    /// Whose address of the error itself is replaced, with what that end has in the new quote.
    enum Names {
        /// None.
        Nobody,
        /// The source.
        Sender,
        /// The destination.
        Receiver,
        /// Both of them.
        Both,
    }
);

global!(
    /// Gives the error in [`Work::head`] the quote of a packet with the tuple in [`Work::partner`], and the addresses that go with it.
    fn rewrite<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff, names: Names) -> Step<()> {
        let mut skb = Skb::new(ctx);
        let Work {
            head,
            inner,
            partner: quote,
            ..
        } = &mut **work;
        let (mut src, mut dst) = (head.tuple.src, head.tuple.dst);
        if matches!(names, Names::Sender | Names::Both) {
            src = quote.dst;
        }
        if matches!(names, Names::Receiver | Names::Both) {
            dst = quote.src;
        }
        let malformed = Verdict::dropped(Counter::DropMalformed);
        translate_error(&mut skb, head, inner, quote, src, dst).map_err(|_| malformed)?;
        skb.store(head.l3, &head.header).map_err(|_| malformed)
    }
);

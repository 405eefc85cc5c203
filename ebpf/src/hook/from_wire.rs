//! What the world sends: the bypass for flows that are known, translation back for those that the
//! stack carries.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    addr::Family as _,
    endpoint::device as flags,
    flow::{action, rewrite},
};
use underpass_ebpf::l4::Kind;

use crate::{
    bypass::{self, Side},
    flow::{
        learn,
        tracking::{look_up, note},
    },
    fragment::{
        self,
        reorder::{self, Way},
    },
    icmp_error::error_from_wire,
    kernel::{
        ETHERNET,
        global::global,
        maps::{device, endpoint},
        net::Net,
        skb::Skb,
        verdict::{Step, Verdict},
    },
    model::work::Work,
    nat::{
        hairpin,
        host_port::{Served, open_host_port},
        mapping, translate,
    },
    parse::{parse_packet, parse_quote},
};

/// IPv4 and IPv6; the network header is at `L3`.
#[inline(always)]
pub fn ip<I: Net, const L3: u32>(ctx: *mut __sk_buff) -> Step<Verdict> {
    if L3 == ETHERNET {
        bypass::take::<I>(ctx, Side::Wire)?;
    }
    hairpin::serve::<I>(ctx, 0, |ctx| translate_back::<I>(ctx, L3))?;
    Ok(Verdict::STACK)
}

global!(
    /// Translates a packet whose network header is at `l3`, and that no bypass took, if its flow is.
    fn translate_back<I: Net>(ctx: *mut __sk_buff, l3: u32) -> Step<Served> {
        let mut skb = Skb::new(ctx);
        let Some(Work { head, half, .. }) = I::work() else {
            return Err(Verdict::STACK);
        };
        if !parse_packet::<I>(ctx, l3) || !skb.is_for_host() {
            return Err(Verdict::STACK);
        }
        if head.kind == Kind::Error {
            return Err(error_from_wire::<I>(ctx, parse_quote::<I>(ctx))?);
        }
        if head.kind != Kind::Flow {
            reorder::copy::<I>(ctx);
            return Err(Verdict::STACK);
        }
        let served = if look_up::<I>() {
            Served::Known
        } else {
            open_host_port::<I>(ctx, 0)?
        };
        let is_known = served == Served::Known;
        if served == Served::Crowded
            || is_known && I::work().is_some_and(|work| hairpin::is_in_the_way(work))
        {
            return Ok(Served::Crowded);
        }
        // Nobody in the world has a tuple of the host with itself.
        if is_known && half.rewrite & rewrite::DST != 0 && half.action != action::HOST {
            reorder::lead::<I>(ctx, Way::IN)?;
            mapping::note::<I>();
            translate::as_known::<I>(&skb)?;
        } else {
            if is_known && half.action == action::OTHERS {
                note::<I>();
            }
            // So that the later ones are not kept.
            fragment::remember(head);
        }
        if endpoint(head.tuple.dst.wide()).is_some() {
            if device(skb.ifindex()).is_some_and(|here| here.flags & flags::VRF != 0) {
                skb.mark_arrival();
            }
            learn::sign(&mut skb, head);
        }
        Err(Verdict::STACK)
    }
);

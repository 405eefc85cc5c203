//! Translating packets that the stack carries.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::counter::Counter;
use underpass_ebpf::{
    packet::Packet,
    translate::{self, Untranslatable},
};

use crate::{
    call::Call,
    flow::entry::outgoing,
    fragment,
    kernel::{
        maps::Work,
        net::Net,
        skb::Skb,
        verdict::{Step, Verdict},
    },
};

const DONE: u32 = 0;
const SHORT: u32 = 1;
const PIECE: u32 = 2;

/// Gives the packet in [`Work::head`] the tuple that its flow's direction in [`Work::half`] leaves
/// with.
#[inline(always)]
pub fn as_known<I: Call>(skb: &Skb) -> Step<()> {
    let Some(Work {
        head,
        half,
        partner,
        ..
    }) = I::work()
    else {
        return Err(Verdict::Stack);
    };
    *partner = outgoing::<I>(half, head.tuple.protocol);
    translate::<I>(skb)
}

/// Gives the packet in [`Work::head`] the tuple in [`Work::partner`].
#[inline(always)]
pub fn translate<I: Call>(skb: &Skb) -> Step<()> {
    match I::translate(skb.raw()) {
        DONE => Ok(()),
        PIECE => Err(Verdict::Drop(Counter::DropFragment)),
        _ => Err(Verdict::Drop(Counter::DropMalformed)),
    }
}

/// See [`translate`].
#[inline(always)]
pub fn to_partner<I: Net>(ctx: *mut __sk_buff) -> u32 {
    let Some(Work { head, partner, .. }) = I::work() else {
        return SHORT;
    };
    let mut skb = Skb::new(ctx);
    fragment::remember(head);
    match translate::translate(&mut skb, head, partner) {
        Ok(()) if skb.store(head.l3, &head.header).is_ok() => DONE,
        Err(Untranslatable::Piece) => {
            fragment::refuse(head);
            PIECE
        }
        _ => SHORT,
    }
}

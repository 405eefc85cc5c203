//! Translating packets that the stack carries.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::counter::Counter;
use underpass_ebpf::{
    packet::Packet,
    translate::{self, Untranslatable},
};

use crate::{
    fragment,
    kernel::{
        global::{global, number},
        net::Net,
        skb::Skb,
        verdict::{Step, Verdict},
        work_area::WorkArea,
    },
    model::{direction::outgoing, work::Work},
};

number!(
    /// What became of a packet that was to be translated.
    enum Translated {
        /// It is shorter than it must be.
        Short,
        /// It is a piece that can't be translated.
        Piece,
        /// It has the tuple.
        Done,
    }
);

/// Gives the packet in [`Work::head`] the tuple that its flow's direction in [`Work::half`] leaves
/// with.
#[inline(always)]
pub fn as_known<I: Net>(work: &mut WorkArea<I>, skb: &Skb) -> Step<()> {
    let Work {
        head,
        half,
        partner,
        ..
    } = &mut **work;
    *partner = outgoing::<I>(half, head.tuple.protocol);
    translate(work, skb)
}

/// Gives the packet in [`Work::head`] the tuple in [`Work::partner`].
#[inline(always)]
pub fn translate<I: Net>(work: &mut WorkArea<I>, skb: &Skb) -> Step<()> {
    match to_partner(work, skb.raw()) {
        Translated::Done => Ok(()),
        Translated::Piece => Err(Verdict::dropped(Counter::DropFragment)),
        Translated::Short => Err(Verdict::dropped(Counter::DropMalformed)),
    }
}

global!(
    /// See [`translate`].
    fn to_partner<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> Translated {
        let Work { head, partner, .. } = &mut **work;
        let mut skb = Skb::new(ctx);
        fragment::remember(head);
        match translate::translate(&mut skb, head, partner) {
            Ok(()) if skb.store(head.l3, &head.header).is_ok() => Translated::Done,
            Err(Untranslatable::Piece) => {
                fragment::refuse(head);
                Translated::Piece
            }
            _ => Translated::Short,
        }
    }
);

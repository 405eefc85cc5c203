//! The mark that a packet has while it is in the stack. Where it comes out, that says whether the tuple is still the one that it entered
//! with, and which one that was.

use underpass_abi::{endpoint::device as flags, flow::SIGNED};
use underpass_ebpf::{
    fingerprint::{fingerprint, sum},
    ip::Head,
    l4::Kind,
};

use crate::{
    kernel::{
        global::number,
        maps::{constant, device},
        memory,
        net::Net,
        skb::Skb,
        work_area::WorkArea,
    },
    model::work::Work,
};

number!(
    /// What has become of a packet since it came to this host.
    pub enum Sign {
        /// It has the tuple that it was sent with.
        AsItCame,
        /// It was given its tuple by us, before the stack had it.
        Translated,
    }
);

impl Sign {
    /// The bits of a fingerprint that are turned.
    #[inline(always)]
    const fn turns(self) -> u32 {
        match self {
            Self::AsItCame => 0,
            Self::Translated => u32::MAX,
        }
    }
}

/// Leaves the packet's fingerprint for the hook where it comes out of the stack, and notes whose it is.
#[inline(always)]
pub fn sign<I: Net>(skb: &mut Skb, head: &Head<I>, sign: Sign) {
    if head.kind == Kind::Flow {
        let hash = fingerprint_of(head) ^ sign.turns();
        skb.set_hash(hash);
        if let Some(signed) = I::signed(hash % SIGNED) {
            // SAFETY: an element of this CPU, which no other program looks at meanwhile.
            let signed = unsafe { &mut *signed };
            signed.carried = hash;
            signed.shape = shape::<I>(&head.header);
            memory::copy(&mut signed.tuple, &head.tuple);
        }
    }
}

/// Leaves the sum of the packet's tuple for the hook where it comes out of the stack.
#[inline(always)]
pub fn leave_sum<I: Net>(skb: &mut Skb, head: &Head<I>) {
    skb.set_hash(sum(constant!(key), &head.tuple));
}

/// Whether a packet that has the sum of a tuple still has that tuple.
#[inline(always)]
pub fn has_sum<I: Net>(skb: &Skb, head: &Head<I>) -> bool {
    skb.hash() == sum(constant!(key), &head.tuple)
}

/// As [`sign`], of a packet of the world that is for none of the pods, but may come to be when the stack has translated it. `skb->hash`
/// stays: sockets of the node are found by it (RFS), and next hops (`fib_multipath_hash_policy` 1).
#[inline(always)]
pub fn number<I: Net>(work: &mut WorkArea<I>, skb: &mut Skb) {
    let Work { head, numbered, .. } = &mut **work;
    let number = skb.set_number(*numbered);
    *numbered = numbered.wrapping_add(1);
    if let Some(signed) = I::signed(number % SIGNED) {
        // SAFETY: as above.
        let signed = unsafe { &mut *signed };
        signed.carried = number;
        signed.shape = shape::<I>(&head.header);
        signed.arrival = skb.ifindex();
        memory::copy(&mut signed.tuple, &head.tuple);
    }
}

/// See [`Signed::shape`](underpass_abi::flow::Signed::shape).
#[inline(always)]
fn shape<I: Net>(header: &I::Header) -> u32 {
    I::length(header) | u32::from(I::dscp(header)) << 24
}

#[inline(always)]
fn fingerprint_of<I: Net>(head: &Head<I>) -> u32 {
    fingerprint(constant!(key), &head.tuple, I::dscp(&head.header))
}

/// Whether the packet came through the stack unchanged, as it came to this host.
#[inline(always)]
pub fn is_unchanged<I: Net>(skb: &Skb, head: &Head<I>) -> bool {
    came_through(skb, head) == Some(Sign::AsItCame)
}

/// What the packet was when it came to the stack, if it came through that unchanged.
#[inline(always)]
pub fn came_through<I: Net>(skb: &Skb, head: &Head<I>) -> Option<Sign> {
    let turned = skb.hash() ^ fingerprint_of(head);
    [Sign::AsItCame, Sign::Translated]
        .into_iter()
        .find(|sign| turned == sign.turns())
}

/// Finds the tuple that the packet in [`Work::head`] entered the stack with, and puts it at [`Work::partner`]. Returns the device that
/// it came by.
#[inline(always)]
pub fn entered<I: Net>(work: &mut WorkArea<I>, skb: &Skb, from_ifindex: u32) -> Option<u32> {
    let number = skb.number();
    let carried = number.unwrap_or(skb.hash());
    let signed = I::signed(carried % SIGNED)?;
    // SAFETY: an element of this CPU, which no other program looks at meanwhile.
    let signed = unsafe { &*signed };
    if signed.carried != carried
        || signed.shape != shape::<I>(&work.head.header)
        || signed.tuple.protocol != work.head.tuple.protocol
        || signed.tuple == work.head.tuple
    {
        return None;
    }
    memory::copy(&mut work.partner, &signed.tuple);
    if number.is_none() || signed.arrival == from_ifindex {
        return Some(from_ifindex);
    }
    // To the stack it came by the device of a VRF.
    let arrival = signed.arrival;
    device(arrival)
        .is_some_and(|uplink| uplink.flags & flags::VRF != 0)
        .then_some(arrival)
}

//! The fast path: parsed, looked up, checked, rewritten, redirected. Whatever is unusual goes on to
//! the next stage, untouched.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{
    counter::Counter,
    endpoint::device as flags,
    flow::{End, Half, Key, TOLD, action, state, told},
};
use underpass_ebpf::{
    fingerprint::fingerprint,
    ip::Head,
    l4::{Kind, L4, tcp},
    packet::{Covers, Packet},
    translate::{Untranslatable, translate},
};

use crate::{
    bypass::revalidate::revalidate,
    flow::{
        entry::find,
        tracking::{Noted, Seen, note},
    },
    kernel::{
        ETHERNET, container,
        global::{global, number},
        maps::{constant, count, device, stamp, tcp_forgotten, tick},
        memory::{self, mac_words},
        net::Net,
        skb::Skb,
        verdict::{Step, Verdict},
        work_area::WorkArea,
    },
    model::{
        direction::{half_of, outgoing},
        state::is_finished,
        work::Work,
    },
};

pub mod revalidate;
pub mod straight;

number!(
    /// Where a packet comes from.
    pub enum Side {
        /// The pod behind the host veth that it arrived at.
        Pod,
        /// An uplink.
        Wire,
    }
);

number!(
    /// What is known of a packet's flow.
    enum Trust {
        /// What its stamp says.
        Stamp,
        /// It was revalidated just now.
        Settled,
    }
);

number!(
    /// Why a packet was not sent on the bypass.
    enum Unsent {
        /// It is one for the stack.
        Stack,
        /// Its flow has to be revalidated first.
        Stale,
        /// It has no flow.
        Unknown,
    }
);

/// Sends the packet on its flow's bypass, unless it has none, or the packet is one for the stack.
#[inline(always)]
pub fn take<I: Net>(ctx: *mut __sk_buff, side: Side) -> Step<Seen> {
    match send::<I>(ctx, side, Trust::Stamp)? {
        Unsent::Stack => return Ok(Seen::Perhaps),
        Unsent::Unknown => return Ok(Seen::None),
        Unsent::Stale => {}
    }
    // SAFETY: nobody has looked at the area yet, nor does while this view lives.
    let is_settled =
        unsafe { WorkArea::<I>::open() }.is_some_and(|mut work| revalidate(&mut work, ctx));
    if is_settled {
        send::<I>(ctx, side, Trust::Settled)?;
    }
    Ok(Seen::Perhaps)
}

global!(
    /// See [`take`].
    fn send<I: Net>(ctx: *mut __sk_buff, side: Side, trust: Trust) -> Step<Unsent> {
        let mut skb = Skb::new(ctx);
        let Some(mut head) = I::parse_plain(
            &skb.linear(ETHERNET + I::HEADER_LENGTH + L4::READ),
            ETHERNET,
        ) else {
            return Ok(Unsent::Stack);
        };
        if head.kind != Kind::Flow {
            return Ok(Unsent::Stack);
        }
        let (key, end) = head.tuple.key();
        let Some(flow) = find::<I>(&key) else {
            if side == Side::Pod {
                straight::begin(&mut skb, &head)?;
            }
            return Ok(Unsent::Unknown);
        };
        if flow.state & state::BYPASS == 0 {
            if side == Side::Pod {
                straight::go_on(&mut skb, &head, flow, &key, end)?;
            }
            return Ok(Unsent::Stack);
        }
        let is_sticky = flow.state & state::STICKY != 0;
        // Until it is known to be answered each packet is taken note of; while it may have been reset it is revalidated by each.
        let is_answered = flow.state & state::ANSWERED == state::ANSWERED;
        let may_be_reset = flow.state & state::RST != 0;
        // So is what follows the last FIN, and what says that an end goes on which seemed to have closed.
        let is_closing = is_finished(flow.state)
            || flow.state & state::FINISHED != 0 && head.tcp_flags & tcp::PSH != 0;
        let tag = &raw const flow.tag;
        let half = half_of(flow, end);
        if !is_usual(&skb, &head, side, half) {
            return Ok(Unsent::Stack);
        }
        let ends = head.tcp_flags & (tcp::FIN | tcp::RST) != 0;
        // By another uplink than the flow has: the kernel's filter of reverse paths decides, and the firewall. A flow that can't go back to them is
        // taken where no such filter is strict.
        let comes_elsewhere = side == Side::Wire && half.uplink != skb.ifindex();
        if is_sticky {
            if comes_elsewhere && (half.in_ifindex != 0 || !may_arrive(skb.ifindex())) {
                return Ok(Unsent::Stack);
            }
        } else if ends || comes_elsewhere || head.control {
            // After a long silence connection tracking may not know what ends here, or comes by another uplink.
            let is_late = trust == Trust::Stamp
                && (ends || comes_elsewhere)
                && tick().wrapping_sub(half.passed) >= tcp_forgotten();
            return Ok(if is_late {
                Unsent::Stale
            } else {
                Unsent::Stack
            });
        }
        // Before 5.12 the MTU is only known as the length of a packet that fits.
        let length = skb.wire_length(head.l3, head.headers_length());
        let fits = length <= half.mtu;
        let is_too_long =
            !fits && trust == Trust::Settled && !(is_sticky && goes_anyway(half, length));
        if is_too_long {
            return Ok(Unsent::Stack);
        }
        let is_reset = may_be_reset || head.tcp_flags & tcp::RST != 0;
        if trust == Trust::Stamp && (is_reset || !fits || half.stamp != stamp()) {
            return Ok(Unsent::Stale);
        }
        let is_noted = is_answered && head.tcp_flags & tcp::FIN == 0 && !is_closing;
        if trust == Trust::Stamp
            && !is_noted
            && note_state::<I>(&key, end, head.tcp_flags) != Noted::Whole
        {
            return Ok(Unsent::Stale);
        }
        if half.queue & flags::TUNNEL != 0 {
            // What the stack sends has it: all packets of a flow get one port outside.
            skb.set_hash(fingerprint(
                constant!(key),
                &head.tuple,
                I::dscp(&head.header),
            ));
        }
        if rewrite(&mut skb, &mut head, half).is_err() {
            return Err(Verdict::dropped(Counter::DropMalformed));
        }
        half.packets += 1;
        let out_ifindex = half.out_ifindex;
        // The memory of an entry that is removed may be another's while we read it. What was read is of
        // this flow if the tag still is, since that would be overwritten first.
        // SAFETY: an entry of the map; volatile, so that it is read here.
        if unsafe { tag.read_volatile() } != key.tag() {
            return Err(Verdict::dropped(Counter::DropRemoved));
        }
        Err(if half.action == action::PEER {
            count(Counter::BypassPeer);
            if half.queue == 0 {
                skb.redirect_peer(out_ifindex)
            } else {
                skb.redirect(out_ifindex)
            }
        } else {
            count(Counter::BypassWire);
            // SAFETY: who called has no view of the area.
            match unsafe { WorkArea::<I>::open() } {
                // Once a tick the kernel's own neighbour code sends the packet, so that it goes on
                // probing the next hop.
                Some(mut work) if trust == Trust::Settled => {
                    skb.redirect_neighbour(out_ifindex, &mut work.next_hop)
                }
                _ => skb.redirect(out_ifindex),
            }
        })
    }
);

/// Takes note of a packet of a flow whose way is as its stamp says: its state is all that may change.
#[inline(always)]
fn note_state<I: Net>(key: &Key<I::Addr>, end: End, tcp_flags: u8) -> Noted {
    // SAFETY: who called has no view of the area.
    let Some(mut work) = (unsafe { WorkArea::<I>::open() }) else {
        return Noted::Incomplete;
    };
    let Work { head, place, .. } = &mut *work;
    (head.tuple.protocol, head.tcp_flags) = (key.0.protocol, tcp_flags);
    memory::copy(&mut place.key, key);
    place.end = end;
    note(&mut work)
}

/// Whether a packet of a flow that ends on the bypass leaves though its route has no room for it, `length` bytes long. Not the first of each minute: where the
/// route's MTU is locked, the stack says so to who sent it, who forgets it after some minutes. But where the kernel was told of a narrower path beyond (to
/// this destination, for ten minutes), it does not go by that when it forwards, and connection tracking would not know the packet. It does
/// not leave either where the device has no room.
#[inline(always)]
fn goes_anyway<A>(half: &mut Half<A>, length: u32) -> bool {
    if half.action != action::WIRE {
        return false;
    }
    let now = told(tick());
    let was_told = half.queue & TOLD == now;
    half.queue = half.queue & !TOLD | now;
    was_told && device(half.out_ifindex).is_some_and(|uplink| length <= uplink.mtu)
}

/// Whether nothing about the packet calls for the stack.
#[inline(always)]
fn is_usual<I: Net>(skb: &Skb, head: &Head<I>, side: Side, half: &Half<I::Addr>) -> bool {
    if half.action != action::PEER && half.action != action::WIRE {
        return false;
    }
    match side {
        Side::Pod if half.in_ifindex != skb.ifindex() => {
            if !came_by_sibling(skb.raw(), half.in_ifindex) {
                return false;
            }
        }
        Side::Pod if !has_mac(skb, &half.in_mac) => return false,
        Side::Pod | Side::Wire => {}
    }
    if I::ttl(&head.header) <= 1 || !skb.is_for_host() {
        return false;
    }
    // A new connection is a new decision, also on an old tuple.
    head.tcp_flags & tcp::SYN == 0
}

global!(
    /// Whether the packet, which did not come by the host veth `owner`, came by another of the same
    /// container, with the MAC that the container has there.
    fn came_by_sibling(ctx: *mut __sk_buff, owner: u32) -> bool {
        let skb = Skb::new(ctx);
        container::stands_in(skb.ifindex(), owner)
            && device(skb.ifindex()).is_some_and(|here| {
                here.flags & flags::CHECK_MAC == 0 || has_mac(&skb, &here.peer_mac)
            })
    }
);

/// Whether the packet's Ethernet source is `wanted`, or any will do.
#[inline(always)]
fn has_mac(skb: &Skb, wanted: &[u8; 6]) -> bool {
    let wanted = mac_words(wanted);
    wanted[0] | wanted[1] | wanted[2] == 0
        || skb.ethernet_source().is_some_and(|source| {
            (source[0] ^ wanted[0]) | (source[1] ^ wanted[1]) | (source[2] ^ wanted[2]) == 0
        })
}

/// Whether packets of any flow may come in by this device.
#[inline(always)]
fn may_arrive(ifindex: u32) -> bool {
    const BARRED: u32 = flags::POD | flags::LAYER3 | flags::STRICT_REVERSE_PATH;
    device(ifindex).is_some_and(|device| device.flags & BARRED == 0)
}

#[inline(always)]
fn rewrite<I: Net>(
    skb: &mut Skb,
    head: &mut Head<I>,
    half: &Half<I::Addr>,
) -> Result<(), Untranslatable> {
    let ethernet = forward(skb, head, half)?;
    skb.store_headers(ethernet, head.header)?;
    Ok(())
}

/// Gives a packet the tuple that its half leaves with, and takes one off its TTL. The Ethernet header
/// to leave with is returned, in words; that and the network header, which is changed in
/// `head.header` alone, are the caller's to store.
#[inline(always)]
pub fn forward<I: Net, P: Packet>(
    packet: &mut P,
    head: &mut Head<I>,
    half: &Half<I::Addr>,
) -> Result<[u16; 7], Untranslatable> {
    if half.rewrite != 0 {
        let new = outgoing::<I>(half, head.tuple.protocol);
        translate(packet, head, &new)?;
    }
    let unbalanced = I::decrement_ttl(&mut head.header);
    if I::PSEUDO == Covers::Pseudo6 {
        packet.account(unbalanced);
    }
    let ([to0, to1, to2], [from0, from1, from2]) =
        (mac_words(&half.eth[0]), mac_words(&half.eth[1]));
    Ok([to0, to1, to2, from0, from1, from2, I::ETHER_TYPE])
}

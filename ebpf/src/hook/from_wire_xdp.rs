//! What the world sends, before the kernel has made packets of it: known flows to pods that take
//! frames. Everything else goes on to [`from_wire`](super::from_wire), which learns, settles and
//! answers for all flows.

use aya_ebpf::bindings::{
    xdp_action::{XDP_ABORTED, XDP_DROP, XDP_PASS},
    xdp_md,
};
use underpass_abi::{
    counter::Counter,
    flow::{Half, action, protocol, state},
};
use underpass_ebpf::{
    checksum::Summed as _,
    ip::Head,
    l4::{self, Kind, tcp},
    packet::{Load as _, Packet as _},
    translate::Untranslatable,
};

use crate::{
    bypass::forward,
    kernel::{
        ETHERNET,
        maps::{count, device, stamp},
        memory::mac_words,
        net::Net,
        xdp::{Frame, redirect_to_pod},
    },
    model::direction::half_of,
};

/// State of flows whose packets need not be taken note of.
const USUAL: u32 = state::BYPASS | state::ANSWERED;
/// And of those whose packets, or some of them, must be.
const UNUSUAL: u32 = state::RST | state::FINISHED;

/// IPv4 and IPv6.
#[inline(always)]
pub fn ip<I: Net>(ctx: *mut xdp_md) -> u32 {
    let mut frame = Frame::new(ctx);
    let Some(mut head) = I::parse_plain(&frame, ETHERNET) else {
        return XDP_PASS;
    };
    if head.kind != Kind::Flow {
        return XDP_PASS;
    }
    let (key, end) = head.tuple.key();
    let Some(flow) = I::flows().get_ptr_mut(&key) else {
        return XDP_PASS;
    };
    // SAFETY: see `flow::entry::find`.
    let flow = unsafe { &mut *flow };
    if flow.state & (USUAL | UNUSUAL) != USUAL {
        return XDP_PASS;
    }
    let tag = &raw const flow.tag;
    let half = half_of(flow, end);
    if !is_usual(&frame, &head, half) {
        return XDP_PASS;
    }
    let action = redirect_to_pod(half.out_ifindex);
    if action == XDP_PASS {
        return XDP_PASS;
    }
    if rewrite(&mut frame, &mut head, half).is_err() {
        // Never: what is written was read before.
        return XDP_ABORTED;
    }
    half.packets += 1;
    // SAFETY: see `bypass::send`.
    if unsafe { tag.read_volatile() } != key.tag() {
        count(Counter::DropRemoved);
        return XDP_DROP;
    }
    count(Counter::BypassXdp);
    action
}

/// Whether nothing about the frame calls for anybody else: its flow was settled in this tick, does
/// not change its state, and leads to a pod as it is.
#[inline(always)]
fn is_usual<I: Net>(frame: &Frame, head: &Head<I>, half: &Half<I::Addr>) -> bool {
    half.action == action::PEER
        && half.in_ifindex == 0
        && half.uplink == frame.ifindex()
        && half.queue == 0
        && half.stamp == stamp()
        && head.tcp_flags & (tcp::SYN | tcp::FIN | tcp::RST) == 0
        && I::ttl(&head.header) > 1
        && frame.len() <= (half.mtu + ETHERNET) as usize
        && is_for_host(frame)
        && is_summed(frame, head)
}

/// Whether the Ethernet destination is this host.
#[inline(always)]
fn is_for_host(frame: &Frame) -> bool {
    let Ok(to) = frame.load::<[u16; 3]>(0) else {
        return false;
    };
    device(frame.ifindex()).is_some_and(|here| {
        let mac = mac_words(&here.mac);
        (to[0] ^ mac[0]) | (to[1] ^ mac[1]) | (to[2] ^ mac[2]) == 0
    })
}

/// Whether the transport checksum is one, and not what another kernel leaves for a device to
/// complete: the sum of the pseudo header. Virtual devices deliver such packets, and what says so
/// does not go with the frame. One good packet in 65,536 looks the same, and takes the other way.
#[inline(always)]
fn is_summed<I: Net>(frame: &Frame, head: &Head<I>) -> bool {
    let tuple = &head.tuple;
    if tuple.protocol != protocol::TCP && tuple.protocol != protocol::UDP {
        return false;
    }
    let Some(checksum) = l4::checksum_of(tuple.protocol) else {
        return false;
    };
    let Ok([found]) = frame.load::<[u16; 1]>(head.l4 + checksum.offset) else {
        return false;
    };
    #[expect(clippy::cast_possible_truncation, reason = "a length of 16 bits")]
    let length = I::length(&head.header).wrapping_sub(I::HEADER_LENGTH) as u16;
    let pseudo = tuple
        .src
        .words()
        .and(tuple.dst.words())
        .plus16(u16::from(tuple.protocol).to_be())
        .plus16(length.to_be());
    found != pseudo.sum()
}

#[inline(always)]
fn rewrite<I: Net>(
    frame: &mut Frame,
    head: &mut Head<I>,
    half: &Half<I::Addr>,
) -> Result<(), Untranslatable> {
    let ethernet = forward(frame, head, half)?;
    frame.store(0, &ethernet)?;
    frame.store(ETHERNET, &head.header)?;
    Ok(())
}

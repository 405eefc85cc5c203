//! The packet's itinerary: where each program sits, and the order in which a packet meets them.
//!
//! ```text
//!   pod ──> from_pod ──> stack ──> to_pod ──> pod          first packet of a flow
//!                          │
//!                          └─────> to_wire ──> world       learns, masquerades
//!   world ──> from_wire ─> stack ──> to_pod ──> pod        translates back
//!
//!   pod ──> from_pod ════════════════════════> pod, world  every later packet: the bypass
//!   world ──> from_wire ═════════════════════> pod
//!   world ──> from_wire_xdp ═════════════════> pod         the same, where `xdp` is configured
//!
//!   host ───> from_host ═════════════════════> pod         to a host port, by 127.0.0.1 and the like
//!   pod ────> from_pod ══> from_host ────────> host        and back
//! ```
#![no_std]
#![no_main]
#![expect(
    clippy::needless_borrows_for_generic_args,
    reason = "a key passed by value is a copy on a stack of 512 bytes"
)]
#![expect(
    clippy::needless_pass_by_value,
    reason = "the attribute macros of programs pass the context by value"
)]
#![expect(
    unreachable_pub,
    reason = "a program exports nothing: `pub` is what other modules may use"
)]

use aya_ebpf::{
    bindings::{__sk_buff, xdp_action::XDP_PASS},
    macros::{classifier, xdp},
    programs::{TcContext, XdpContext},
};
use underpass_ebpf::{
    ip::{Ip, V4, V6},
    packet::Load as _,
};

use crate::kernel::{
    ETHERNET,
    skb::Skb,
    verdict::{Step, Verdict, code},
    xdp::Frame,
};

mod bypass;
mod filter;
mod flow;
mod fragment;
mod hook;
mod icmp_error;
mod kernel;
mod model;
mod nat;
mod parse;
mod trace;

/// Of a packet that is none of our business.
const NOT_OURS: Step<Verdict> = Ok(Verdict::STACK);
const IPV4: u32 = V4::ETHER_TYPE as u32;
const IPV6: u32 = V6::ETHER_TYPE as u32;

/// Ingress of a host veth: what a pod sends.
#[classifier]
fn from_pod(ctx: TcContext) -> i32 {
    let ctx = ctx.skb.skb;
    if let Err(verdict) = hook::from_pod::enter(ctx) {
        return code(Err(verdict));
    }
    code(match protocol(ctx) {
        IPV4 => hook::from_pod::ip::<V4>(ctx),
        IPV6 => hook::from_pod::ip::<V6>(ctx),
        _ => hook::from_pod::other(ctx),
    })
}

/// Egress of a host veth: what the stack delivers to a pod.
#[classifier]
fn to_pod(ctx: TcContext) -> i32 {
    let ctx = ctx.skb.skb;
    code(match protocol(ctx) {
        IPV4 => hook::to_pod::ip::<V4>(ctx),
        IPV6 => hook::to_pod::ip::<V6>(ctx),
        _ => NOT_OURS,
    })
}

/// Ingress of an uplink: what the world sends.
#[classifier]
fn from_wire(ctx: TcContext) -> i32 {
    let ctx = ctx.skb.skb;
    if Skb::new(ctx).is_of_vlan() {
        return code(NOT_OURS);
    }
    code(match protocol(ctx) {
        IPV4 => hook::from_wire::ip::<V4, ETHERNET>(ctx),
        IPV6 => hook::from_wire::ip::<V6, ETHERNET>(ctx),
        _ => NOT_OURS,
    })
}

/// Egress of an uplink: what the stack, or the bypass, sends to the world.
#[classifier]
fn to_wire(ctx: TcContext) -> i32 {
    let ctx = ctx.skb.skb;
    if Skb::new(ctx).is_of_vlan() {
        return code(NOT_OURS);
    }
    code(match protocol(ctx) {
        IPV4 => hook::to_wire::ip::<V4>(ctx, ETHERNET),
        IPV6 => hook::to_wire::ip::<V6>(ctx, ETHERNET),
        _ => NOT_OURS,
    })
}

/// [`from_wire`] for an uplink without Ethernet headers.
#[classifier]
fn from_wire_l3(ctx: TcContext) -> i32 {
    let ctx = ctx.skb.skb;
    code(match protocol(ctx) {
        IPV4 => hook::from_wire::ip::<V4, 0>(ctx),
        IPV6 => hook::from_wire::ip::<V6, 0>(ctx),
        _ => NOT_OURS,
    })
}

/// [`to_wire`] for an uplink without Ethernet headers.
#[classifier]
fn to_wire_l3(ctx: TcContext) -> i32 {
    let ctx = ctx.skb.skb;
    code(match protocol(ctx) {
        IPV4 => hook::to_wire::without_ethernet::<V4>(ctx),
        IPV6 => hook::to_wire::without_ethernet::<V6>(ctx),
        _ => NOT_OURS,
    })
}

/// XDP of an uplink: what the world sends, before [`from_wire`] sees it.
#[xdp]
fn from_wire_xdp(ctx: XdpContext) -> u32 {
    let ctx = ctx.ctx;
    match Frame::new(ctx).load::<[u16; 1]>(ETHERNET - 2) {
        Ok([V4::ETHER_TYPE]) => hook::from_wire_xdp::ip::<V4>(ctx),
        Ok([V6::ETHER_TYPE]) => hook::from_wire_xdp::ip::<V6>(ctx),
        _ => XDP_PASS,
    }
}

/// Egress of the loopback device: what the host sends to itself.
#[classifier]
fn from_host(ctx: TcContext) -> i32 {
    let ctx = ctx.skb.skb;
    code(match protocol(ctx) {
        IPV4 => hook::from_host::ip::<V4>(ctx),
        IPV6 => hook::from_host::ip::<V6>(ctx),
        _ => NOT_OURS,
    })
}

/// Ethernet type, network order.
#[inline(always)]
fn protocol(ctx: *mut __sk_buff) -> u32 {
    // SAFETY: the context is valid while the program runs.
    unsafe { (*ctx).protocol }
}

/// The kernel gives the helpers that we need to GPL-compatible programs only.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Never compiled in: the verifier would refuse the endless loop.
    loop {}
}

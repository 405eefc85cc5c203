//! A program that is run once, before the others are loaded, and never attached: it finds out which flags the kernel's helpers know. A
//! kernel's version does not tell, since flags are carried back to older ones.

#![no_std]
#![no_main]
#![expect(
    clippy::needless_pass_by_value,
    reason = "the attribute macros of programs pass the context by value"
)]

use core::ptr;

use aya_ebpf::{
    bindings::{__sk_buff, bpf_fib_lookup as Lookup},
    helpers::generated::{bpf_fib_lookup, bpf_l4_csum_replace},
    macros::classifier,
    programs::TcContext,
};
use underpass_abi::node::{feature, flag};

/// What helpers answer to a flag that they do not know.
const EINVAL: i64 = -22;

/// The bits of [`feature`] that this kernel has. It is run on a packet of [`feature::PROBE_LENGTH`] bytes.
#[classifier]
fn probe(ctx: TcContext) -> i32 {
    let skb = ctx.skb.skb;
    let mut present = 0;
    if takes_source(skb) {
        present |= feature::FIB_SRC;
    }
    if takes_ipv6(skb) {
        present |= feature::CSUM_IPV6;
    }
    present.cast_signed()
}

/// Both helpers look at their flags first.
#[inline(always)]
fn takes_source(skb: *mut __sk_buff) -> bool {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "64 bytes"
    )]
    const LENGTH: i32 = size_of::<Lookup>() as i32;
    // SAFETY: a struct of integers, for which zeros are valid.
    let mut params: Lookup = unsafe { core::mem::zeroed() };
    // SAFETY: `params` lives until the helper returns, and has the length that is passed.
    let answer = unsafe {
        bpf_fib_lookup(
            skb.cast(),
            ptr::from_mut(&mut params),
            LENGTH,
            flag::BPF_FIB_LOOKUP_SRC,
        )
    };
    answer != EINVAL
}

#[inline(always)]
fn takes_ipv6(skb: *mut __sk_buff) -> bool {
    /// Anywhere inside the packet; nothing is added to what is there.
    const OFFSET: u32 = 50;
    // SAFETY: the helper checks the offset.
    let answer = unsafe { bpf_l4_csum_replace(skb, OFFSET, 0, 0, flag::BPF_F_IPV6) };
    answer != EINVAL
}

/// Helpers are for programs under such a licence only.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Never compiled in: the verifier would refuse the endless loop.
    loop {}
}

//! The whole packet as bytes: to keep it, to become another, to leave more than once.

use aya_ebpf::{
    EbpfContext as _,
    bindings::BPF_F_RECOMPUTE_CSUM,
    helpers::generated::{
        bpf_clone_redirect, bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_store_bytes,
    },
};

use super::Skb;

impl Skb {
    /// Copies the whole packet, and its length in bytes; false if it is longer than the buffer.
    #[inline(always)]
    pub fn copy_to<const N: usize>(&self, to: &mut [u8; N], length: &mut u32) -> bool {
        *length = self.len();
        let Some(len) = at_most::<N>(length) else {
            return false;
        };
        // SAFETY: the context is valid, the buffer has room for what is copied.
        let result =
            unsafe { bpf_skb_load_bytes(self.ctx.as_ptr(), 0, to.as_mut_ptr().cast(), len) };
        result == 0
    }

    /// Makes the packet another one, of the length behind `length`, in bytes. Not for GSO packets.
    #[inline(always)]
    pub fn become_frame<const N: usize>(&mut self, frame: &[u8; N], length: *const u32) -> bool {
        let Some(len) = at_most::<N>(length) else {
            return false;
        };
        // SAFETY: the context is valid, no memory is passed.
        if unsafe { bpf_skb_change_tail(self.raw(), len, 0) } != 0 {
            return false;
        }
        let Some(len) = at_most::<N>(length) else {
            return false;
        };
        let flags = u64::from(BPF_F_RECOMPUTE_CSUM);
        // SAFETY: the context is valid, the frame is as long as what is passed of it.
        let result =
            unsafe { bpf_skb_store_bytes(self.raw(), 0, frame.as_ptr().cast(), len, flags) };
        result == 0
    }

    /// Sends a copy out of a device, or in by it with `BPF_F_INGRESS`; false if there was no memory.
    #[inline(always)]
    pub fn clone_redirect(&mut self, ifindex: u32, flags: u64) -> bool {
        // SAFETY: the context is valid, no memory is passed.
        unsafe { bpf_clone_redirect(self.raw(), ifindex, flags) == 0 }
    }
}

/// A length in memory, if it is at least one and at most `N`, a power of two.
///
/// Read twice: the verifier knows the bounds of a number by what was done to it, and not by what was
/// asked about a copy of it, which is what the compiler makes of the comparison.
#[inline(always)]
fn at_most<const N: usize>(length: *const u32) -> Option<u32> {
    const { assert!(N.is_power_of_two()) };
    #[expect(clippy::cast_possible_truncation, reason = "no packet is so long")]
    let most = N as u32;
    // SAFETY: the caller's reference, or an entry of a map.
    let length = || unsafe { length.read_volatile() };
    if length().wrapping_sub(1) >= most {
        return None;
    }
    Some((length().wrapping_sub(1) & (most - 1)) + 1)
}

//! The packet as the kernel hands it to an XDP program: the frame alone. What the device knows of it,
//! checksums for one, is not to be had, and is lost when the frame is sent elsewhere.

use aya_ebpf::{
    bindings::{xdp_action::XDP_PASS, xdp_md},
    programs::XdpContext,
};
use underpass_abi::Plain;
use underpass_ebpf::{
    checksum::Delta,
    packet::{Covers, Load, Packet, Short, Zero},
};

use crate::kernel::{crc32c::crc32c_change, linear::Linear, maps::XDP_PODS};

/// A frame at an XDP hook.
pub struct Frame {
    ctx: XdpContext,
    bytes: Linear,
}

impl Frame {
    /// Wraps the context of a program.
    #[inline(always)]
    pub fn new(ctx: *mut xdp_md) -> Self {
        let ctx = XdpContext::new(ctx);
        let bytes = Linear {
            start: ctx.data(),
            end: ctx.data_end(),
        };
        Self { ctx, bytes }
    }

    /// Length in bytes from the Ethernet header on.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.bytes.end - self.bytes.start
    }

    /// Device that it arrived at.
    #[inline(always)]
    pub fn ifindex(&self) -> u32 {
        // SAFETY: the context is valid while the program runs.
        unsafe { (*self.ctx.ctx).ingress_ifindex }
    }
}

/// Sends the frame, as it is when the program ends, to the pod behind a host veth: an action,
/// `XDP_PASS` if that pod takes no frames.
#[inline(always)]
pub fn redirect_to_pod(ifindex: u32) -> u32 {
    XDP_PODS
        .redirect(ifindex, u64::from(XDP_PASS))
        .unwrap_or_else(|action| action)
}

impl Load for Frame {
    #[inline(always)]
    fn load<T: Plain>(&self, offset: u32) -> Result<T, Short> {
        self.bytes.load(offset)
    }
}

impl Packet for Frame {
    #[inline(always)]
    fn store<T: Plain>(&mut self, offset: u32, value: &T) -> Result<(), Short> {
        self.bytes.store(offset, value)
    }

    #[inline(always)]
    fn replace_l4_checksum(
        &mut self,
        offset: u32,
        delta: Delta,
        _covers: Covers,
        zero: Zero,
    ) -> Result<(), Short> {
        let [before]: [u16; 1] = self.load(offset)?;
        if zero == Zero::IsAbsent && before == 0 {
            return Ok(());
        }
        let after = match delta.apply(before) {
            0 if zero == Zero::IsAbsent => u16::MAX,
            sum => sum,
        };
        self.store(offset, &[after])
    }

    #[inline(always)]
    fn crc32c_change(&self, word: u32, length: u32) -> u32 {
        crc32c_change(word, length)
    }

    #[inline(always)]
    fn account(&mut self, _delta: Delta) {}
}

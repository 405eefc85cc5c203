//! The packet as the kernel hands it to a tc program.

use core::{mem::MaybeUninit, ptr};

use aya_ebpf::{
    EbpfContext,
    bindings::{
        __sk_buff, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, bpf_hdr_start_off::BPF_HDR_START_NET,
    },
    helpers::generated::{
        bpf_csum_update, bpf_l4_csum_replace, bpf_set_hash, bpf_skb_change_type,
        bpf_skb_load_bytes, bpf_skb_load_bytes_relative, bpf_skb_pull_data, bpf_skb_store_bytes,
    },
    programs::TcContext,
};
use underpass_abi::{
    Plain,
    node::{feature, flag::BPF_F_IPV6},
};
use underpass_ebpf::{
    checksum::Delta,
    packet::{Covers, Load, Packet, Short, Zero},
};

use crate::kernel::{crc32c::crc32c_change, linear::Linear, maps::constant};

mod frame;
mod mark;
mod redirect;
mod tag;

pub use redirect::SENT;

/// `skb->pkt_type` of a packet whose Ethernet destination is this host.
const PACKET_HOST: u32 = 0;
/// A packet at a tc hook.
pub struct Skb {
    ctx: TcContext,
}

impl Skb {
    /// Wraps the context of a program.
    #[inline(always)]
    pub const fn new(ctx: *mut __sk_buff) -> Self {
        Self {
            ctx: TcContext::new(ctx),
        }
    }

    /// The context itself, to pass it to another function.
    #[inline(always)]
    pub const fn raw(&self) -> *mut __sk_buff {
        self.ctx.skb.skb
    }

    /// Length in bytes from the link-layer header on; of a GSO packet all segments together.
    #[inline(always)]
    pub fn len(&self) -> u32 {
        self.ctx.len()
    }

    /// Ethernet type, network order.
    #[inline(always)]
    pub fn protocol(&self) -> u32 {
        // SAFETY: the context is valid while the program runs. The same holds for all field
        // accesses below.
        unsafe { (*self.raw()).protocol }
    }

    /// Device of this hook.
    #[inline(always)]
    pub fn ifindex(&self) -> u32 {
        // SAFETY: see `protocol`.
        unsafe { (*self.raw()).ifindex }
    }

    /// Device that the packet arrived at; 0 if this host made it.
    #[inline(always)]
    pub fn ingress_ifindex(&self) -> u32 {
        // SAFETY: see `protocol`.
        unsafe { (*self.raw()).ingress_ifindex }
    }

    /// The fingerprint, or what else `skb->hash` holds.
    #[inline(always)]
    pub fn hash(&self) -> u32 {
        // SAFETY: see `protocol`.
        unsafe { (*self.raw()).hash }
    }

    /// Leaves a fingerprint.
    #[inline(always)]
    pub fn set_hash(&mut self, hash: u32) {
        // SAFETY: the context is valid.
        unsafe { bpf_set_hash(self.raw(), hash) };
    }

    /// Whether the Ethernet destination is this host.
    #[inline(always)]
    pub fn is_for_host(&self) -> bool {
        // SAFETY: see `protocol`.
        unsafe { (*self.raw()).pkt_type == PACKET_HOST }
    }

    /// Makes a packet whose Ethernet destination is another device of this host one for this host.
    #[inline(always)]
    pub fn take_for_host(&mut self) {
        // Fails for types that no packet of a pod has.
        // SAFETY: the context is valid, no memory is passed.
        unsafe { bpf_skb_change_type(self.raw(), PACKET_HOST) };
    }

    /// Length of the largest packet on the wire, headers of `headers` bytes (network and transport)
    /// included: for a GSO packet its segments.
    #[inline(always)]
    pub fn wire_length(&self, l3: u32, headers: u32) -> u32 {
        // SAFETY: see `protocol`.
        let segment = unsafe { (*self.raw()).gso_size };
        if segment == 0 {
            self.len() - l3
        } else {
            segment + headers
        }
    }

    /// What lies in one piece of the packet, from its start on: at least its first `wanted` bytes, if
    /// it has so many. A few drivers keep nothing there, so the bytes are fetched. GSO packets have their headers there in any case,
    /// and no more must be fetched: of SCTP, the receiver's kernel believes each segment to be where its sender put it, and panics
    /// where a byte was moved.
    #[inline(always)]
    pub fn linear(&mut self, wanted: u32) -> Linear {
        // SAFETY: see `protocol`.
        let is_whole = unsafe { (*self.raw()).gso_size } == 0;
        if self.ctx.data() + wanted as usize > self.ctx.data_end()
            && self.len() >= wanted
            && is_whole
        {
            // Should it fail, there is less than was wanted.
            // SAFETY: the context is valid, no memory is passed.
            unsafe { bpf_skb_pull_data(self.raw(), wanted) };
        }
        Linear {
            start: self.ctx.data(),
            end: self.ctx.data_end(),
        }
    }

    /// Overwrites the Ethernet header, which is given in words, and the network header after it.
    #[inline(always)]
    pub fn store_headers<H: Plain>(&mut self, ethernet: [u16; 7], network: H) -> Result<(), Short> {
        /// Both in one piece, the network header aligned.
        #[repr(C)]
        struct Headers<H> {
            padding: u16,
            ethernet: [u16; 7],
            network: H,
        }
        let headers = Headers {
            padding: 0,
            ethernet,
            network,
        };
        // SAFETY: from the Ethernet header on, the struct has no padding and the size that is
        // passed: 14 bytes, at an even offset, end at a multiple of any header's alignment.
        let result = unsafe {
            bpf_skb_store_bytes(
                self.raw(),
                0,
                ptr::from_ref(&headers).cast::<u16>().add(1).cast(),
                size::<[u16; 7]>() + size::<H>(),
                0,
            )
        };
        if result == 0 { Ok(()) } else { Err(Short) }
    }

    /// Ethernet source, if it lies where every driver puts it.
    #[inline(always)]
    pub fn ethernet_source(&self) -> Option<[u16; 3]> {
        let data = self.ctx.data();
        if data + 14 > self.ctx.data_end() {
            return None;
        }
        // SAFETY: the verifier holds us to the check above; packet data may be read at any
        // alignment of two.
        Some(unsafe { *((data + 6) as *const [u16; 3]) })
    }
}

/// The size of a type as helpers want it.
#[inline(always)]
pub const fn size<T>() -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "nothing here is larger than a stack of 512 bytes"
    )]
    let size = size_of::<T>() as u32;
    size
}

impl Skb {
    /// Loads the network header, if it is elsewhere than where the packet begins. Nothing, where it is not in the linear part: no device is known
    /// that has headers of its own then. Needs Linux 4.18 (`bpf_skb_load_bytes_relative`).
    #[inline(always)]
    pub fn hidden_network_header<T: Plain>(&self) -> Option<T> {
        // As many bytes as no header of another's has in common: of IPv4 the length, the checksum and the source are among them, of IPv6 the
        // length.
        let begin: [u64; 2] = self.load(0).ok()?;
        let begin_of_network: [u64; 2] = self.load_from_network()?;
        if begin == begin_of_network {
            return None;
        }
        self.load_from_network()
    }

    /// Loads what is at the beginning of the network header.
    #[inline(always)]
    fn load_from_network<T: Plain>(&self) -> Option<T> {
        let mut value = MaybeUninit::<T>::uninit();
        // SAFETY: the buffer has the size that is passed; the helper fills all of it or fails.
        let result = unsafe {
            bpf_skb_load_bytes_relative(
                self.ctx.as_ptr(),
                0,
                value.as_mut_ptr().cast(),
                size::<T>(),
                BPF_HDR_START_NET,
            )
        };
        // SAFETY: filled, and any bytes are a valid `T`.
        (result == 0).then(|| unsafe { value.assume_init() })
    }
}

impl Load for Skb {
    #[inline(always)]
    fn load<T: Plain>(&self, offset: u32) -> Result<T, Short> {
        let mut value = MaybeUninit::<T>::uninit();
        // SAFETY: the buffer has the size that is passed; the helper fills all of it or fails.
        let result = unsafe {
            bpf_skb_load_bytes(
                self.ctx.as_ptr(),
                offset,
                value.as_mut_ptr().cast(),
                size::<T>(),
            )
        };
        if result != 0 {
            return Err(Short);
        }
        // SAFETY: filled, and any bytes are a valid `T`.
        Ok(unsafe { value.assume_init() })
    }
}

impl Packet for Skb {
    #[inline(always)]
    fn store<T: Plain>(&mut self, offset: u32, value: &T) -> Result<(), Short> {
        // SAFETY: the value has the size that is passed and no padding.
        let result = unsafe {
            bpf_skb_store_bytes(
                self.raw(),
                offset,
                ptr::from_ref(value).cast(),
                size::<T>(),
                0,
            )
        };
        if result == 0 { Ok(()) } else { Err(Short) }
    }

    #[inline(always)]
    fn replace_l4_checksum(
        &mut self,
        offset: u32,
        delta: Delta,
        covers: Covers,
        zero: Zero,
    ) -> Result<(), Short> {
        let mut flags = match zero {
            Zero::IsAbsent => u64::from(BPF_F_MARK_MANGLED_0),
            Zero::IsSum => 0,
        };
        let has_flag = constant!(features) & feature::CSUM_IPV6 != 0;
        match covers {
            Covers::Payload => {}
            Covers::Pseudo6 if has_flag => flags |= u64::from(BPF_F_PSEUDO_HDR) | BPF_F_IPV6,
            Covers::Pseudo4 | Covers::Pseudo6 => flags |= u64::from(BPF_F_PSEUDO_HDR),
        }
        // Size 0 in the flags: the difference itself is passed.
        // SAFETY: the context is valid, no memory is passed.
        let result =
            unsafe { bpf_l4_csum_replace(self.raw(), offset, 0, u64::from(delta.wsum()), flags) };
        if covers == Covers::Pseudo6 && !has_flag {
            // Kernels without the flag take the change off a device's sum over the whole packet, as
            // if IPv6 had a header checksum.
            self.account(delta);
        }
        if result == 0 { Ok(()) } else { Err(Short) }
    }

    #[inline(always)]
    fn crc32c_change(&self, word: u32, length: u32) -> u32 {
        crc32c_change(word, length)
    }

    #[inline(always)]
    fn account(&mut self, delta: Delta) {
        // Fails, and need not do anything, where the device delivered no such sum.
        // SAFETY: the context is valid, no memory is passed.
        unsafe { bpf_csum_update(self.raw(), delta.wsum()) };
    }
}

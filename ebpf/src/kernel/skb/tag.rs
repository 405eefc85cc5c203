//! VLAN tags: beside the packet, where the kernel keeps them, or still in front of its network header.

use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_skb_vlan_pop};
use underpass_ebpf::packet::Load as _;

use super::Skb;
use crate::kernel::ETHERNET;

/// Ethernet types of 802.1Q and 802.1ad, network order.
const CUSTOMER: u32 = 0x8100u16.to_be() as u32;
const PROVIDER: u32 = 0x88a8u16.to_be() as u32;
/// The identifier is the lower 12 bits of a tag; above it is the priority.
const IDENTIFIER: u32 = 0xfff;

impl Skb {
    /// Whether the packet belongs to a VLAN, not to this device: the kernel keeps the tag beside it, and
    /// the VLAN's own device has programs of its own.
    #[inline(always)]
    pub fn is_of_vlan(&self) -> bool {
        let (is_beside, tag) = self.tag_beside();
        // Priority tags (0) belong to the device.
        is_beside && tag & IDENTIFIER != 0
    }

    /// Whether the packet has a VLAN tag, a mere priority (identifier 0) included. What a pod sends by a netkit has it in the frame still.
    #[inline(always)]
    pub fn has_tag(&self) -> bool {
        let (is_beside, _) = self.tag_beside();
        is_beside || matches!(self.protocol(), CUSTOMER | PROVIDER)
    }

    /// Whether the tag of a packet that has one says a priority alone.
    #[inline(always)]
    pub fn has_priority_alone(&self) -> bool {
        let (is_beside, mut tag) = self.tag_beside();
        if !is_beside {
            let in_frame = self.load::<u16>(ETHERNET);
            tag = in_frame.map_or(IDENTIFIER, |tag| u16::from_be(tag).into());
        }
        tag & IDENTIFIER == 0
    }

    /// Takes the tag off. False if that can't be done, or if there is another one behind it.
    #[inline(always)]
    pub fn take_tag_off(&mut self) -> bool {
        // SAFETY: the context is valid, no memory is passed.
        (unsafe { bpf_skb_vlan_pop(self.raw()) }) == 0 && !self.has_tag()
    }

    /// Whether there is a tag beside the packet, and that.
    #[inline(always)]
    fn tag_beside(&self) -> (bool, u32) {
        let ctx: *mut __sk_buff = self.raw();
        // SAFETY: see `protocol`.
        unsafe { ((*ctx).vlan_present != 0, (*ctx).vlan_tci) }
    }
}

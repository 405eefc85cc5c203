//! What our programs tell each other of a packet, by `skb->tc_index`: who has seen it, and where it came from.

use super::Skb;

/// `skb->tc_index` of a packet that the bypass puts onto an uplink, or that the program at the port of a bridge has translated: the
/// next program must not look at it again.
const BYPASSED: u32 = 0x7550;
/// `skb->tc_index` of a packet that returns to a process of this host: `from_host` finishes it.
pub(super) const RETURNING: u32 = 0x7551;

/// `skb->tc_index` of a first fragment that was sent through the same hook again, with those that
/// waited for it right behind.
const AGAIN: u32 = 0x7552;

/// `skb->tc_index` of a packet that a bridge receives again: it was translated.
pub(super) const RECEIVED_AGAIN: u32 = 0x7553;

/// `skb->tc_index` of a packet of a container that is masqueraded, in the stack.
const MASQUERADED: u32 = 0x7554;

/// `skb->tc_index` of a packet of a container without bypass that went straight into the stack, with the sum of its tuple in `skb->hash`.
const STRAIGHT: u32 = 0x7555;

/// The same of a container that is masqueraded.
const MASQUERADED_STRAIGHT: u32 = 0x7556;

/// Bit of `skb->tc_index` of a packet that was for none of the pods when it came, whose number the lower bits are.
const NUMBERED: u32 = 0x2000;

/// Bit of `skb->tc_index` of a packet that came in by an uplink in a VRF, whose ifindex the lower bits are: to the kernel it comes
/// from the device of the VRF.
const ARRIVED: u32 = 0x8000;

impl Skb {
    /// Whether the bypass sent this packet here, or the program at a port of this bridge has translated it.
    #[inline(always)]
    pub fn is_bypassed(&self) -> bool {
        self.has_mark(BYPASSED)
    }

    /// Whether [`Self::receive_again`] sent this packet here.
    #[inline(always)]
    pub fn is_received_again(&self) -> bool {
        self.has_mark(RECEIVED_AGAIN)
    }

    /// Whether a pod's program sent this packet back to the host.
    #[inline(always)]
    pub fn is_returning(&self) -> bool {
        self.has_mark(RETURNING)
    }

    /// Whether this first fragment was sent through this hook again.
    #[inline(always)]
    pub fn is_again(&self) -> bool {
        self.has_mark(AGAIN)
    }

    /// See [`Self::is_again`].
    #[inline(always)]
    pub fn mark_again(&mut self) {
        self.mark(AGAIN);
    }

    /// Notes the device of this hook for [`Self::arrival`]. One with a larger number than fits stays unknown.
    #[inline(always)]
    pub fn mark_arrival(&mut self) {
        let ifindex = self.ifindex();
        if ifindex < ARRIVED {
            self.mark(ARRIVED | ifindex);
        }
    }

    /// Device that the packet came in by, also if that is in a VRF; 0 if this host made it.
    #[inline(always)]
    pub fn arrival(&self) -> u32 {
        // SAFETY: see `Skb::protocol`.
        let mark = unsafe { (*self.raw()).tc_index };
        if mark & ARRIVED == 0 {
            self.ingress_ifindex()
        } else {
            mark & !ARRIVED
        }
    }

    /// Gives the packet a number, of which the lowest 13 bits count.
    #[inline(always)]
    pub fn set_number(&mut self, number: u32) -> u32 {
        let mark = NUMBERED | number & (NUMBERED - 1);
        self.mark(mark);
        mark
    }

    /// What [`Self::set_number`] has returned; nothing if the packet has no number.
    #[inline(always)]
    pub fn number(&self) -> Option<u32> {
        // SAFETY: see `Skb::protocol`.
        let mark = unsafe { (*self.raw()).tc_index };
        (mark & !(NUMBERED - 1) == NUMBERED).then_some(mark)
    }

    /// Keeps the next program that meets this packet from looking at it.
    #[inline(always)]
    pub fn mark_bypassed(&mut self) {
        self.mark(BYPASSED);
    }

    /// Notes that the packet is of a container that is masqueraded.
    #[inline(always)]
    pub fn mark_masqueraded(&mut self) {
        self.mark(MASQUERADED);
    }

    /// Tells whether the packet is noted as one of a container that is masqueraded.
    #[inline(always)]
    pub fn is_masqueraded(&self) -> bool {
        self.has_mark(MASQUERADED) || self.has_mark(MASQUERADED_STRAIGHT)
    }

    /// Notes that the packet goes straight into the stack, and whether it is of a container that is masqueraded.
    #[inline(always)]
    pub fn mark_straight(&mut self, is_masqueraded: bool) {
        self.mark(if is_masqueraded {
            MASQUERADED_STRAIGHT
        } else {
            STRAIGHT
        });
    }

    /// Tells whether [`Self::mark_straight`] has noted that.
    #[inline(always)]
    pub fn is_straight(&self) -> bool {
        self.has_mark(STRAIGHT) || self.has_mark(MASQUERADED_STRAIGHT)
    }

    /// Forgets what a pod's own traffic control, or a program, may have left in `skb->tc_index`.
    #[inline(always)]
    pub fn unmark(&mut self) {
        self.mark(0);
    }

    #[inline(always)]
    fn has_mark(&self, what: u32) -> bool {
        // SAFETY: see `Skb::protocol`.
        unsafe { (*self.raw()).tc_index == what }
    }

    #[inline(always)]
    pub(super) fn mark(&mut self, what: u32) {
        // SAFETY: see `Skb::protocol`; the field is writable for tc programs.
        unsafe { (*self.raw()).tc_index = what };
    }
}

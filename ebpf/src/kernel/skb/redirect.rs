//! Ways past the stack.

use core::ptr;

use aya_ebpf::{
    bindings::{BPF_F_INGRESS, bpf_redir_neigh},
    helpers::generated::{bpf_redirect, bpf_redirect_neigh, bpf_redirect_peer},
};
use underpass_abi::{
    counter::Counter,
    endpoint::{LOOPBACK, device as flags},
    flow::Half,
};
use underpass_ebpf::packet::Packet as _;

use super::{
    Skb,
    mark::{RECEIVED_AGAIN, RETURNING},
    size,
};
use crate::kernel::{
    maps::device,
    verdict::{Step, Verdict},
};

/// Where packets come from that can't be put past the device of a pod, only be sent by it. What a netkit sends was not received yet. What a bridge receives
/// brings along what the node's connection tracking knows of it, since a port of it, into the pod's (until c43272299488, 6.15; a device that sends forgets it).
pub const SENT: u32 = flags::NETKIT | flags::BRIDGE;

impl Skb {
    /// Into the pod behind a host veth or a netkit primary, past the stack. A wrong device would
    /// swallow the packet without a word (5.10), and so does any device where the packet is not being
    /// received (netkit).
    #[inline(always)]
    pub fn redirect_peer(&mut self, ifindex: u32) -> Verdict {
        self.ctx.set_mark(0);
        // SAFETY: no memory is passed.
        sent(unsafe { bpf_redirect_peer(ifindex, 0) })
    }

    /// Out of a device, with the Ethernet header that the packet has.
    #[inline(always)]
    pub fn redirect(&mut self, ifindex: u32) -> Verdict {
        self.mark_bypassed();
        // SAFETY: no memory is passed.
        sent(unsafe { bpf_redirect(ifindex, 0) })
    }

    /// Out of a device; the kernel finds the Ethernet addresses of the next hop.
    #[inline(always)]
    pub fn redirect_neighbour(&mut self, ifindex: u32, next_hop: &mut bpf_redir_neigh) -> Verdict {
        self.mark_bypassed();
        // SAFETY: the next hop is a valid struct of the size that is passed.
        sent(unsafe {
            bpf_redirect_neigh(
                ifindex,
                next_hop,
                size::<bpf_redir_neigh>().cast_signed(),
                0,
            )
        })
    }

    /// Out of a device, with the route that its destination has there: a look-up for each packet.
    #[inline(always)]
    pub fn redirect_by_route(&mut self, ifindex: u32) -> Verdict {
        self.mark_bypassed();
        by_route(ifindex)
    }

    /// Out of the loopback device, with the local route of its destination: the host takes such a
    /// packet as one of its own, and looks for no route when it comes in.
    #[inline(always)]
    pub fn redirect_loopback(&mut self) -> Verdict {
        self.mark(RETURNING);
        by_route(LOOPBACK)
    }

    /// Received once more by the device of this hook. What connection tracking knows of it the kernel forgets on the way
    /// (`skb_scrub_packet`, 5.10 to 6.18).
    #[inline(always)]
    pub fn receive_again(&mut self) -> Verdict {
        self.mark(RECEIVED_AGAIN);
        // SAFETY: no memory is passed.
        sent(unsafe { bpf_redirect(self.ifindex(), BPF_F_INGRESS.into()) })
    }

    /// Whether the device of this hook is an uplink that is a bridge. There connection tracking has seen the packet at a port already, and the kernel does
    /// not ask it again when somebody has translated it since (`ip_sabotage_in` in `br_netfilter_hooks.c`, 5.10 to 6.18).
    #[inline(always)]
    pub fn is_at_bridge(&self) -> bool {
        device(self.ifindex()).is_some_and(|here| here.flags & flags::BRIDGE != 0)
    }

    /// Into the pod that a direction leads to, from the hook where the packet is.
    #[inline(always)]
    pub fn deliver<A>(&mut self, half: &Half<A>) -> Step<Verdict> {
        self.store(0, &half.eth)
            .map_err(|_| Verdict::dropped(Counter::DropMalformed))?;
        let is_sent = device(self.ifindex()).is_some_and(|here| here.flags & SENT != 0);
        Ok(if is_sent {
            self.redirect(half.out_ifindex)
        } else {
            self.redirect_peer(half.out_ifindex)
        })
    }
}

/// Out of a device; without a next hop the kernel looks for the packet's route there.
#[inline(always)]
fn by_route(ifindex: u32) -> Verdict {
    // SAFETY: no memory is passed.
    sent(unsafe { bpf_redirect_neigh(ifindex, ptr::null_mut(), 0, 0) })
}

/// What a redirect helper said: a return code of tc, in a register's width.
#[inline(always)]
fn sent(code: i64) -> Verdict {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a return code of tc"
    )]
    let code = code as u32;
    Verdict::sent(code)
}

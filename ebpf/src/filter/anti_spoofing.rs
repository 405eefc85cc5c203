//! What a pod may send: its own addresses, whichever of its interfaces has them, the MAC of this
//! interface, and nothing that only routers, servers of the network or ends of the node's tunnels send.

use core::num::NonZeroU32;

use underpass_abi::{
    addr::Addr4,
    counter::Counter,
    endpoint::{Device, device},
    flow::protocol,
};
use underpass_ebpf::{
    ip::{Head, Piece},
    l4::Kind,
    packet::Load as _,
};

use crate::{
    filter::tunnel,
    kernel::{
        ETHERNET, container,
        net::Net,
        skb::Skb,
        verdict::{Step, Verdict},
    },
};

const ICMP_REDIRECT: u8 = 5;
const ICMPV6_ROUTER_ADVERTISEMENT: u8 = 134;
const ICMPV6_REDIRECT: u8 = 137;
/// Ethernet type, network order.
const ARP: u16 = 0x0806u16.to_be();
/// DHCP and `DHCPv6` servers' ports, network order.
const DHCP_SERVER: u16 = 67u16.to_be();
const DHCPV6_SERVER: u16 = 547u16.to_be();

/// Drops what a pod has no business to send. `owner` is the host veth of its container that the source
/// address is of, if it is the container's.
#[inline(always)]
pub fn check<I: Net>(
    skb: &Skb,
    head: &Head<I>,
    pod: &Device,
    owner: Option<NonZeroU32>,
) -> Step<()> {
    check_mac(skb, pod)?;
    if pod.flags & device::ANTI_SPOOF == 0 {
        return Ok(());
    }
    if owner.is_none() && !I::is_local_scope(head.tuple.src) {
        return Err(Verdict::dropped(Counter::DropSourceAddress));
    }
    if head.tuple.protocol == I::ICMP {
        match (head.tuple.protocol, head.icmp_type) {
            (protocol::ICMP, ICMP_REDIRECT) | (protocol::ICMPV6, ICMPV6_REDIRECT) => {
                return Err(Verdict::dropped(Counter::DropRedirect));
            }
            (protocol::ICMPV6, ICMPV6_ROUTER_ADVERTISEMENT) => {
                return Err(Verdict::dropped(Counter::DropRouterAdvertisement));
            }
            _ => {}
        }
    }
    if head.kind == Kind::Flow && is_dhcp(head.tuple.protocol, head.tuple.sport) {
        return Err(Verdict::dropped(Counter::DropDhcpServer));
    }
    // A chain of extension headers so long that we did not reach its end could hide any of the
    // above.
    if head.kind == Kind::Other
        && head.piece != Piece::Later
        && is_extension::<I>(head.tuple.protocol)
    {
        return Err(Verdict::dropped(Counter::DropMalformed));
    }
    tunnel::check(head, pod)
}

/// Whether this is the port of a DHCP server. What such a port is asked is not learned: the answer
/// would take the bypass, past the checks.
#[inline(always)]
pub fn is_dhcp(protocol: u8, port: u16) -> bool {
    protocol == protocol::UDP && (port == DHCP_SERVER || port == DHCPV6_SERVER)
}

/// Drops a frame whose Ethernet source is not the pod's.
#[inline(always)]
pub fn check_mac(skb: &Skb, pod: &Device) -> Step<()> {
    if pod.flags & device::CHECK_MAC == 0 {
        return Ok(());
    }
    match skb.ethernet_source() {
        Some(source) if same_mac(source, pod.peer_mac) => Ok(()),
        _ => Err(Verdict::dropped(Counter::DropSourceMac)),
    }
}

/// Drops ARP in another's name: sender addresses must be the pod's own (or none yet).
#[inline(always)]
pub fn check_arp(skb: &Skb, pod: &Device) -> Step<()> {
    check_mac(skb, pod)?;
    if pod.flags & device::ANTI_SPOOF == 0 {
        return Ok(());
    }
    // Sender's hardware and protocol address at bytes 8 and 14 of an Ethernet/IPv4 ARP packet (RFC
    // 826).
    let refused = Verdict::dropped(Counter::DropArp);
    // From a netkit before Linux 6.10 the type that we were called for is what the sender says beside the
    // frame, and the stack goes by the frame (torvalds/linux@3998d184267d).
    if skb.load::<u16>(ETHERNET - 2).map_err(|_| refused)? != ARP {
        return Err(Verdict::dropped(Counter::DropEtherType));
    }
    let mac: [u16; 3] = skb.load(ETHERNET + 8).map_err(|_| refused)?;
    let addr = Addr4(skb.load(ETHERNET + 14).map_err(|_| refused)?);
    let owned = addr.0 == 0 || container::owns(skb.ifindex(), addr.widen());
    let is_own = pod.flags & device::CHECK_MAC == 0 || same_mac(mac, pod.peer_mac);
    if owned && is_own {
        Ok(())
    } else {
        Err(refused)
    }
}

/// Compares a MAC as read from a packet with one from a map, without a call to `memcmp`.
#[inline(always)]
pub fn same_mac(packet: [u16; 3], known: [u8; 6]) -> bool {
    let word = |at: usize| u16::from_ne_bytes([known[at], known[at + 1]]);
    (packet[0] ^ word(0)) | (packet[1] ^ word(2)) | (packet[2] ^ word(4)) == 0
}

#[inline(always)]
fn is_extension<I: Net>(protocol: u8) -> bool {
    I::ICMP == protocol::ICMPV6 && matches!(protocol, 0 | 43 | 44 | 51 | 60)
}

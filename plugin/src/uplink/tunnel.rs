//! The tunnels that the node is an end of, whoever made them, and what packets they come in.

use std::collections::BTreeSet;

use tracing::warn;
use underpass_abi::{flow::protocol, node::Tunnels};
use underpass_netlink::link::{InfoKind, Link};

/// Protocols of IP whose packets are packets of IP, or of others, with nothing between that proves who sent them.
const IPV4_IN_IP: u8 = 4;
const IPV6_IN_IP: u8 = 41;
const GRE: u8 = 47;

/// Lists the packets that the ends of tunnels on this node take others out of. Devices that are down take none. (`WireGuard` and `IPsec`
/// are not among them: they know whom their packets come from.)
pub(super) fn tunnels(links: &[Link]) -> Tunnels {
    let packets: BTreeSet<u32> = links
        .iter()
        .filter(|link| link.up)
        .flat_map(packets)
        .collect();
    let mut tunnels = Tunnels::default();
    if packets.len() > tunnels.packets.len() {
        warn!(
            "the node is an end of {} kinds of tunnels, and containers are kept out of {} of them",
            packets.len(),
            tunnels.packets.len()
        );
    }
    for (slot, packet) in tunnels.packets.iter_mut().zip(packets) {
        *slot = packet;
    }
    tunnels
}

fn packets(link: &Link) -> Vec<u32> {
    let Some(kind) = &link.kind else {
        return Vec::new();
    };
    if is_datagrams(kind) {
        let port = link.port.filter(|port| *port != 0);
        return port
            .map(|port| Tunnels::packet(protocol::UDP, port.to_be()))
            .into_iter()
            .collect();
    }
    let protocols = protocols(kind).iter();
    protocols
        .map(|protocol| Tunnels::packet(*protocol, 0))
        .collect()
}

/// Tells whether a device of this kind puts packets into datagrams.
pub(super) const fn is_datagrams(kind: &InfoKind) -> bool {
    matches!(kind, InfoKind::Vxlan | InfoKind::Geneve)
}

/// Tells whether what a device of this kind has on its other end is reached through other devices.
pub(super) fn is_tunnel(kind: &InfoKind) -> bool {
    let is_other = matches!(
        kind,
        InfoKind::Wireguard | InfoKind::Vti | InfoKind::Vti6 | InfoKind::Xfrm
    );
    is_other || is_datagrams(kind) || !protocols(kind).is_empty()
}

fn protocols(kind: &InfoKind) -> &'static [u8] {
    match kind {
        InfoKind::IpIp => &[IPV4_IN_IP],
        InfoKind::SitTun | InfoKind::Ip6Tnl => &[IPV4_IN_IP, IPV6_IN_IP],
        InfoKind::GreTun
        | InfoKind::GreTun6
        | InfoKind::GreTap
        | InfoKind::GreTap6
        | InfoKind::ErSpan
        | InfoKind::Ip6ErSpan => &[GRE],
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(kind: InfoKind, port: Option<u16>) -> Link {
        Link {
            up: true,
            kind: Some(kind),
            port,
            ..Link::default()
        }
    }

    #[test]
    fn each_kind_is_there_once() {
        let down = Link {
            up: false,
            ..link(InfoKind::SitTun, None)
        };
        let links = [
            link(InfoKind::Vxlan, Some(4789)),
            link(InfoKind::Vxlan, Some(4789)),
            link(InfoKind::Geneve, Some(6081)),
            link(InfoKind::GreTap, None),
            link(InfoKind::GreTun6, None),
            link(InfoKind::Veth, None),
            Link::default(),
            down,
        ];
        let udp = |port: u16| Tunnels::packet(17, port.to_be());
        let mut wanted = [udp(4789), udp(6081), Tunnels::packet(47, 0)];
        wanted.sort_unstable();
        let found = tunnels(&links).packets;
        assert_eq!(found[..3], wanted);
        assert_eq!(found[3..], [0; Tunnels::MAX - 3]);
    }

    #[test]
    fn as_many_as_there_is_room_for_are_known() {
        let links: Vec<Link> = (1..=20)
            .map(|port| link(InfoKind::Vxlan, Some(port)))
            .collect();
        let found = tunnels(&links).packets;
        assert!(found.iter().all(|packet| *packet != 0), "{found:?}");
    }

    #[test]
    fn ip_in_ip_may_be_of_either_family() {
        let found = tunnels(&[link(InfoKind::Ip6Tnl, None)]).packets;
        assert_eq!(found[..3], [4 << 16, 41 << 16, 0]);
    }
}

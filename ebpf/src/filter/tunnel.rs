//! What a pod may send of a tunnel that its node is an end of: nothing, wherever it goes. An end believes
//! whoever reaches it: a pod that does could put any packet into the network of all pods, from any
//! source. And an end has more addresses than a route tells: those of the tunnel's own device are
//! reached through the tunnel.

use underpass_abi::{counter::Counter, endpoint::Device, flow::protocol, node::Tunnels};
use underpass_ebpf::{ip::Head, l4::Kind};

use crate::kernel::{
    maps::is_tunnel,
    net::Net,
    verdict::{Step, Verdict},
};

/// Drops such a packet of this pod.
#[inline(always)]
pub fn check<I: Net>(head: &Head<I>, pod: &Device) -> Step<()> {
    let tuple = &head.tuple;
    let port = match (tuple.protocol, head.kind) {
        (protocol::UDP, Kind::Flow) => tuple.dport,
        (protocol::UDP | protocol::TCP, _) => return Ok(()),
        _ => 0,
    };
    if is_closed(Some(pod), tuple.protocol, port) {
        return Err(Verdict::dropped(Counter::DropTunnel));
    }
    Ok(())
}

/// Whether packets of this protocol, to this port (network order; 0 if it has none), are no business of this pod's: those of a tunnel
/// that there is, and of the one that its network knows.
#[inline(always)]
pub fn is_closed(pod: Option<&Device>, protocol: u8, port: u16) -> bool {
    let named = pod.map_or(0, |pod| pod.tunnel_port);
    protocol == protocol::UDP && named != 0 && named == port
        || is_tunnel(Tunnels::packet(protocol, port))
}

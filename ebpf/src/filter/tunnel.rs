//! What a pod may send of a tunnel that its node is an end of: nothing, wherever it goes. An end believes
//! whoever reaches it: a pod that does could put any packet into the network of all pods, from any
//! source. And an end has more addresses than a route tells: those of the tunnel's own device are
//! reached through the tunnel.

use underpass_abi::{counter::Counter, flow::protocol, node::Tunnels};
use underpass_ebpf::{ip::Head, l4::Kind};

use crate::kernel::{
    maps::is_tunnel,
    net::Net,
    verdict::{Step, Verdict},
};

/// Drops such a packet.
#[inline(always)]
pub fn check<I: Net>(head: &Head<I>) -> Step<()> {
    let tuple = &head.tuple;
    let port = match (tuple.protocol, head.kind) {
        (protocol::UDP, Kind::Flow) => tuple.dport,
        (protocol::UDP | protocol::TCP, _) => return Ok(()),
        _ => 0,
    };
    if is_tunnel(Tunnels::packet(tuple.protocol, port)) {
        return Err(Verdict::dropped(Counter::DropTunnel));
    }
    Ok(())
}

//! What a pod may send of a tunnel that its node is an end of: nothing, but to other pods. An end believes
//! whoever reaches it: a pod that does could put any packet into the network of all pods, from any source.

use aya_ebpf::bindings::__sk_buff;
use underpass_abi::{counter::Counter, endpoint::device as flags, flow::protocol, node::Tunnels};
use underpass_ebpf::l4::Kind;

use crate::kernel::{
    maps::{device, is_tunnel},
    net::Net,
    route::{Asked, find_route},
    skb::Skb,
    verdict::{Step, Verdict},
    work_area::WorkArea,
};

/// Drops such a packet. One to a pod, of this node or behind a tunnel, is of a tunnel that pods have among
/// themselves; where the route leads out otherwise its destination may be a node.
#[inline(always)]
pub fn check<I: Net>(work: &mut WorkArea<I>, ctx: *mut __sk_buff) -> Step<()> {
    let tuple = &work.head.tuple;
    let port = match (tuple.protocol, work.head.kind) {
        (protocol::UDP, Kind::Flow) => tuple.dport,
        (protocol::UDP, _) | (protocol::TCP, _) => return Ok(()),
        _ => 0,
    };
    if !is_tunnel(Tunnels::packet(tuple.protocol, port)) {
        return Ok(());
    }
    let out = find_route(work, ctx, Skb::new(ctx).ifindex(), Asked::Way);
    let is_to_pod = out
        .and_then(|out| device(out.get()))
        .is_some_and(|out| out.flags & (flags::POD | flags::TUNNEL) != 0);
    if is_to_pod {
        Ok(())
    } else {
        Err(Verdict::dropped(Counter::DropTunnel))
    }
}

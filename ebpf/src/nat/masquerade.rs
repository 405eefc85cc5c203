//! Masquerade: a pod's flow gets the address of the uplink, and a port under which no other flow,
//! and no socket of the host, talks to the same remote address and port.

use underpass_abi::{
    addr::Family as _,
    counter::Counter,
    endpoint::{Device, device as flags},
    flow::{Tuple, action},
    node::feature,
    quota::{TRANSLATED, WORLD},
};

use crate::{
    kernel::{
        container,
        maps::{constant, count, device, keeps_source, trace_level},
        net::Net,
        route::{Asked, find_route},
        skb::Skb,
        verdict::{Step, Verdict},
        work_area::WorkArea,
    },
    model::{
        request::{Opener, Payer},
        work::Work,
    },
    nat::{mapping::Allocation, port_allocation::allocate_paid},
    trace,
};

/// How the uplink of a flow's first packet was found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The routing table has just named it, so it has told the address as well.
    Routed,
    /// Otherwise.
    Other,
}

/// Gives a new flow, of the packet in [`Work::head`], a source address and port. Its entries are in
/// the table when this returns, and the tuple to leave with is in [`Work::partner`].
#[inline(always)]
pub fn assign<I: Net>(
    work: &mut WorkArea<I>,
    skb: &Skb,
    owner: u32,
    uplink: u32,
    way: Way,
) -> Step<()> {
    // The host's own flow has its address already.
    let addr = if owner == 0 {
        work.head.tuple.src
    } else {
        address(work, skb, owner, uplink, way)?
    };
    let Work { head, request, .. } = &mut **work;
    let inner = head.tuple;
    request.inner = inner;
    request.outer = Tuple::new(inner.protocol, addr, inner.sport, inner.dst, inner.dport);
    request.owner = owner;
    request.client = 0;
    request.uplink = uplink;
    request.opener = Opener::Owner;
    request.payer = Payer::Nobody;
    (request.out, request.back) = (action::STACK, action::STACK);
    // What somebody sends in a pod's name is not at its expense.
    let by = skb.ingress_ifindex();
    let account = if owner == 0 || by == 0 || container::is_same(by, owner) {
        owner
    } else {
        owner | WORLD | TRANSLATED
    };
    let allocation = allocate_paid(work, skb.raw(), account)?;
    if trace_level() != 0 {
        let request = &work.request;
        trace::allocated(
            allocation == Allocation::Granted,
            &request.inner,
            &request.outer,
        );
    }
    allocation.granted()?;
    count(Counter::Masqueraded);
    if work.request.outer.sport != inner.sport {
        count(if owner == 0 {
            Counter::HostTupleMoved
        } else {
            Counter::PortChanged
        });
    }
    Ok(())
}

/// The address for a pod's flows by an uplink: the network's, else that of the route, else the uplink's.
#[inline(always)]
fn address<I: Net>(
    work: &mut WorkArea<I>,
    skb: &Skb,
    owner: u32,
    uplink: u32,
    way: Way,
) -> Step<I::Addr> {
    let fixed = device(owner).and_then(I::masquerade_address);
    // Where the stack chose another uplink than the
    // routing table says, that one's address counts.
    let is_routed = way == Way::Routed
        || fixed.is_none()
            && constant!(features) & feature::FIB_SRC != 0
            && find_route(work, skb.raw(), owner, Asked::Source)
                .is_some_and(|way| way.get() == uplink);
    fixed
        .or_else(|| work.route.source.filter(|_| is_routed))
        .or_else(|| device(uplink).and_then(I::masquerade_address))
        .ok_or(Verdict::dropped(Counter::DropNoAddress))
}

/// What a new flow of the pod must ask of the routing table, if it is masqueraded or not.
#[inline(always)]
pub fn asks<I: Net>(pod: &Device, is_wanted: bool) -> Asked {
    if is_wanted && I::masquerade_address(pod).is_none() {
        Asked::Source
    } else {
        Asked::Way
    }
}

/// Whether the pod's packets to this destination must leave with an address of the uplink.
#[inline(always)]
pub fn is_wanted<I: Net>(pod: &Device, dst: I::Addr) -> bool {
    pod.flags & flags::MASQUERADE != 0 && !keeps_source(pod.network, dst.wide(), I::FAMILY)
}

//! What `underpass trace` prints. Each record is a function of its own, verified once: the code that
//! writes one is as long as a parser.
//!
//! None takes the context: the compiler sees that logging ignores it, and would pass none.

use aya_log_ebpf::{debug, warn};
use underpass_abi::flow::Tuple;

use crate::kernel::{global::global, maps::trace_level};

/// Levels, see `State::trace`.
const WARN: u32 = 2;
const DEBUG: u32 = 4;

/// A flow was learned from a packet with this tuple, at this device.
#[inline(always)]
pub fn learned<A>(tuple: &Tuple<A>, ifindex: u32) {
    if trace_level() >= DEBUG {
        record_learned(
            u32::from(tuple.protocol),
            ports(tuple.sport, tuple.dport),
            ifindex,
        );
    }
}

/// The flow of this tuple asked for a source port: whether it was granted, and the tuple that it leaves
/// with.
#[inline(always)]
pub fn allocated<A>(is_granted: bool, inner: &Tuple<A>, outer: &Tuple<A>) {
    if trace_level() >= WARN {
        record_allocated(
            u32::from(inner.protocol),
            ports(inner.sport, outer.sport),
            is_granted,
        );
    }
}

/// Two ports in network order, as one number.
#[inline(always)]
fn ports(first: u16, second: u16) -> u32 {
    u32::from(first) << 16 | u32::from(second)
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the two halves")]
fn in_host_order(ports: u32) -> (u16, u16) {
    (
        u16::from_be((ports >> 16) as u16),
        u16::from_be(ports as u16),
    )
}

global!(
    fn record_learned(protocol: u32, ports: u32, ifindex: u32) {
        let (source, destination) = in_host_order(ports);
        debug!(
            (),
            "learned protocol {} port {} - port {} at device {}",
            protocol,
            source,
            destination,
            ifindex
        );
    }
);

global!(
    fn record_allocated(protocol: u32, ports: u32, is_granted: bool) {
        let (wanted, given) = in_host_order(ports);
        if !is_granted {
            warn!(
                (),
                "no port for protocol {} source port {}", protocol, wanted
            );
        } else if trace_level() >= DEBUG {
            debug!(
                (),
                "masquerade protocol {} source port {} as port {}", protocol, wanted, given
            );
        }
    }
);

//! Who serves a port of the host, as the map says.

use underpass_abi::{
    addr::Family as _,
    flow::Tuple,
    port::{HostPort, PortTarget},
};

use crate::kernel::{maps::port, memory, net::Net};

/// Who serves the destination of a packet: the entry of the address itself counts before that of
/// every address.
#[inline(always)]
pub fn serving<I: Net>(tuple: &Tuple<I::Addr>) -> Option<&'static PortTarget> {
    let mut key = HostPort {
        addr: tuple.dst.wide(),
        port: tuple.dport,
        protocol: tuple.protocol,
        family: I::FAMILY,
        reserved: 0,
    };
    port(&key).or_else(|| {
        memory::clear(&mut key.addr);
        port(&key)
    })
}

/// Whether any host port has this port number: masquerade must not use it.
#[inline(always)]
pub fn is_mapped<I: Net>(outer: &Tuple<I::Addr>) -> bool {
    serving::<I>(&outer.reversed()).is_some()
}

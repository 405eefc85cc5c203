//! What the routing table says.

/// Where the kernel forwards a packet to.
#[derive(Clone, Copy)]
pub struct Route<A> {
    /// Address that the kernel would give to a packet of its own on this route; nothing before
    /// 6.7, nor where only the [`Way`](Asked::Way) was asked for.
    pub source: Option<A>,
    /// MTU of the route in bytes, path MTU discovery included. Before 5.12, which does not tell, the length
    /// of the packet that was asked about, which fits.
    pub mtu: u32,
    /// Ethernet destination and source; zero while the neighbour is not resolved.
    pub eth: [[u8; 6]; 2],
}

//! What the programs know of their node: constants given when they are loaded, and the little state
//! that may change afterwards.

use crate::plain;

/// Symbol of the [`Node`] constant in the eBPF object; user space overrides it before loading.
pub const NODE_SYMBOL: &str = "NODE";

/// Constants of the node, in the object's read-only data: the verifier folds them into the
/// programs.
///
/// A tick is `1 << tick_shift` jiffies, close to one second; every timeout is in ticks.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Node {
    /// Secret key of the fingerprints in `skb->hash`; random for each load.
    pub key: [u64; 2],
    /// Kernel features found by user space, see [`feature`].
    pub features: u32,
    /// Shift from jiffies to ticks.
    pub tick_shift: u32,
    /// Lifetime of idle flows, in ticks.
    pub timeout: Timeouts,
    /// First port (host order) of the range searched first when a source port can't be kept:
    /// outside the host's ephemeral ports and the NodePort range.
    pub port_first: u32,
    /// Number of ports in that range.
    pub port_count: u32,
    /// Entries of each flow table, a power of two; see [`flows6`](Self::flows6).
    pub flows: u32,
    /// The build that loaded the programs, as a checksum of its object; zero in the object.
    pub build: u32,
}

/// Idle time after which a flow is as good as gone, in ticks.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timeouts {
    /// TCP with packets seen from both sides and no FIN or RST: a day, as kube-proxy sets connection
    /// tracking to. RFC 5382 asks for at least 2 h 4 min.
    pub tcp_established: u32,
    /// TCP of which only one side was heard, that was reset, or that one side has closed. RFC 5382 asks for at least 4 min.
    pub tcp_opening: u32,
    /// TCP after a FIN from both sides: as long as the one who closed first keeps the tuple for itself (Linux: 60 s), nobody else is to
    /// speak to it from the same port.
    pub tcp_closing: u32,
    /// UDP heard from both sides. RFC 4787 asks for at least 2 min, recommends 5.
    pub udp: u32,
    /// UDP of which only one side was heard.
    pub udp_opening: u32,
    /// ICMP echo. RFC 5508 asks for at least 60 s.
    pub icmp: u32,
    /// Ports and translation remembered for the later fragments of a datagram.
    pub fragment: u32,
    /// After so much silence what is no conversation gives its place or its port to somebody who finds no other.
    pub quiet: u32,
}

/// State of the node that user space may change while programs run: element 0 of the map `STATE`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct State {
    /// Raised by every change of endpoints, devices or policy: each flow re-validates itself at
    /// its next packet. Never 0.
    pub epoch: u32,
    /// What `underpass trace` asked for: 0 nothing, else the highest [`aya_log` level](https://docs.rs/aya-log-common) number to log.
    pub trace: u32,
    /// See [`policy`].
    pub policy: u32,
    /// How often connection tracking is fed.
    pub feed: Feed,
    /// Ticks of silence after which connection tracking may have forgotten a TCP connection that it
    /// could follow: the shortest of its timers that applies.
    pub tcp_forgotten: u32,
    /// What comes to the node in tunnels that it is an end of.
    pub tunnels: Tunnels,
    /// Zero: room for what later builds have to say.
    pub reserved: [u32; 2],
}

/// The packets that an end of a tunnel on this node takes others out of.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tunnels {
    /// The first of them, as [`Tunnels::packet`] says them; after the last one there are zeros.
    pub packets: [u32; Self::MAX],
}

impl Tunnels {
    /// So many kinds there may be: VXLAN, Geneve and the protocols of IP in IP and GRE are five.
    pub const MAX: usize = 6;

    /// One kind of packet: a protocol of IP and, where that is UDP, the destination port in network order.
    #[must_use]
    pub const fn packet(protocol: u8, port: u16) -> u32 {
        (protocol as u32) << 16 | port as u32
    }
}

/// After how many ticks a packet of a bypassed flow's direction goes through the stack again, so
/// that connection tracking does not forget the flow, and the firewall is asked again. By protocol,
/// because its timers differ. 1 is the least that makes a difference: the first packet of each tick.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Feed {
    /// TCP, of connections that connection tracking can follow ([`policy::LIBERAL`]).
    pub tcp: u32,
    /// UDP.
    pub udp: u32,
    /// ICMP echo.
    pub icmp: u32,
    /// SCTP.
    pub sctp: u32,
}

impl Feed {
    /// The longest that is waited, in seconds: so long a rule that is added later may be ignored.
    pub const LONGEST: u32 = 10;
    /// The same in every protocol.
    #[must_use]
    pub const fn all(ticks: u32) -> Self {
        Self {
            tcp: ticks,
            udp: ticks,
            icmp: ticks,
            sctp: ticks,
        }
    }
}

/// Bits of [`State::policy`]: what the node's own network stack asks of the bypass.
pub mod policy {
    /// `net.netfilter.nf_conntrack_tcp_be_liberal` is 1: TCP may come back to connection tracking at
    /// any time, so its opening and its end go through the stack.
    pub const LIBERAL: u32 = 1;
    /// The node has policies of IPsec (xfrm), which a program can't ask: nothing takes the bypass.
    pub const XFRM: u32 = 1 << 1;
    /// `net.bridge.bridge-nf-call-iptables` is 1: connection tracking sees the IPv4 packets of a bridge at the port that they come by.
    pub const BRIDGES4: u32 = 1 << 2;
    /// `net.bridge.bridge-nf-call-ip6tables`: the same for IPv6.
    pub const BRIDGES6: u32 = 1 << 3;
}

plain!(Node, Timeouts, State, Feed, Tunnels);

const _: () = assert!(size_of::<Node>() == 16 + 8 + 32 + 8 + 8);
const _: () = assert!(size_of::<State>() == 12 + 16 + 4 + 32);

/// Bits of [`Node::features`].
pub mod feature {
    /// `bpf_fib_lookup` knows [`flag::BPF_FIB_LOOKUP_SRC`](super::flag::BPF_FIB_LOOKUP_SRC).
    pub const FIB_SRC: u32 = 1;
    /// `bpf_l4_csum_replace` knows [`flag::BPF_F_IPV6`](super::flag::BPF_F_IPV6).
    pub const CSUM_IPV6: u32 = 1 << 1;
    /// `bpf_redirect` puts packets into a device whatever their length. Before 5.12 it drops those that are longer than its MTU
    /// (`is_skb_forwardable` in `dev_forward_skb`), and says nothing.
    pub const REDIRECT_LONG: u32 = 1 << 2;
    /// The kernel was started without IPv6 and will not have it before it is started anew.
    pub const NO_IPV6: u32 = 1 << 3;
    /// `skb->protocol` of what leaves a netkit is what its sender says beside the frame, whatever the frame says, which is what the stack goes by. That is
    /// so before Linux 6.10 (torvalds/linux@3998d184267d), and netkit came with 6.7.
    pub const CLAIMED_PROTOCOL: u32 = 1 << 4;
    /// Length in bytes of the packet that the program which finds out is run on.
    pub const PROBE_LENGTH: usize = 64;
}

/// Flags of helpers that not every kernel knows.
pub mod flag {
    /// Of `bpf_fib_lookup`: return the source address that the kernel would choose (Linux 6.7).
    pub const BPF_FIB_LOOKUP_SRC: u32 = 1 << 4;
    /// Of `bpf_l4_csum_replace`: an IPv6 packet, where no checksum of the network header makes good for changed addresses (Linux 6.16, and
    /// stable kernels since June 2025, 5.10 among them).
    pub const BPF_F_IPV6: u64 = 1 << 7;
}

/// A flow table has so many entries at least.
pub const FEWEST_FLOWS: u32 = 1 << 10;

/// Entries of the table of IPv6 flows where that of IPv4 has so many: what the kernel does not forward is not learned.
#[inline(always)]
#[must_use]
pub const fn flows6(flows: u32, features: u32) -> u32 {
    if features & feature::NO_IPV6 == 0 || flows < FEWEST_FLOWS {
        flows
    } else {
        FEWEST_FLOWS
    }
}

/// Slots beside a flow table of so many entries. A flow without a slot, which two CPUs that find the same
/// one can leave, takes nobody's place: whoever has a slot finds room in the table.
#[inline(always)]
#[must_use]
pub const fn slots(flows: u32) -> u32 {
    flows - flows / 8
}

/// Jiffies per second to the shift that makes a tick last close to one second.
#[must_use]
pub const fn tick_shift(hz: u32) -> u32 {
    let mut shift = 0;
    while (1 << (shift + 1)) * 2 < hz * 3 {
        shift += 1;
    }
    shift
}

/// Seconds to ticks, rounded up.
#[must_use]
pub const fn ticks(seconds: u32, hz: u32) -> u32 {
    let tick = 1u64 << tick_shift(hz);
    #[expect(
        clippy::cast_possible_truncation,
        reason = "fewer ticks than 2 x seconds, and seconds are timeouts"
    )]
    let ticks = (seconds as u64 * hz as u64).div_ceil(tick) as u32;
    ticks
}

impl Node {
    /// The node with its default timeouts for a kernel with `hz` jiffies per second, and flow tables of
    /// so many entries (a power of two).
    #[must_use]
    pub const fn new(hz: u32, key: [u64; 2], features: u32, flows: u32) -> Self {
        Self {
            key,
            features,
            tick_shift: tick_shift(hz),
            timeout: Timeouts {
                tcp_established: ticks(86_400, hz),
                tcp_opening: ticks(240, hz),
                tcp_closing: ticks(60, hz),
                udp: ticks(300, hz),
                udp_opening: ticks(120, hz),
                icmp: ticks(60, hz),
                fragment: ticks(30, hz),
                quiet: ticks(30, hz),
            },
            port_first: 1024,
            port_count: 30_000 - 1024,
            flows,
            build: 0,
        }
    }

    /// Entries of the table of IPv6 flows.
    #[must_use]
    pub const fn flows6(&self) -> u32 {
        flows6(self.flows, self.features)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tick_is_close_to_a_second() {
        for hz in [100, 250, 300, 1000] {
            let tick = f64::from(1 << tick_shift(hz)) / f64::from(hz);
            assert!((0.6..=1.5).contains(&tick), "{hz} Hz: a tick of {tick} s");
            let hour = f64::from(ticks(3600, hz)) * tick;
            assert!(
                (3600.0..3602.0).contains(&hour),
                "{hz} Hz: an hour of {hour} s"
            );
        }
    }
}

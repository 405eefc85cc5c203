//! The flow cache: what the bypass remembers.
//!
//! A flow that nothing translates is one entry under its canonical key. A translated flow has two:
//! one under the tuple of the pod's side, one under the tuple of the other side; each holds both
//! tuples, so that either rebuilds the other.
//!
//! Entries are known to one of two places: the hash itself, and an array of their keys (`SLOTS4`,
//! `SLOTS6`) by which whoever inserts finds those that have expired.

use crate::{addr::Family, plain};

/// Protocol numbers that flows have.
pub mod protocol {
    /// ICMP; only echo has flows, with its identifier in the place of the requester's port.
    pub const ICMP: u8 = 1;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// `ICMPv6`; as for ICMP.
    pub const ICMPV6: u8 = 58;
    /// SCTP.
    pub const SCTP: u8 = 132;
}

/// The five-tuple of a packet, in its direction. Ports are in network order.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Tuple<A> {
    /// Source address.
    pub src: A,
    /// Destination address.
    pub dst: A,
    /// Source port; for echo requests the identifier, for replies 0.
    pub sport: u16,
    /// Destination port; for echo replies the identifier, for requests 0.
    pub dport: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// Zero.
    pub reserved: u8,
    /// Zero. (An array of three bytes would be filled by a call.)
    pub reserved2: u16,
}

/// Which end of a canonical key a packet comes from: index into [`Flow::halves`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// From the smaller end.
    A,
    /// From the larger end.
    B,
}

impl End {
    /// Bit of [`state`] that says this end was heard.
    #[inline(always)]
    #[must_use]
    pub const fn heard(self) -> u32 {
        match self {
            Self::A => state::HEARD_A,
            Self::B => state::HEARD_B,
        }
    }

    /// Bit of [`state`] that says this end sent a FIN.
    #[inline(always)]
    #[must_use]
    pub const fn fin(self) -> u32 {
        match self {
            Self::A => state::FIN_A,
            Self::B => state::FIN_B,
        }
    }

    /// [`state::FIN_B_LAST`] if a FIN of this end, the second of a flow, says so.
    #[inline(always)]
    #[must_use]
    pub const fn fin_last(self) -> u32 {
        match self {
            Self::A => 0,
            Self::B => state::FIN_B_LAST,
        }
    }

    /// Bit of [`state`] that says the flow fills the quota of the pod at this end.
    #[inline(always)]
    #[must_use]
    pub const fn charged(self) -> u32 {
        match self {
            Self::A => state::CHARGED_A,
            Self::B => state::CHARGED_B,
        }
    }

    /// The opposite end.
    #[inline(always)]
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// A canonical key: a tuple turned so that its smaller end (address, then port) is the source. Both
/// directions of a flow have the same.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key<A>(pub Tuple<A>);

impl<A: Family> Key<A> {
    /// A few bits of every part of the key: what an entry says of its own key, see [`Flow::tag`].
    #[inline(always)]
    #[must_use]
    pub fn tag(&self) -> u32 {
        let Self(tuple) = self;
        let (src, dst) = (tuple.src.wide(), tuple.dst.wide());
        let addresses = src.0 ^ src.1 ^ dst.0.rotate_left(13) ^ dst.1.rotate_left(13);
        let ports = u32::from(tuple.sport) << 16 | u32::from(tuple.dport);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the upper half is folded in"
        )]
        let folded = (addresses ^ addresses >> 32) as u32;
        folded ^ ports ^ u32::from(tuple.protocol) << 8
    }
}

impl<A: Family> Tuple<A> {
    /// A tuple; ports in network order.
    #[inline(always)]
    #[must_use]
    pub const fn new(protocol: u8, src: A, sport: u16, dst: A, dport: u16) -> Self {
        Self {
            src,
            dst,
            sport,
            dport,
            protocol,
            reserved: 0,
            reserved2: 0,
        }
    }

    /// The tuple of the opposite direction.
    #[inline(always)]
    #[must_use]
    pub const fn reversed(&self) -> Self {
        Self {
            src: self.dst,
            dst: self.src,
            sport: self.dport,
            dport: self.sport,
            protocol: self.protocol,
            reserved: 0,
            reserved2: 0,
        }
    }

    /// The canonical key, and the end of it that this tuple's source is.
    #[inline(always)]
    #[must_use]
    pub fn key(&self) -> (Key<A>, End) {
        if (self.src, self.sport) <= (self.dst, self.dport) {
            (Key(*self), End::A)
        } else {
            (Key(self.reversed()), End::B)
        }
    }
}

/// What becomes of the packets of one direction.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Half<A> {
    /// When a packet was last revalidated: `epoch << 32 | tick`; 0 if never.
    pub stamp: u64,
    /// Packets that took the bypass.
    pub packets: u64,
    /// Source address to leave with.
    pub src: A,
    /// Destination address to leave with.
    pub dst: A,
    /// Source port to leave with, network order.
    pub sport: u16,
    /// Destination port to leave with, network order.
    pub dport: u16,
    /// Host veth of the container's interface that has the source address; 0 if packets come from the
    /// world, or from the host. They must come by it, or by another interface of the same container.
    pub in_ifindex: u32,
    /// Device to leave by.
    pub out_ifindex: u32,
    /// MTU of the way out in bytes, without the Ethernet header.
    pub mtu: u32,
    /// Ethernet destination and source to leave with.
    pub eth: [[u8; 6]; 2],
    /// Ethernet source that packets by `in_ifindex` must have (from a pod); zero from uplinks.
    pub in_mac: [u8; 6],
    /// See [`action`].
    pub action: u8,
    /// See [`rewrite`].
    pub rewrite: u8,
    /// Not zero: packets to a pod must be sent by `out_ifindex`, whose queue shapes them, or because
    /// they come from a place where nothing else is allowed, or would do harm ([`device`](crate::endpoint::device)
    /// `SHAPED`, `NETKIT`, `BRIDGE`). To an uplink: whether they need their fingerprint there (`TUNNEL`), and when the stack was shown
    /// one that [`Self::mtu`] has no room for ([`told`]).
    pub queue: u32,
    /// Tick at which the stack last let a packet of this direction through unchanged, and its way
    /// was one that the bypass has; 0 if it never did.
    pub passed: u32,
    /// Uplink that the packet of [`Self::passed`] came in by; 0 if it came from a pod.
    pub uplink: u32,
}

/// The bits of [`Half::queue`] that say when; no device's flags have them.
pub const TOLD: u32 = 0xffff << 16;

/// What they say in this tick, and for a minute or so: a number that is not zero.
#[inline(always)]
#[must_use]
pub const fn told(tick: u32) -> u32 {
    (tick >> 6 | 1 << 15) << 16
}

/// Values of [`Half::action`].
pub mod action {
    /// Nothing is known of this direction.
    pub const NONE: u8 = 0;
    /// To the pod behind `out_ifindex`, by `bpf_redirect_peer`, or by its queue.
    pub const PEER: u8 = 1;
    /// To the uplink `out_ifindex`, by `bpf_redirect`.
    pub const WIRE: u8 = 2;
    /// Rewrite as said, then leave it to the stack.
    pub const STACK: u8 = 3;
    /// The tuple is the outer side of a translated flow: a packet of the host that has it must be
    /// given another port.
    pub const TAKEN: u8 = 4;
    /// To, or from, a process of this host that is a client of a host port: by the loopback device.
    pub const HOST: u8 = 5;
    /// The tuple is one that the host's own stack translates to (netfilter, for another container):
    /// no pod's flow may be given it.
    pub const OTHERS: u8 = 6;
}

/// Bits of [`Half::rewrite`].
pub mod rewrite {
    /// Source address and port are replaced.
    pub const SRC: u8 = 1;
    /// Destination address and port are replaced.
    pub const DST: u8 = 2;
    /// Not by the uplink's programs, but by those of the pods: both ends are pods of this node.
    pub const EARLY: u8 = 4;
    /// A client talks to the container itself, with the tuple that a flow of the same client to a
    /// host port has behind the translation: the direction that is given another source port.
    pub const ASIDE: u8 = 8;
}

/// A flow: both directions, and the little state they share.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flow<A> {
    /// [`Key::tag`] of the key. First, so that it is the first that is overwritten when the memory
    /// of an entry becomes another's (since Linux 6.1 that may happen while somebody reads it).
    pub tag: u32,
    /// See [`state`].
    pub state: u32,
    /// Tick after which the flow is as good as gone, unless a packet comes before.
    pub expires: u32,
    /// Tick at which the entry was made or, once both ends were heard, at which they were.
    pub since: u32,
    /// Index of the slot that has the entry's key. A slot with the key of an entry that names another
    /// one is free.
    pub slot: u32,
    /// Zero: room for what later builds have to say, so that they can go on with the flows of this one.
    pub reserved: [u32; 3],
    /// By [`End`] of the packets' source.
    pub halves: [Half<A>; 2],
}

/// Bits of [`Flow::state`].
pub mod state {
    /// A packet was heard from end A.
    pub const HEARD_A: u32 = 1;
    /// A packet was heard from end B.
    pub const HEARD_B: u32 = 1 << 1;
    /// Both ends were heard.
    pub const ANSWERED: u32 = HEARD_A | HEARD_B;
    /// FIN seen from end A.
    pub const FIN_A: u32 = 1 << 2;
    /// FIN seen from end B.
    pub const FIN_B: u32 = 1 << 3;
    /// FIN seen from both ends.
    pub const FINISHED: u32 = FIN_A | FIN_B;
    /// RST seen.
    pub const RST: u32 = 1 << 4;
    /// The entry of the translated side: its other entry is under the tuple that the halves rewrite
    /// to.
    pub const OUTER: u32 = 1 << 5;
    /// The flow came to a host port: it ends when the port is mapped to somebody else.
    pub const PORT: u32 = 1 << 6;
    /// Nobody has answered yet, and the flow fills the quota of the pod that `in_ifindex` of half A is
    /// the host veth of.
    pub const CHARGED_A: u32 = 1 << 7;
    /// The same for half B.
    pub const CHARGED_B: u32 = 1 << 8;
    /// TCP: a SYN was answered with another, and the one who sent the first has not gone on yet.
    pub const OFFERED: u32 = 1 << 9;
    /// A packet of each direction came out of the stack as it had entered, and each has a way: the
    /// bypass carries both. Both entries of a translated flow say so, or neither.
    pub const BYPASS: u32 = 1 << 10;
    /// TCP that took the bypass while connection tracking was strict
    /// (`nf_conntrack_tcp_be_liberal` 0): it would call what comes back to it invalid, so the
    /// connection ends on the bypass as well.
    pub const STICKY: u32 = 1 << 11;
    /// A conversation: a full table does not give the entry away before it expires. TCP whose
    /// opening is complete, until the second FIN is acknowledged or an RST comes, UDP and SCTP heard from both ends for
    /// [`STREAM`](super::STREAM) ticks.
    pub const ASSURED: u32 = 1 << 12;
    /// Nobody has answered yet, and the world had opened more such flows to the pod than its quota
    /// has room for: whoever needs a place may have that of this entry.
    pub const SURPLUS: u32 = 1 << 13;
    /// TCP: a SYN came out of the stack unchanged. In the entry of the inner tuple alone.
    pub const SYN: u32 = 1 << 14;
    /// TCP: and so did a SYN-ACK. Where a proxy of the stack answers for a server, none of both does,
    /// and sequence numbers change on the way, which no fingerprint tells.
    pub const SYN_ACK: u32 = 1 << 15;
    /// The stack translates the packets (netfilter, IPVS), and both entries say what it makes of them. That is for the bypass
    /// alone: to everybody else these are entries that translate nothing.
    pub const BY_STACK: u32 = 1 << 16;
    /// Of both FINs that of end B was seen second, so end A is to acknowledge it. Says nothing before both were.
    pub const FIN_B_LAST: u32 = 1 << 17;
}

/// A tuple that a packet entered the stack with, and what the packet carries: by that it is known where it comes out with another
/// tuple.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Signed<A> {
    /// What the packet had.
    pub tuple: Tuple<A>,
    /// Its fingerprint, which is in `skb->hash`; of a packet for an address that no container has its number, which is in
    /// `skb->tc_index`.
    pub carried: u32,
    /// Length that the packet's IP header says, in bytes, and from bit 24 on its DSCP. What is put into a tunnel carries the same and is longer; what
    /// was given another class must not take the bypass, which would not do that.
    pub shape: u32,
    /// Uplink that a packet with a number came in by.
    pub arrival: u32,
}

/// How many of these each CPU keeps, by the lowest bits of what the packets carry: more than packets come in a batch (64 of NAPI, of
/// which flows that are known already need no place).
pub const SIGNED: u32 = 64;

/// Ticks after which a flow of UDP or SCTP that is heard from both ends is a conversation, not a
/// question and its answer.
pub const STREAM: u32 = 2;

/// Key of `FRAGMENTS4` and `FRAGMENTS6`: one datagram that was cut to pieces.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FragmentKey<A> {
    /// Source address.
    pub src: A,
    /// Destination address.
    pub dst: A,
    /// Identification as it stands in the packet (network order; 16 bits in IPv4).
    pub identification: u32,
    /// IPv4: protocol number of the datagram. IPv6: 0, there the identification says it all (RFC 8200,
    /// section 4.5), and later fragments do not tell the number.
    pub protocol: u32,
}

/// What the first fragment of a datagram tells of the later ones.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FragmentPorts {
    /// As in [`Tuple::sport`].
    pub sport: u16,
    /// As in [`Tuple::dport`].
    pub dport: u16,
    /// As in [`Tuple::protocol`].
    pub protocol: u32,
    /// Tick of the first fragment, without its highest bit, which is [`REFUSED`].
    pub seen: u32,
}

/// Bit of [`FragmentPorts::seen`]: the first fragment was dropped, so there is nothing to wait for.
pub const REFUSED: u32 = 1 << 31;

use crate::addr::{Addr4, Addr6};

plain!(FragmentPorts, FragmentKey<Addr4>, FragmentKey<Addr6>);
plain!(for either family: Tuple, Key, Half, Flow, Signed);

// Programs read MACs in words of two bytes.
const _: () = assert!(
    core::mem::offset_of!(Half<Addr4>, eth).is_multiple_of(2)
        && core::mem::offset_of!(Half<Addr6>, eth).is_multiple_of(2)
        && core::mem::offset_of!(Half<Addr4>, in_mac).is_multiple_of(2)
        && core::mem::offset_of!(Half<Addr6>, in_mac).is_multiple_of(2)
);
const _: () = assert!(size_of::<Tuple<Addr4>>() == 16 && size_of::<Tuple<Addr6>>() == 40);
const _: () = assert!(size_of::<Half<Addr4>>() == 72 && size_of::<Half<Addr6>>() == 96);
const _: () = assert!(size_of::<Flow<Addr4>>() == 176 && size_of::<Flow<Addr6>>() == 224);
const _: () = assert!(core::mem::offset_of!(Flow<Addr4>, tag) == 0);
const _: () = assert!(size_of::<Signed<Addr4>>() == 28 && size_of::<Signed<Addr6>>() == 56);

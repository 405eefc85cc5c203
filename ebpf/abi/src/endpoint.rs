//! Pods and uplinks: who owns an address, and what is known of a device.

use crate::{addr::Addr, plain};

/// Begins the alias of every host veth of ours. By it DEL and GC know a container's device where no map does, and the agent knows which
/// way leads to a pod.
pub const ALIAS_PREFIX: &str = "underpass:";

/// Value of `ENDPOINTS` (key: [`Addr`] of a pod): the host veth that owns the address.
///
/// An ifindex is never used twice in the life of a network namespace (the kernel counts upwards),
/// so it is also the owner's generation.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Endpoint {
    /// The host veth.
    pub ifindex: u32,
    /// Prefix length that the address has inside the pod; information for the operator.
    pub prefix_len: u32,
    /// The pod's gateway for this address, an address of the host veth (mapped form): the source of
    /// what the pod must not see by the client's own address.
    pub gateway: Addr,
}

/// Value of `DEVICES` (key: ifindex, `u32`): a host veth of ours, or an uplink.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Device {
    /// See [`device`].
    pub flags: u32,
    /// Network of a pod, the first word of keys in `NO_MASQUERADE`; 0 for an uplink.
    pub network: u32,
    /// MTU in bytes, without the Ethernet header.
    pub mtu: u32,
    /// MAC of the pod's own end; zero for an uplink.
    pub peer_mac: [u8; 6],
    /// MAC of this device, the one that the pod uses for its gateway; of a [`device::FOREIGN`] one the
    /// latter, which may be a bridge's.
    pub mac: [u8; 6],
    /// Source address of masqueraded IPv4 packets (mapped form). Uplink: zero if it has none. Pod:
    /// what was configured, zero if the uplink's counts.
    pub masquerade4: Addr,
    /// The same for IPv6.
    pub masquerade6: Addr,
    /// Pod: what a half-open flow takes of its quota, see [`quota`](crate::quota).
    pub flow_cost: u32,
    /// Pod: inode number of the network namespace that the pod's own end was put into, the same for all
    /// interfaces of a container (numbers of living namespaces differ). 0 if it is not known: of an
    /// uplink, and of a [`device::FOREIGN`] one.
    pub netns: u32,
    /// Pod: UDP port (network order) of the tunnels between the nodes, which the pod is kept out of though there is no device for them
    /// yet. 0 if its network names none.
    pub tunnel_port: u16,
    /// MAC of the device itself, if that is [`device::FOREIGN`] and the port of a bridge, in words as they lie in a frame. Else zero: room for what later
    /// builds have to say.
    pub own_mac: [u16; 3],
}

impl Device {
    /// Tells whether it is a bridge by which containers of other plugins are reached, and no uplink. It is of no network.
    #[inline(always)]
    #[must_use]
    pub const fn is_way(&self) -> bool {
        self.flags & device::FOREIGN != 0 && self.network == 0
    }
}

/// Bits of [`Device::flags`].
pub mod device {
    /// A host veth of ours. Otherwise the device is an uplink.
    pub const POD: u32 = 1;
    /// Packets must carry the pod's own addresses, and nothing that only routers and servers of the
    /// network send.
    pub const ANTI_SPOOF: u32 = 1 << 1;
    /// `ipMasq`.
    pub const MASQUERADE: u32 = 1 << 2;
    /// Bypass `learned`: flows may leave the stack.
    pub const BYPASS: u32 = 1 << 3;
    /// An uplink where the kernel filters reverse paths strictly (`rp_filter` 1): a packet must come
    /// in by the device that the answer would leave by.
    pub const STRICT_REVERSE_PATH: u32 = 1 << 4;
    /// An uplink without Ethernet headers (`WireGuard`, tun, ppp): never a target of the bypass.
    pub const LAYER3: u32 = 1 << 5;
    /// Packets must carry the pod's own MAC.
    pub const CHECK_MAC: u32 = 1 << 6;
    /// The loopback device of the host, which is known once a host port is mapped.
    pub const LOOPBACK: u32 = 1 << 7;
    /// A host veth whose root qdisc shapes what the pod receives: the bypass must not go past it.
    pub const SHAPED: u32 = 1 << 8;
    /// With [`POD`]: the host's end of a container that another plugin attached, or a device by which
    /// such containers are reached (a bridge). Of the latter nobody knows the addresses behind it.
    pub const FOREIGN: u32 = 1 << 9;
    /// An uplink in a VRF: the table of that knows which addresses are the host's.
    pub const VRF: u32 = 1 << 10;
    /// With [`POD`]: the primary of a netkit pair, not a veth. What the pod sends is seen before it is
    /// received: in the transmit function of the pod's own end, on the CPU and in the context of its
    /// sender. `bpf_redirect_peer` is not to be had there.
    pub const NETKIT: u32 = 1 << 11;
    /// An uplink that puts packets into datagrams (VXLAN, Geneve), whose source port follows from
    /// `skb->hash`.
    pub const TUNNEL: u32 = 1 << 12;
    /// An uplink that is a bridge, or is made on one (a VLAN, a macvlan): with `br_netfilter` connection tracking has seen a packet at the port of it that it came by, before
    /// the programs here.
    pub const BRIDGE: u32 = 1 << 13;
    /// With [`FOREIGN`]: at a bridge that is an uplink.
    pub const AT_UPLINK: u32 = 1 << 14;
}

/// Key of `OWNERS`: 16 bytes of a hash of (network, container id, interface name).
pub type Owner = [u8; 16];

/// How many addresses one attachment may have.
pub const MAX_ADDRESSES: usize = 8;

/// Value of `OWNERS`: all that one attachment put into maps, so that DEL finds it without the
/// device, the netns or a result.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attachment {
    /// The host veth: key in `DEVICES`.
    pub ifindex: u32,
    /// See [`role`].
    pub role: u32,
    /// Role [`role::CHAINED`]: the device by which the container is reached, if it is another than its
    /// host veth and no uplink; else 0.
    pub via: u32,
    /// The network, as in [`Device::network`]: GC looks at its own network only.
    pub network: u32,
    /// Addresses in use, the first of [`Self::addresses`]: keys in `ENDPOINTS`.
    pub address_count: u32,
    /// Entries in `PORTS` and `SHADOWED_PORTS`.
    pub port_count: u32,
    /// The pod's addresses.
    pub addresses: [Addr; MAX_ADDRESSES],
}

/// Values of [`Attachment::role`].
pub mod role {
    /// The interface is ours.
    pub const INTERFACE: u32 = 0;
    /// Another plugin made the interface: only its host ports are ours.
    pub const CHAINED: u32 = 1;
}

/// Key of `NO_MASQUERADE`, a longest-prefix trie: destinations that keep the pod's source address.
///
/// The prefix length of a key counts the 32 bits of the network, so a prefix of n bits in IPv6 has
/// 32 + n, one in IPv4 32 + 96 + n.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Destination {
    /// The network, as in [`Device::network`], any byte order (always matched whole).
    pub network: u32,
    /// The destination, network order, [`Addr`] as bytes.
    pub addr: [u8; 16],
}

/// Values in `NO_MASQUERADE`: whose packets a destination counts for. IPv4's are a part of IPv6's addresses, as keys go, so `::/0` has IPv4's in it.
pub mod excluded {
    /// Of both families: what builds wrote that did not tell them apart, and an upgrade keeps until the network's next ADD.
    pub const ANY: u32 = 1;
    /// Of IPv4 (`AF_INET`).
    pub const V4: u32 = 2;
    /// Of IPv6 (`AF_INET6`).
    pub const V6: u32 = 10;
}

plain!(Endpoint, Device, Attachment, Destination);

/// Ifindex of the loopback device, the same in every network namespace.
pub const LOOPBACK: u32 = 1;

const _: () = assert!(size_of::<Endpoint>() == 24);
const _: () = assert!(size_of::<Device>() == 72);
const _: () = assert!(size_of::<Attachment>() == 24 + 16 * MAX_ADDRESSES);
const _: () = assert!(size_of::<Destination>() == 20);

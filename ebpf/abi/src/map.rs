//! Names of programs and maps: symbols in the eBPF object, and file names of their pins.

use core::fmt;

use crate::{
    addr::{Addr4, Addr6},
    endpoint::{Attachment, Device, Endpoint},
    flow::{Flow, FragmentPorts, Key, Signed},
    node::{Node, State},
    port::PortTarget,
};

/// A map that is pinned, as `<bpfRoot>/v<ABI>/maps/<name>-<layout>-<value>`: the path says whether a build knows what is
/// in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pinned {
    /// The symbol in the object.
    pub name: &'static str,
    /// The layout of keys and values. It is raised when a field gets another meaning, place or width, and stays
    /// where fields are appended to the value.
    pub layout: u32,
    /// Bytes of a value; 0 where there are none.
    pub value: u32,
    /// What becomes of the entries when a build takes over that has other values.
    pub content: Content,
}

/// What becomes of a map's entries when a build takes over whose values have another size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// User space alone writes them: they are copied, and what one build has appended is zero for the other.
    Copied,
    /// Programs write them, and no traffic is lost without them.
    Dropped,
    /// Programs write them, and connections are lost without them: such a build can't take over.
    Needed,
}

impl Pinned {
    #[expect(clippy::cast_possible_truncation, reason = "values are below a page")]
    const fn of<V>(name: &'static str, layout: u32, content: Content) -> Self {
        Self {
            name,
            layout,
            value: size_of::<V>() as u32,
            content,
        }
    }
}

impl fmt::Display for Pinned {
    /// Writes the name of the pin.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.name, self.layout, self.value)
    }
}

/// Finds a map that is pinned by its symbol.
#[must_use]
pub fn pinned(name: &str) -> Option<&'static Pinned> {
    MAPS.iter().find(|map| map.name == name)
}

/// All maps that are pinned.
pub const MAPS: &[Pinned] = &[
    Pinned::of::<Node>(CONSTANTS, 1, Content::Copied),
    Pinned::of::<State>(STATE, 1, Content::Copied),
    Pinned::of::<Endpoint>(ENDPOINTS, 1, Content::Copied),
    Pinned::of::<Device>(DEVICES, 1, Content::Copied),
    Pinned::of::<u32>(XDP_PODS, 1, Content::Copied),
    Pinned::of::<Attachment>(OWNERS, 1, Content::Copied),
    Pinned::of::<u32>(NO_MASQUERADE, 1, Content::Copied),
    Pinned::of::<Flow<Addr4>>(FLOWS4, 2, Content::Needed),
    Pinned::of::<Flow<Addr6>>(FLOWS6, 2, Content::Needed),
    Pinned::of::<Key<Addr4>>(SLOTS4, 1, Content::Needed),
    Pinned::of::<Key<Addr6>>(SLOTS6, 1, Content::Needed),
    Pinned::of::<FragmentPorts>(FRAGMENTS4, 1, Content::Dropped),
    Pinned::of::<FragmentPorts>(FRAGMENTS6, 1, Content::Dropped),
    Pinned::of::<Signed<Addr4>>(SIGNED4, 1, Content::Dropped),
    Pinned::of::<Signed<Addr6>>(SIGNED6, 1, Content::Dropped),
    Pinned::of::<PortTarget>(PORTS, 1, Content::Copied),
    Pinned::of::<PortTarget>(SHADOWED_PORTS, 1, Content::Copied),
    Pinned::of::<u32>(SERVICE_ADDRESSES, 1, Content::Copied),
    Pinned::of::<u64>(HALF_OPEN, 1, Content::Dropped),
    Pinned::of::<u64>(COUNTERS, 1, Content::Dropped),
    Pinned::of::<()>(AYA_LOGS, 1, Content::Dropped),
];

/// Array of one [`Node`]: what programs were loaded with, for those that are loaded
/// later. Used by user space alone.
pub const CONSTANTS: &str = "CONSTANTS";
/// Array of one [`State`].
pub const STATE: &str = "STATE";
/// Hash: [`Addr`](crate::addr::Addr) to [`Endpoint`].
pub const ENDPOINTS: &str = "ENDPOINTS";
/// Hash: ifindex (`u32`) to [`Device`].
pub const DEVICES: &str = "DEVICES";
/// Device hash: ifindex (`u32`) to the same device, for the host veths of pods that take frames from XDP.
/// The kernel takes a device out when it goes.
pub const XDP_PODS: &str = "XDP_PODS";
/// Hash: [`Owner`](crate::endpoint::Owner) to [`Attachment`]. Used by
/// user space alone.
pub const OWNERS: &str = "OWNERS";
/// Trie: [`Destination`](crate::endpoint::Destination) to whose packets it counts for, of [`excluded`](crate::endpoint::excluded).
pub const NO_MASQUERADE: &str = "NO_MASQUERADE";
/// Hash: [`Key`]`<Addr4>` to [`Flow`]`<Addr4>`.
pub const FLOWS4: &str = "FLOWS4";
/// The same for IPv6.
pub const FLOWS6: &str = "FLOWS6";
/// Array: [`Key`]`<Addr4>`, the keys of [`FLOWS4`] in no order, and some that are
/// gone. Who inserts a flow needs one of these slots, and finds what has expired on the way. Used by
/// the programs alone.
pub const SLOTS4: &str = "SLOTS4";
/// The same for IPv6.
pub const SLOTS6: &str = "SLOTS6";
/// LRU hash: [`FragmentKey`](crate::flow::FragmentKey)`<Addr4>` to
/// [`FragmentPorts`].
pub const FRAGMENTS4: &str = "FRAGMENTS4";
/// The same for IPv6.
pub const FRAGMENTS6: &str = "FRAGMENTS6";
/// Per-CPU array: [`Signed`]`<Addr4>`. Used by the programs alone.
pub const SIGNED4: &str = "SIGNED4";
/// The same for IPv6.
pub const SIGNED6: &str = "SIGNED6";
/// Hash: [`HostPort`](crate::port::HostPort) to [`PortTarget`].
pub const PORTS: &str = "PORTS";
/// Hash: [`ShadowedPort`](crate::port::ShadowedPort) to [`PortTarget`].
/// Used by user space alone.
pub const SHADOWED_PORTS: &str = "SHADOWED_PORTS";
/// Hash: [`Addr`](crate::addr::Addr) to `u32` (1): local addresses that no host port is served on,
/// because they are those of Services (IPVS holds them on a dummy device).
pub const SERVICE_ADDRESSES: &str = "SERVICE_ADDRESSES";
/// LRU hash: ifindex (`u32`) to `u64`, see [`quota`](crate::quota). Used by the programs alone.
pub const HALF_OPEN: &str = "HALF_OPEN";
/// Per-CPU array of `u64`, by [`Counter`](crate::counter::Counter).
pub const COUNTERS: &str = "COUNTERS";
/// Ring buffer of aya-log.
pub const AYA_LOGS: &str = "AYA_LOGS";

/// Those of containers and of uplinks with Ethernet headers: a node's first ADD loads them. The others
/// are loaded when a device first needs one.
pub const USUAL_PROGRAMS: &[&str] = &[FROM_POD, TO_POD, FROM_WIRE, TO_WIRE];

/// All programs, pinned as `<bpfRoot>/v<ABI>/programs/<name>`; all but [`FROM_WIRE_XDP`] are `tc` classifiers.
pub const PROGRAMS: &[&str] = &[
    FROM_POD,
    TO_POD,
    FROM_WIRE,
    TO_WIRE,
    FROM_WIRE_L3,
    TO_WIRE_L3,
    FROM_HOST,
    FROM_WIRE_XDP,
];

/// Ingress of a host veth.
pub const FROM_POD: &str = "from_pod";
/// Egress of a host veth.
pub const TO_POD: &str = "to_pod";
/// Ingress of an uplink.
pub const FROM_WIRE: &str = "from_wire";
/// Egress of an uplink.
pub const TO_WIRE: &str = "to_wire";
/// Ingress of an uplink without Ethernet headers.
pub const FROM_WIRE_L3: &str = "from_wire_l3";
/// Egress of an uplink without Ethernet headers.
pub const TO_WIRE_L3: &str = "to_wire_l3";
/// Egress of the loopback device, once a host port is mapped.
pub const FROM_HOST: &str = "from_host";
/// XDP of an uplink, where a network asks for it.
pub const FROM_WIRE_XDP: &str = "from_wire_xdp";

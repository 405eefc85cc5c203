//! Names of programs and maps: symbols in the eBPF object, and file names of their pins.

/// Maps, pinned as `<bpfRoot>/v<ABI>/maps/<NAME>`.
pub const MAPS: &[&str] = &[
    CONSTANTS,
    STATE,
    ENDPOINTS,
    DEVICES,
    XDP_PODS,
    OWNERS,
    NO_MASQUERADE,
    FLOWS4,
    FLOWS6,
    SLOTS4,
    SLOTS6,
    FRAGMENTS4,
    FRAGMENTS6,
    PORTS,
    SHADOWED_PORTS,
    SERVICE_ADDRESSES,
    HALF_OPEN,
    COUNTERS,
    AYA_LOGS,
];

/// Array of one [`Node`](crate::node::Node): what programs were loaded with, for those that are loaded
/// later. Used by user space alone.
pub const CONSTANTS: &str = "CONSTANTS";
/// Array of one [`State`](crate::node::State).
pub const STATE: &str = "STATE";
/// Hash: [`Addr`](crate::addr::Addr) to [`Endpoint`](crate::endpoint::Endpoint).
pub const ENDPOINTS: &str = "ENDPOINTS";
/// Hash: ifindex (`u32`) to [`Device`](crate::endpoint::Device).
pub const DEVICES: &str = "DEVICES";
/// Device hash: ifindex (`u32`) to the same device, for the host veths of pods that take frames from XDP.
/// The kernel takes a device out when it goes.
pub const XDP_PODS: &str = "XDP_PODS";
/// Hash: [`Owner`](crate::endpoint::Owner) to [`Attachment`](crate::endpoint::Attachment). Used by
/// user space alone.
pub const OWNERS: &str = "OWNERS";
/// Trie: [`Destination`](crate::endpoint::Destination) to `u32` (1).
pub const NO_MASQUERADE: &str = "NO_MASQUERADE";
/// Hash: [`Key`](crate::flow::Key)`<Addr4>` to [`Flow`](crate::flow::Flow)`<Addr4>`.
pub const FLOWS4: &str = "FLOWS4";
/// The same for IPv6.
pub const FLOWS6: &str = "FLOWS6";
/// Array: [`Key`](crate::flow::Key)`<Addr4>`, the keys of [`FLOWS4`] in no order, and some that are
/// gone. Who inserts a flow needs one of these slots, and finds what has expired on the way. Used by
/// the programs alone.
pub const SLOTS4: &str = "SLOTS4";
/// The same for IPv6.
pub const SLOTS6: &str = "SLOTS6";
/// LRU hash: [`FragmentKey`](crate::flow::FragmentKey)`<Addr4>` to
/// [`FragmentPorts`](crate::flow::FragmentPorts).
pub const FRAGMENTS4: &str = "FRAGMENTS4";
/// The same for IPv6.
pub const FRAGMENTS6: &str = "FRAGMENTS6";
/// Hash: [`HostPort`](crate::port::HostPort) to [`PortTarget`](crate::port::PortTarget).
pub const PORTS: &str = "PORTS";
/// Hash: [`ShadowedPort`](crate::port::ShadowedPort) to [`PortTarget`](crate::port::PortTarget).
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

//! The one list of everything that is counted: the programs' counters, and what metrics and commands call them. docs/drops.md has a row
//! for each, which says more.

macro_rules! counters {
    ($($(#[$attr:meta])* $variant:ident $name:literal $kind:ident $text:literal,)*) => {
        /// What happened to a packet: index into the per-CPU array `COUNTERS`.
        #[repr(u32)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Counter { $(#[doc = $text] $variant,)* }

        impl Counter {
            /// Every counter, in the order of its index.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Name in output and metrics: lower case, underscores.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// One sentence for people.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            /// Whether the packet was dropped, or merely counted.
            #[must_use]
            pub const fn kind(self) -> Kind {
                match self { $(Self::$variant => Kind::$kind,)* }
            }
        }
    };
}

/// What a counter counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Packets that were forwarded, or state that changed.
    Event,
    /// Packets that a program dropped.
    Drop,
}

counters! {
    BypassPeer "bypass_peer" Event "packets put straight into a pod, past the stack",
    BypassWire "bypass_wire" Event "packets put straight onto an uplink, past the stack",
    BypassXdp "bypass_xdp" Event "frames put straight into a pod by XDP, before they were packets",
    Learned "learned" Event "flow directions learned because the stack let their packet through unchanged",
    Forgotten "forgotten" Event "flows forgotten because the stack used their tuple for something else",
    Suspended "suspended" Event "flows sent back to the stack because one of their directions has no bypass any more",
    Fed "fed" Event "packets of bypassed flows sent through the stack, so that connection tracking and the firewall hear of them",
    CameBack "came_back" Event "packets of TCP connections that began past strict connection tracking and had to go through the stack, which may drop them",
    Revalidated "revalidated" Event "flow directions checked again, once a tick or after a change",
    Expired "expired" Event "flows found idle for longer than their timeout",
    Masqueraded "masqueraded" Event "flows given a source address and port of an uplink",
    PortChanged "port_changed" Event "masqueraded flows that could not keep their source port",
    HostPort "host_port" Event "flows to a host port sent to the container that serves it",
    HostTupleMoved "host_tuple_moved" Event "connections of the host given another port because a pod's flow holds the tuple",
    HeldFragment "held_fragment" Event "later fragments kept until their first comes",
    ReleasedFragment "released_fragment" Event "later fragments sent on behind their first, which came after them",
    OverQuota "over_quota" Event "flows not learned because their pod has too many half-open ones",
    MadeRoom "made_room" Event "flows that were no conversation yet, taken out of a full table for another",
    TableFull "table_full" Event "flows not remembered because the table is full of others that live",
    OthersPort "others_port" Event "flows of other containers that the host's own stack translates, noted so that their ports are left alone",
    DropSourceAddress "drop_source_address" Drop "a pod sent from an address that is not its own",
    DropSourceMac "drop_source_mac" Drop "a pod sent from a MAC that is not its own",
    DropRouterAdvertisement "drop_router_advertisement" Drop "a pod sent a router advertisement",
    DropRedirect "drop_redirect" Drop "a pod sent an ICMP redirect",
    DropDhcpServer "drop_dhcp_server" Drop "a pod answered as a DHCP server",
    DropEtherType "drop_ether_type" Drop "a pod sent something other than IPv4, IPv6 or ARP",
    DropVlanTag "drop_vlan_tag" Drop "a pod sent a frame with a VLAN tag",
    DropArp "drop_arp" Drop "a pod sent ARP in another's name",
    DropMalformed "drop_malformed" Drop "a packet too short for the headers it claims, where it had to be translated or checked",
    DropUntranslated "drop_untranslated" Drop "a packet to be masqueraded, of a kind that can't be translated, by a device of such a kind, or of a container that has gone",
    DropNoAddress "drop_no_address" Drop "a packet to be masqueraded, by an uplink without an address of its family",
    DropNoPort "drop_no_port" Drop "a packet to be masqueraded, or of the node or of a pod itself to a host port, when no free port was found",
    DropFlowQuota "drop_flow_quota" Drop "a packet to be masqueraded, or to a host port, of a pod with too many half-open flows",
    DropNoFlow "drop_no_flow" Drop "a reply of a pod to a flow that is not known, where it would have shown the pod's address or was for a process of the node, an ICMP error of a pod about a packet that was not for it, a packet from outside in the name of a pod that has asked for a host port, or one to be masqueraded, in a pod's name by another's device, on a connection that ends on the bypass",
    DropFragment "drop_fragment" Drop "a fragment that had to be translated: a later one whose first was not seen, or one of an SCTP packet that needs another port",
    DropMapFull "drop_map_full" Drop "a flow that could not be stored",
    DropRemoved "drop_removed" Drop "a packet whose flow was removed while it was on its way",
    DropTooLarge "drop_too_large" Drop "a packet of the host to a host port, larger than the container's MTU",
    DropTunnel "drop_tunnel" Drop "a pod sent a packet of a tunnel that its node is an end of",
}

/// Elements of the array `COUNTERS`; room to grow without a new layout.
pub const COUNTER_SLOTS: u32 = 64;

const _: () = assert!(Counter::ALL.len() <= COUNTER_SLOTS as usize);

use super::*;

use std::net::IpAddr;

use underpass_netlink::{Mac, route::Route};

fn link(index: u32, name: &str) -> Link {
    Link {
        index,
        name: name.to_owned(),
        mac: Mac([2, 0, 0, 0, 0, 1]),
        mtu: 1500,
        up: true,
        ethernet: true,
        ..Link::default()
    }
}

fn address(index: u32, net: &str) -> Address {
    Address {
        index,
        net: net.parse().expect("an address"),
        global: true,
        secondary: false,
        has_lifetime: false,
        unusable: false,
    }
}

fn default_route(index: u32, dst: &str, source: Option<&str>) -> Installed {
    let mut route = Route::new(dst.parse().expect("a prefix"));
    route.source = source.map(|addr| addr.parse().expect("an address"));
    Installed {
        route,
        index,
        advertised: false,
    }
}

fn names(uplinks: &[Uplink]) -> Vec<&str> {
    uplinks.iter().map(|uplink| uplink.name.as_str()).collect()
}

/// A network that names a bridge's port has the bridge while another network's programs are there.
#[test]
fn a_part_of_what_another_network_has_is_that() {
    let mut bridge = link(2, "br0");
    bridge.kind = Some(InfoKind::Bridge);
    let port = Link {
        controller: Some(2),
        ..link(3, "eth0")
    };
    let patterns = [Glob::new("eth0".to_owned())];
    for (known, expected) in [
        (&[][..], &["eth0"][..]),
        (&[2], &["br0"]),
        (&[3], &["eth0"]),
    ] {
        let surroundings = Surroundings {
            links: &[bridge.clone(), port.clone()],
            addresses: &[],
            routes: &[],
            rp_filter: 0,
            known,
        };
        assert_eq!(
            names(&surroundings.uplinks(Some(&patterns))),
            expected,
            "{known:?}"
        );
    }
}

#[test]
fn uplinks_are_found_by_addresses_and_default_routes() {
    let mut lo = link(1, "lo");
    lo.loopback = true;
    let mut bridge = link(3, "docker0");
    bridge.kind = Some(InfoKind::Bridge);
    let mut outward = link(4, "br0");
    outward.kind = Some(InfoKind::Bridge);
    let mut dummy = link(5, "kube-ipvs0");
    dummy.kind = Some(InfoKind::Dummy);
    let mut ours = link(6, "veth0123456789a");
    ours.alias = Some("underpass:n1:c1:eth0".to_owned());
    let mut veth = link(9, "veth1");
    veth.kind = Some(InfoKind::Veth);
    let mut node = link(10, "veth2");
    node.kind = Some(InfoKind::Veth);
    let links = [
        lo,
        link(2, "eth0"),
        bridge,
        outward,
        dummy,
        ours,
        link(7, "eth1"),
        link(8, "ppp0"),
        veth,
        node,
        link(11, "wg0"),
    ];
    let mut inner = address(7, "169.254.7.7/16");
    inner.global = false;
    let surroundings = Surroundings {
        links: &links,
        addresses: &[
            address(1, "192.0.2.99/32"),
            address(2, "192.0.2.1/24"),
            address(3, "172.17.0.1/16"),
            address(5, "10.96.0.1/32"),
            address(6, "10.1.2.1/32"),
            address(9, "10.88.0.1/32"),
            address(10, "192.0.2.5/24"),
            address(11, "10.8.0.2/32"),
            inner,
        ],
        routes: &[
            default_route(4, "::/0", None),
            default_route(8, "0.0.0.0/0", None),
        ],
        rp_filter: 0,
        known: &[],
    };
    assert_eq!(
        names(&surroundings.uplinks(None)),
        ["eth0", "br0", "ppp0", "veth2", "wg0"]
    );
    let patterns = [
        Glob::new("docker*".to_owned()),
        Glob::new("eth1".to_owned()),
        Glob::new("lo".to_owned()),
    ];
    assert_eq!(
        names(&surroundings.uplinks(Some(&patterns))),
        ["docker0", "eth1"]
    );
    assert_eq!(names(&surroundings.uplinks(Some(&[]))), [""; 0]);
}

#[test]
fn masquerade_uses_the_address_that_the_kernel_would_choose() {
    let mut secondary = address(2, "192.0.2.9/24");
    secondary.secondary = true;
    let mut tentative = address(2, "2001:db8::9/64");
    tentative.unusable = true;
    let mut link_local = address(2, "fe80::1/64");
    link_local.global = false;
    let links = [link(2, "eth0")];
    let addresses = [
        secondary,
        link_local,
        tentative,
        address(2, "192.0.2.1/24"),
        address(2, "192.0.2.2/24"),
        address(2, "2001:db8::1/64"),
    ];
    let of = |routes: &[Installed]| {
        let surroundings = Surroundings {
            links: &links,
            addresses: &addresses,
            routes,
            rp_filter: 0,
            known: &[],
        };
        let uplinks = surroundings.uplinks(None);
        [uplinks[0].device.masquerade4, uplinks[0].device.masquerade6]
            .map(|addr| IpAddr::from(addr).to_string())
    };
    assert_eq!(of(&[]), ["192.0.2.1", "2001:db8::1"]);
    let preferred = [
        default_route(2, "0.0.0.0/0", Some("192.0.2.2")),
        default_route(2, "::/0", Some("2001:db8::7")),
    ];
    assert_eq!(of(&preferred), ["192.0.2.2", "2001:db8::7"]);
    // Only the first of several is taken.
    let another = [default_route(2, "::/0", None), preferred[1].clone()];
    assert_eq!(of(&another), ["192.0.2.1", "2001:db8::1"]);
}

#[test]
fn a_link_without_ethernet_is_marked() {
    let mut tunnel = link(2, "wg0");
    tunnel.ethernet = false;
    tunnel.mtu = 1420;
    let surroundings = Surroundings {
        links: &[tunnel, link(3, "eth0")],
        addresses: &[address(2, "10.8.0.1/24"), address(3, "192.0.2.1/24")],
        routes: &[],
        rp_filter: 0,
        known: &[],
    };
    let uplinks = surroundings.uplinks(None);
    assert_eq!(uplinks[0].device.flags, device::LAYER3);
    assert_eq!(uplinks[1].device.flags, 0);
    assert_eq!(uplinks[0].device.masquerade6, Addr::default());
}

#[test]
fn tunnels_and_bridges_are_marked() {
    let kinds = [
        (None, 0),
        (Some(InfoKind::Vlan), 0),
        (Some(InfoKind::Vxlan), device::TUNNEL),
        (Some(InfoKind::Geneve), device::TUNNEL),
        (Some(InfoKind::Bridge), device::BRIDGE),
    ];
    for (kind, flags) in kinds {
        let mut uplink = link(2, "out");
        uplink.kind = kind.clone();
        let surroundings = Surroundings {
            links: &[uplink],
            addresses: &[address(2, "10.244.1.0/32")],
            // Without it a bridge is none.
            routes: &[default_route(2, "0.0.0.0/0", None)],
            rp_filter: 0,
            known: &[],
        };
        assert_eq!(
            surroundings.uplinks(None)[0].device.flags,
            flags,
            "{kind:?}"
        );
    }
}

#[test]
fn a_device_on_a_bridge_is_marked_as_the_bridge() {
    let on = |index, kind, below, peer_netns| Link {
        kind: Some(kind),
        peer: Some(below),
        peer_netns,
        ..link(index, "out")
    };
    let flags = |links: &[Link]| {
        let surroundings = Surroundings {
            links,
            addresses: &[address(9, "192.0.2.1/24")],
            routes: &[],
            rp_filter: 0,
            known: &[],
        };
        surroundings.uplinks(None)[0].device.flags
    };
    let bridge = || Link {
        kind: Some(InfoKind::Bridge),
        ..link(2, "br0")
    };
    for kind in [InfoKind::Vlan, InfoKind::MacVlan, InfoKind::IpVlan] {
        assert_eq!(
            flags(&[bridge(), on(9, kind.clone(), 2, None)]),
            device::BRIDGE
        );
        // In a VLAN of a VLAN, and listed in another order.
        let nested = [
            on(9, kind.clone(), 4, None),
            on(4, InfoKind::Vlan, 2, None),
            bridge(),
        ];
        assert_eq!(flags(&nested), device::BRIDGE);
        // What has this number here is another device.
        assert_eq!(flags(&[bridge(), on(9, kind.clone(), 2, Some(0))]), 0);
        // A card below, nothing known, itself.
        assert_eq!(flags(&[link(2, "eth0"), on(9, kind.clone(), 2, None)]), 0);
        assert_eq!(flags(&[on(9, kind.clone(), 2, None)]), 0);
        assert_eq!(flags(&[on(9, kind, 9, None)]), 0);
    }
    // The outer packets of a tunnel come by a bridge; the inner ones are new.
    let gre = on(9, InfoKind::GreTun, 2, None);
    assert_eq!(flags(&[bridge(), gre]), 0);
}

#[test]
fn a_vpn_makes_packets_small_only_where_it_is_the_way_out() {
    let mut vpn = link(2, "tailscale0");
    vpn.ethernet = false;
    vpn.mtu = 1280;
    let links = [
        vpn,
        link(3, "eth0"),
        Link {
            mtu: 9000,
            ..link(4, "eth1")
        },
    ];
    let addresses = [
        address(2, "100.64.0.1/32"),
        address(3, "192.0.2.1/24"),
        address(4, "198.51.100.1/24"),
    ];
    let inherited = |links: &[Link], routes: &[Installed]| {
        let surroundings = Surroundings {
            links,
            addresses: &addresses,
            routes,
            rp_filter: 0,
            known: &[],
        };
        inherited_mtu(&surroundings.uplinks(None)).map(|inherited| inherited.mtu)
    };
    let by = |index| default_route(index, "0.0.0.0/0", None);
    assert_eq!(inherited(&links, &[by(3)]), Some(1500));
    assert_eq!(inherited(&links, &[by(4)]), Some(9000));
    assert_eq!(inherited(&links, &[by(3), by(4)]), Some(1500));
    assert_eq!(inherited(&links, &[by(2)]), Some(1280));
    // One family's way out is as good as the other's.
    let mixed = [by(4), default_route(2, "::/0", None)];
    assert_eq!(inherited(&links, &mixed), Some(1280));
    // Without any way out.
    assert_eq!(inherited(&links, &[]), Some(1500));
    assert_eq!(inherited(&links[..1], &[]), Some(1280));
    assert_eq!(inherited(&[], &[]), None);
}

#[test]
fn the_larger_reverse_path_filter_counts_and_only_1_is_strict() {
    for (all, own, strict) in [
        (0, 0, false),
        (1, 0, true),
        (0, 1, true),
        (1, 1, true),
        (2, 1, false),
        (1, 2, false),
    ] {
        let surroundings = Surroundings {
            links: &[Link {
                rp_filter: own,
                ..link(2, "eth0")
            }],
            addresses: &[address(2, "192.0.2.1/24")],
            routes: &[],
            rp_filter: all,
            known: &[],
        };
        let flags = surroundings.uplinks(None)[0].device.flags;
        let found = flags & device::STRICT_REVERSE_PATH != 0;
        assert_eq!(found, strict, "all {all}, own {own}");
    }
}

#[test]
fn a_link_in_a_vrf_is_marked() {
    let mut enslaved = link(2, "eth0");
    enslaved.controller = Some(4);
    enslaved.in_vrf = true;
    let mut bonded = link(3, "eth1");
    bonded.controller = Some(5);
    let surroundings = Surroundings {
        links: &[enslaved, bonded],
        addresses: &[address(2, "192.0.2.1/24"), address(3, "198.51.100.1/24")],
        routes: &[],
        rp_filter: 0,
        known: &[],
    };
    let uplinks = surroundings.uplinks(None);
    assert_eq!(uplinks[0].device.flags, device::VRF);
    assert_eq!(uplinks[1].device.flags, 0);
}

#[test]
fn addresses_of_dummy_devices_are_those_of_services() {
    let dummy = |index, name| Link {
        kind: Some(InfoKind::Dummy),
        ..link(index, name)
    };
    // Those of node-local DNS caches may be valid on the host only.
    let mut local = address(5, "169.254.20.10/32");
    local.global = false;
    let surroundings = Surroundings {
        links: &[
            link(2, "eth0"),
            dummy(4, "kube-ipvs0"),
            dummy(5, "nodelocaldns"),
        ],
        addresses: &[
            address(2, "192.0.2.1/24"),
            address(4, "10.96.0.1/32"),
            address(4, "fd00:96::1/128"),
            local,
        ],
        routes: &[],
        rp_filter: 0,
        known: &[],
    };
    let services: Vec<_> = surroundings.service_addresses();
    let expected = ["10.96.0.1", "fd00:96::1", "169.254.20.10"];
    assert_eq!(
        services,
        expected.map(|addr| addr.parse::<IpAddr>().expect("an address"))
    );
    assert_eq!(names(&surroundings.uplinks(None)), ["eth0"]);
}

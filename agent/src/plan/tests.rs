use super::*;

mod believed;

pub(super) fn node(addresses: &[&str], ranges: &[&str]) -> Peer {
    Peer {
        addresses: addresses
            .iter()
            .map(|text| text.parse().expect("an address"))
            .collect(),
        pod_cidrs: ranges.iter().map(|text| net(text)).collect(),
        registered: 0,
    }
}

pub(super) fn net(text: &str) -> IpNet {
    text.parse().expect("a range")
}

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

pub(super) fn links() -> Vec<OnLink> {
    ["192.0.2.1/24", "2001:db8::1/64"]
        .map(|text| OnLink {
            net: net(text).trunc(),
            own: net(text).addr(),
            device: 2,
            mtu: 1500,
            is_bridge: false,
        })
        .to_vec()
}

fn planned(nodes: &BTreeMap<String, Peer>, routing: Routing) -> Result<Desired, String> {
    within(nodes, routing, &[])
}

fn within(
    nodes: &BTreeMap<String, Peer>,
    routing: Routing,
    cluster: &[IpNet],
) -> Result<Desired, String> {
    plan(&Inputs {
        own: "a",
        nodes,
        links: &links(),
        routing,
        cluster,
    })
}

pub(super) fn nodes(list: &[(&str, Peer)]) -> BTreeMap<String, Peer> {
    list.iter()
        .map(|(name, peer)| ((*name).to_owned(), peer.clone()))
        .collect()
}

pub(super) fn myself() -> Peer {
    node(
        &["192.0.2.1", "2001:db8::1"],
        &["10.1.0.0/24", "fd00:1::/64"],
    )
}

#[test]
fn a_neighbour_gets_direct_routes() {
    let peer = node(
        &["192.0.2.2", "2001:db8::2"],
        &["10.2.0.0/24", "fd00:2::/64"],
    );
    let nodes = nodes(&[("a", myself()), ("b", peer)]);
    let desired = planned(&nodes, Routing::Auto).expect("a plan");
    let direct = |via| Way::Direct {
        via: address(via),
        device: 2,
    };
    let expected = [
        (net("10.1.0.0/24"), Way::Own),
        (net("10.2.0.0/24"), direct("192.0.2.2")),
        (net("fd00:1::/64"), Way::Own),
        (net("fd00:2::/64"), direct("2001:db8::2")),
    ];
    assert_eq!(desired.routes, BTreeMap::from(expected));
    assert_eq!(desired.remarks, Vec::<String>::new());
    // It may be sent what others tunnel, though it tunnels nothing.
    assert!(desired.tunnel.is_some() && desired.forwarding.is_empty());
}

#[test]
fn a_node_beyond_a_router_gets_both_families_through_one_tunnel() {
    let peer = node(
        &["198.51.100.2", "2001:db8:5::2"],
        &["10.2.0.0/24", "fd00:2::/64"],
    );
    let nodes = nodes(&[("a", myself()), ("b", peer)]);
    let desired = planned(&nodes, Routing::Auto).expect("a plan");
    let device = desired.tunnel.expect("a device");
    assert_eq!((device.outside, device.mtu), (address("192.0.2.1"), 1450));
    assert_eq!(
        device.addresses,
        BTreeSet::from([net("10.1.0.0/32"), net("fd00:1::/128")])
    );
    assert_eq!(
        desired.routes[&net("10.2.0.0/24")],
        Way::Tunnel {
            via: address("10.2.0.0")
        }
    );
    assert_eq!(
        desired.routes[&net("fd00:2::/64")],
        Way::Tunnel {
            via: address("fd00:2::")
        }
    );
    // By IPv4 a gateway that is said to be on the link needs no route.
    assert_eq!(desired.routes[&net("fd00:2::/128")], Way::Gateway);
    assert!(!desired.routes.contains_key(&net("10.2.0.0/32")));
    let remote = address("198.51.100.2");
    assert_eq!(desired.forwarding, BTreeSet::from([(mac(remote), remote)]));
    assert_eq!(desired.neighbours.len(), 2);
}

#[test]
fn a_family_that_is_not_on_the_link_is_tunnelled_and_the_other_is_not() {
    let peer = node(&["192.0.2.2"], &["10.2.0.0/24", "fd00:2::/64"]);
    let nodes = nodes(&[("a", myself()), ("b", peer)]);
    let desired = planned(&nodes, Routing::Auto).expect("a plan");
    assert!(matches!(
        desired.routes[&net("10.2.0.0/24")],
        Way::Direct { .. }
    ));
    assert!(matches!(
        desired.routes[&net("fd00:2::/64")],
        Way::Tunnel { .. }
    ));
}

#[test]
fn an_ipv6_outside_leaves_less_room() {
    let us = node(&["2001:db8::1"], &["10.1.0.0/24"]);
    let peer = node(&["2001:db8:5::2"], &["10.2.0.0/24"]);
    let desired = planned(&nodes(&[("a", us), ("b", peer)]), Routing::Auto).expect("a plan");
    assert_eq!(desired.tunnel.expect("a device").mtu, 1430);
}

#[test]
fn a_list_without_ourselves_is_not_believed() {
    let peer = node(&["192.0.2.2"], &["10.2.0.0/24"]);
    for nodes in [nodes(&[("b", peer)]), BTreeMap::new()] {
        let why = planned(&nodes, Routing::Auto).expect_err("no plan");
        assert!(why.contains("no Node a"), "{why}");
    }
}

#[test]
fn a_node_of_ours_without_an_address_is_believed_of_a_cloud_alone() {
    let ranges = ["10.1.0.0/24", "fd00:1::/64"];
    let nodes = nodes(&[
        ("a", node(&[], &ranges)),
        ("b", node(&["192.0.2.2"], &["10.2.0.0/24"])),
    ]);
    for routing in [Routing::Auto, Routing::Vxlan] {
        let why = planned(&nodes, routing).expect_err("no plan");
        assert!(why.contains("no InternalIP"), "{why}");
    }
    let desired = planned(&nodes, Routing::Cloud).expect("a plan");
    assert_eq!(desired.routes.len(), ranges.len());
}

#[test]
fn of_ranges_that_are_not_known_yet_nothing_is_withdrawn() {
    let of = |ranges: &[&str]| nodes(&[("a", node(&["192.0.2.1"], ranges))]);
    for routing in [Routing::Auto, Routing::Vxlan, Routing::Cloud] {
        let keeps = |ranges| planned(&of(ranges), routing).expect("a plan").keeps_own;
        assert!(keeps(&[]) && !keeps(&["10.1.0.0/24"]));
    }
}

#[test]
fn a_cloud_routes_by_itself() {
    let peer = node(&["198.51.100.2"], &["10.2.0.0/24"]);
    let nodes = nodes(&[("a", myself()), ("b", peer)]);
    let desired = planned(&nodes, Routing::Cloud).expect("a plan");
    assert_eq!(
        desired.routes.into_values().collect::<Vec<_>>(),
        [Way::Own, Way::Own]
    );
    assert_eq!(desired.tunnel, None);
}

#[test]
fn macs_are_of_one_station_and_locally_administered() {
    for text in ["192.0.2.1", "192.0.2.2", "2001:db8::1"] {
        assert_eq!(mac(address(text))[0] & 3, 2, "{text}");
    }
    assert_ne!(mac(address("192.0.2.1")), mac(address("192.0.2.2")));
}

#[test]
fn an_outside_of_the_other_family_is_no_way() {
    let ranges = ["10.2.0.0/24", "fd00:2::/64"];
    let peer = node(&["2001:db8:5::2", "198.51.100.2"], &ranges);
    let nodes = nodes(&[("a", myself()), ("b", peer)]);
    let desired = planned(&nodes, Routing::Auto).expect("a plan");
    for range in ranges {
        assert!(!desired.routes.contains_key(&net(range)), "{range}");
    }
    assert_eq!(desired.remarks.len(), 2);
    assert!(
        desired.remarks[0].contains("order of addresses"),
        "{:?}",
        desired.remarks
    );
}

#[test]
fn vxlan_can_be_asked_for() {
    let nodes = nodes(&[
        ("a", myself()),
        ("b", node(&["192.0.2.2"], &["10.2.0.0/24"])),
    ]);
    let desired = planned(&nodes, Routing::Vxlan).expect("a plan");
    assert!(matches!(
        desired.routes[&net("10.2.0.0/24")],
        Way::Tunnel { .. }
    ));
}

#[test]
fn a_link_too_small_for_vxlan_has_direct_routes_alone() {
    let nodes = nodes(&[
        ("a", myself()),
        ("b", node(&["192.0.2.2"], &["10.2.0.0/24"])),
        ("c", node(&["198.51.100.5"], &["10.3.0.0/24"])),
    ]);
    let desired = by_small_link(&nodes, 600);
    assert!(desired.routes.contains_key(&net("10.2.0.0/24")));
    assert!(desired.tunnel.is_none() && !desired.routes.contains_key(&net("10.3.0.0/24")));
    assert_eq!(desired.remarks.len(), 1, "{:?}", desired.remarks);
}

#[test]
fn a_link_too_small_for_ipv6_through_vxlan_takes_ipv4() {
    let dual = |own: &str, four: &str, six: &str| node(&[own], &[four, six]);
    let nodes = nodes(&[
        ("a", dual("192.0.2.1", "10.1.0.0/24", "fd00:1::/64")),
        ("c", dual("198.51.100.5", "10.3.0.0/24", "fd00:3::/64")),
    ]);
    let desired = by_small_link(&nodes, 1280);
    assert_eq!(
        desired.mtu(Routing::Auto, None),
        Some(1280),
        "pods have IPv6"
    );
    let device = desired.tunnel.expect("a device");
    assert_eq!(device.mtu, 1230);
    assert_eq!(device.addresses, [net("10.1.0.0/32")].into());
    assert!(matches!(
        desired.routes[&net("10.3.0.0/24")],
        Way::Tunnel { .. }
    ));
    assert!(!desired.routes.contains_key(&net("fd00:3::/64")));
    assert_eq!((desired.unrouted, desired.remarks.len()), (1, 1));
}

/// The plan of node "a", which has one link, with this MTU.
fn by_small_link(nodes: &BTreeMap<String, Peer>, mtu: u32) -> Desired {
    let links = [OnLink {
        net: net("192.0.2.0/24"),
        own: address("192.0.2.1"),
        device: 2,
        mtu,
        is_bridge: false,
    }];
    let inputs = Inputs {
        own: "a",
        nodes,
        links: &links,
        routing: Routing::Auto,
        cluster: &[],
    };
    plan(&inputs).expect("a plan")
}

#[test]
fn an_address_on_no_link_has_the_mtu_of_those_that_lead_to_others() {
    let link = |text: &str, mtu| OnLink {
        net: net(text).trunc(),
        own: net(text).addr(),
        device: 3,
        mtu,
        is_bridge: false,
    };
    for (outside, overhead) in [("203.0.113.1", 50), ("2001:db8:77::1", 70)] {
        let nodes = nodes(&[("a", node(&[outside], &["10.1.0.0/24"]))]);
        let mtu = |others: &[OnLink]| {
            let inputs = Inputs {
                own: "a",
                nodes: &nodes,
                links: &[&links(), others].concat(),
                routing: Routing::Auto,
                cluster: &[],
            };
            let desired = plan(&inputs).expect("a plan");
            desired.tunnel.expect("a device").mtu
        };
        assert_eq!(mtu(&[]), 1500 - overhead);
        assert_eq!(mtu(&[link("10.9.0.1/24", 1400)]), 1400 - overhead);
        // Neither a single address, as a VPN's and those of containers are, nor a link too small.
        for other in ["100.64.0.7/32", "2001:db8:9::7/128"] {
            assert_eq!(mtu(&[link(other, 1400)]), 1500 - overhead);
        }
        assert_eq!(mtu(&[link("10.9.0.1/24", 1300)]), 1500 - overhead);
        // By IPv6 routers are found at link-local addresses, where a link has no others.
        assert_eq!(mtu(&[link("fe80::1/64", 1400)]), 1400 - overhead);
        // As clouds give it to a card, alone.
        let alone = IpNet::from(address(outside)).to_string();
        assert_eq!(mtu(&[link(&alone, 1450)]), 1450 - overhead);
    }
}

#[test]
fn pods_have_the_tunnels_mtu_where_it_leads_to_another_node() {
    for (outside, distant, mtu) in [
        ("192.0.2.1", "198.51.100.5", 1450),
        ("2001:db8::1", "2001:db8:5::1", 1430),
    ] {
        let myself = node(&[outside], &["10.1.0.0/24", "fd00:1::/64"]);
        let alone = nodes(&[("a", myself.clone())]);
        let of = |nodes, routing| {
            let desired = planned(nodes, routing).expect("a plan");
            desired.mtu(routing, None)
        };
        assert_eq!(of(&alone, Routing::Vxlan), Some(mtu));
        assert_eq!(of(&alone, Routing::Auto), None);
        let both = nodes(&[("a", myself), ("b", node(&[distant], &["10.2.0.0/24"]))]);
        assert_eq!(of(&both, Routing::Auto), Some(mtu));
        assert_eq!(of(&both, Routing::Cloud), None);
    }
}

#[test]
fn pods_have_no_more_than_the_way_to_the_world_takes() {
    const IPV6: &str = "fd00:1::/64";
    let far = node(&["198.51.100.5"], &["10.2.0.0/24"]);
    let near = node(&["192.0.2.2"], &["10.2.0.0/24"]);
    let of = |ranges: &[&str], peer: &Peer, world| {
        let nodes = nodes(&[("a", node(&["192.0.2.1"], ranges)), ("b", peer.clone())]);
        let desired = planned(&nodes, Routing::Auto).expect("a plan");
        desired.mtu(Routing::Auto, world)
    };
    for (world, mtu) in [
        (None, 1450),
        (Some(1500), 1450),
        (Some(1420), 1420),
        (Some(1450), 1450),
    ] {
        for ranges in [&["10.1.0.0/24"][..], &[IPV6], &["10.1.0.0/24", IPV6]] {
            assert_eq!(of(ranges, &far, world), Some(mtu), "{world:?}");
        }
        assert_eq!(of(&["10.1.0.0/24"], &near, world), None, "the uplinks'");
    }
    // As small as it may be.
    assert_eq!(of(&["10.1.0.0/24"], &far, Some(1000)), Some(1000));
    assert_eq!(of(&["10.1.0.0/24", IPV6], &far, Some(1000)), Some(1280));
}

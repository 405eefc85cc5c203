use super::*;

fn node(addresses: &[&str], ranges: &[&str]) -> Peer {
    Peer {
        addresses: addresses
            .iter()
            .map(|text| text.parse().expect("an address"))
            .collect(),
        pod_cidrs: ranges.iter().map(|text| net(text)).collect(),
    }
}

fn net(text: &str) -> IpNet {
    text.parse().expect("a range")
}

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn links() -> Vec<OnLink> {
    ["192.0.2.1/24", "2001:db8::1/64"]
        .map(|text| OnLink {
            net: net(text),
            device: 2,
            mtu: 1500,
        })
        .to_vec()
}

fn nodes(list: &[(&str, Peer)]) -> BTreeMap<String, Peer> {
    list.iter()
        .map(|(name, peer)| ((*name).to_owned(), peer.clone()))
        .collect()
}

fn myself() -> Peer {
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
    let desired = plan("a", &nodes, &links(), Routing::Auto).expect("a plan");
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
    assert_eq!((desired.tunnel, desired.remarks), (None, vec![]));
}

#[test]
fn a_node_beyond_a_router_gets_both_families_through_one_tunnel() {
    let peer = node(
        &["198.51.100.2", "2001:db8:5::2"],
        &["10.2.0.0/24", "fd00:2::/64"],
    );
    let nodes = nodes(&[("a", myself()), ("b", peer)]);
    let desired = plan("a", &nodes, &links(), Routing::Auto).expect("a plan");
    let device = desired.tunnel.expect("a device");
    assert_eq!((device.local, device.mtu), (address("192.0.2.1"), 1450));
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
    let remote = address("198.51.100.2");
    assert_eq!(desired.forwarding, BTreeSet::from([(mac(remote), remote)]));
    assert_eq!(desired.neighbours.len(), 2);
}

#[test]
fn a_family_that_is_not_on_the_link_is_tunnelled_and_the_other_is_not() {
    let peer = node(&["192.0.2.2"], &["10.2.0.0/24", "fd00:2::/64"]);
    let nodes = nodes(&[("a", myself()), ("b", peer)]);
    let desired = plan("a", &nodes, &links(), Routing::Auto).expect("a plan");
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
    let desired = plan(
        "a",
        &nodes(&[("a", us), ("b", peer)]),
        &links(),
        Routing::Auto,
    )
    .expect("a plan");
    assert_eq!(desired.tunnel.expect("a device").mtu, 1430);
}

#[test]
fn a_list_without_ourselves_is_not_believed() {
    let peer = node(&["192.0.2.2"], &["10.2.0.0/24"]);
    assert_eq!(
        plan("a", &nodes(&[("b", peer)]), &links(), Routing::Auto),
        None
    );
    assert_eq!(plan("a", &BTreeMap::new(), &links(), Routing::Auto), None);
}

#[test]
fn a_cloud_routes_by_itself() {
    let peer = node(&["198.51.100.2"], &["10.2.0.0/24"]);
    let nodes = nodes(&[("a", myself()), ("b", peer)]);
    let desired = plan("a", &nodes, &links(), Routing::Cloud).expect("a plan");
    assert_eq!(
        desired.routes.into_values().collect::<Vec<_>>(),
        [Way::Own, Way::Own]
    );
    assert_eq!(desired.tunnel, None);
}

#[test]
fn a_range_of_two_nodes_stays_with_the_first_and_ours_with_us() {
    let taken = node(&["192.0.2.2"], &["10.2.0.0/24"]);
    let second = node(&["192.0.2.3"], &["10.2.0.0/23"]);
    let thief = node(&["192.0.2.4"], &["10.1.0.0/24"]);
    let nodes = nodes(&[("a", myself()), ("b", taken), ("c", second), ("d", thief)]);
    let desired = plan("a", &nodes, &links(), Routing::Auto).expect("a plan");
    assert_eq!(desired.routes[&net("10.1.0.0/24")], Way::Own);
    assert!(!desired.routes.contains_key(&net("10.2.0.0/23")));
    assert_eq!(desired.remarks.len(), 2, "{:?}", desired.remarks);
}

#[test]
fn macs_are_of_one_station_and_locally_administered() {
    for text in ["192.0.2.1", "192.0.2.2", "2001:db8::1"] {
        assert_eq!(mac(address(text))[0] & 3, 2, "{text}");
    }
    assert_ne!(mac(address("192.0.2.1")), mac(address("192.0.2.2")));
}

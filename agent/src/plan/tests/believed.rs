use super::*;

#[test]
fn a_range_of_two_nodes_stays_with_the_older_and_ours_with_us() {
    let taken = node(&["192.0.2.2"], &["10.2.0.0/24"]);
    let second = node(&["192.0.2.3"], &["10.2.0.0/23"]);
    let thief = node(&["192.0.2.4"], &["10.1.0.0/24"]);
    let nodes = nodes(&[("a", myself()), ("b", taken), ("c", second), ("d", thief)]);
    let desired = planned(&nodes, Routing::Auto).expect("a plan");
    assert_eq!(desired.routes[&net("10.1.0.0/24")], Way::Own);
    assert!(!desired.routes.contains_key(&net("10.2.0.0/23")));
    assert_eq!(desired.remarks.len(), 2, "{:?}", desired.remarks);
}

#[test]
fn who_comes_later_takes_nothing_from_anybody() {
    let old = |peer: Peer| Peer {
        registered: 1,
        ..peer
    };
    let young = |peer: Peer| Peer {
        registered: 2,
        ..peer
    };
    let nodes = nodes(&[
        ("a", old(myself())),
        ("a0", young(node(&["192.0.2.9"], &["10.0.0.0/8"]))),
        ("b", old(node(&["192.0.2.2"], &["10.2.0.0/24"]))),
        (
            "c",
            young(node(&["192.0.2.3"], &["10.2.0.128/25", "10.1.0.0/16"])),
        ),
    ]);
    let desired = planned(&nodes, Routing::Auto).expect("a plan");
    let ranges: Vec<String> = desired.routes.keys().map(ToString::to_string).collect();
    assert_eq!(ranges, ["10.1.0.0/24", "10.2.0.0/24", "fd00:1::/64"]);
    assert_eq!(desired.remarks.len(), 3, "{:?}", desired.remarks);
}

/// Every node believes the same: two that both believe themselves give the same addresses to pods.
#[test]
fn our_range_takes_nothing_from_an_older_node() {
    for range in ["10.2.0.0/24", "10.2.0.0/25", "10.0.0.0/9"] {
        let young = Peer {
            registered: 2,
            ..node(&["192.0.2.1", "2001:db8::1"], &[range, "fd00:1::/64"])
        };
        let old = Peer {
            registered: 1,
            ..node(&["192.0.2.2"], &["10.2.0.0/24"])
        };
        let nodes = nodes(&[("a", young), ("b", old)]);
        let desired = planned(&nodes, Routing::Auto).expect("a plan");
        let [error] = &desired.errors[..] else {
            panic!("{range}: {:?}", desired.errors);
        };
        assert!(error.contains("Node b has 10.2.0.0/24"), "{error}");
        let way = desired.routes[&net("10.2.0.0/24")];
        assert!(matches!(way, Way::Direct { .. }), "{range}: {way:?}");
        assert_eq!(desired.routes[&net("fd00:1::/64")], Way::Own);
    }
}

#[test]
fn a_range_in_which_nodes_are_is_not_believed() {
    for range in [
        "192.0.2.0/24",
        "192.0.2.2/32",
        "198.51.100.0/28",
        "192.0.0.0/8",
        "2001:db8::/64",
    ] {
        let nodes = nodes(&[
            ("a", myself()),
            ("b", node(&["192.0.2.2", "2001:db8::2"], &["10.2.0.0/24"])),
            ("c", node(&["198.51.100.5"], &["10.3.0.0/24"])),
            (
                "d",
                Peer {
                    registered: 1,
                    ..node(&["192.0.2.7"], &[range])
                },
            ),
        ]);
        let desired = planned(&nodes, Routing::Auto).expect("a plan");
        assert!(!desired.routes.contains_key(&net(range)), "{range}");
        assert_eq!(desired.remarks.len(), 1, "{:?}", desired.remarks);
    }
    // A small part of the link without a node on it is a common place for pods.
    let nodes = BTreeMap::from([
        ("a".to_owned(), myself()),
        ("b".to_owned(), node(&["192.0.2.2"], &["192.0.2.128/25"])),
    ]);
    let desired = planned(&nodes, Routing::Auto).expect("a plan");
    assert!(desired.routes.contains_key(&net("192.0.2.128/25")));
}

#[test]
fn an_address_takes_no_range_of_an_older_node() {
    let range = net("10.3.0.0/24");
    let registered = |peer: Peer, registered| Peer { registered, ..peer };
    let plan_with = |since: i64| {
        let nodes = nodes(&[
            ("a", registered(myself(), 9)),
            ("b", registered(node(&["192.0.2.3"], &["10.3.0.0/24"]), 5)),
            (
                "c",
                registered(node(&["192.0.2.4", "10.3.0.7"], &["10.4.0.0/24"]), since),
            ),
        ]);
        planned(&nodes, Routing::Auto).expect("a plan")
    };
    // Of two of the same second nobody knows which was first.
    for since in [5, 6] {
        let younger = plan_with(since);
        assert!(younger.routes.contains_key(&range), "{:?}", younger.remarks);
    }
    let older = plan_with(4);
    assert!(!older.routes.contains_key(&range));
    assert!(older.remarks[0].contains("10.3.0.7"), "{:?}", older.remarks);
}

#[test]
fn an_address_takes_no_range_of_those_that_are_named() {
    let registered = |peer: Peer, registered| Peer { registered, ..peer };
    let far = ["10.3.0.0/24", "fd00:3::/64"];
    // Our own address, and that of another one on our link.
    let near = [
        "192.0.2.0/31",
        "192.0.2.4/30",
        "2001:db8::/127",
        "2001:db8::4/126",
    ];
    let ranges = [&far[..], &near[..]].concat();
    let others = ["10.3.0.7", "fd00:3::7", "10.1.0.7", "fd00:1::7"];
    let nodes = nodes(&[
        ("a", registered(myself(), 5)),
        ("b", registered(node(&["198.51.100.3"], &ranges), 5)),
        ("c", registered(node(&others, &["10.4.0.0/24"]), 1)),
        ("d", registered(node(&["192.0.2.4", "2001:db8::4"], &[]), 5)),
    ]);
    let cluster = ["10.0.0.0/8", "fd00::/16", "192.0.2.0/24", "2001:db8::/64"].map(net);
    let desired = within(&nodes, Routing::Auto, &cluster).expect("a plan");
    assert_eq!(desired.errors, Vec::<String>::new());
    for range in ranges {
        let is_planned = desired.routes.contains_key(&net(range));
        assert_eq!(is_planned, far.contains(&range), "{range}");
    }
}

#[test]
fn our_own_addresses_are_in_nobodys_range() {
    let mut old = node(&["198.51.100.9"], &["192.0.2.0/30"]);
    old.registered = -1;
    let nodes = nodes(&[("a", myself()), ("b", old)]);
    let desired = planned(&nodes, Routing::Auto).expect("a plan");
    assert!(!desired.routes.contains_key(&net("192.0.2.0/30")));
}

#[test]
fn our_own_range_takes_nothing_that_others_need() {
    let bridge = |net: &str, is_bridge| OnLink {
        net: self::net(net),
        own: self::net(net).network(),
        device: 3,
        mtu: 1500,
        is_bridge,
    };
    let mut links = links();
    links.push(bridge("10.8.1.0/24", true));
    links.push(bridge("fd00:8::/64", false));
    links.push(bridge("10.8.2.1/32", false));
    let errors = |ranges: &[&str], routing| {
        let mut us = node(&["192.0.2.1", "2001:db8::1"], ranges);
        us.registered = 1;
        let others = [
            ("b", node(&["198.51.100.5"], &["10.2.0.0/24"])),
            ("c", node(&["192.0.2.99"], &["10.3.0.0/24"])),
        ];
        let nodes = nodes(&[&[("a", us)], &others[..]].concat());
        let inputs = Inputs {
            own: "a",
            nodes: &nodes,
            links: &links,
            routing,
            cluster: &[],
        };
        let desired = plan(&inputs).expect("a plan");
        let own = desired.routes.values().filter(|way| **way == Way::Own);
        assert_eq!(own.count() + desired.errors.len(), ranges.len());
        let tunnel = desired.tunnel.map_or(0, |tunnel| tunnel.addresses.len());
        assert!(routing == Routing::Cloud || tunnel + desired.errors.len() == ranges.len());
        desired.errors
    };
    for routing in [Routing::Auto, Routing::Cloud] {
        // Our address, those of others on the link and beyond a router, a link.
        for range in [
            "192.0.2.0/25",
            "192.0.2.64/26",
            "198.51.100.0/24",
            "2001:db8::/96",
            "10.8.0.0/16",
            "fd00:8::/64",
        ] {
            let errors = errors(&["10.1.0.0/24", range], routing);
            assert!(errors.len() == 1 && errors[0].contains(range), "{errors:?}");
        }
        // A part of a link where nobody is, and what another plugin has left of its pods.
        let good = [
            "192.0.2.128/25",
            "10.8.1.0/24",
            "10.8.2.0/24",
            "fd00:1::/64",
        ];
        assert_eq!(errors(&good, routing), Vec::<String>::new());
    }
}

#[test]
fn a_range_outside_of_the_clusters_is_not_believed() {
    let nodes = nodes(&[
        ("a", myself()),
        ("b", node(&["192.0.2.2"], &["10.2.0.0/24"])),
        ("c", node(&["192.0.2.3"], &["203.0.113.0/24"])),
    ]);
    let desired = within(&nodes, Routing::Auto, &[net("10.0.0.0/8")]).expect("a plan");
    assert!(desired.routes.contains_key(&net("10.2.0.0/24")));
    assert!(!desired.routes.contains_key(&net("203.0.113.0/24")));
    // Ours is of no use to others, and takes nothing from anybody.
    assert_eq!(desired.routes[&net("fd00:1::/64")], Way::Own);
    assert_eq!(desired.errors, Vec::<String>::new());
    assert!(desired.remarks[0].contains("fd00:1::/64"));
}

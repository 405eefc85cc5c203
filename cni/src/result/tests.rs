use proptest::prelude::*;

use super::*;

fn net() -> impl Strategy<Value = IpNet> {
    let v4 = (any::<[u8; 4]>(), 0..=32_u8).prop_map(|(ip, len)| IpNet::new(ip.into(), len));
    // Addresses in 2001::/16, as an IPv4-mapped one would come back as IPv4.
    let v6 = (any::<[u8; 14]>(), 0..=128_u8).prop_map(|(tail, len)| {
        let mut ip = [0x20; 16];
        ip[2..].copy_from_slice(&tail);
        IpNet::new(ip.into(), len)
    });
    prop_oneof![v4, v6].prop_map(|net| net.expect("the length is in bounds"))
}

/// Never 0, which counts as absent.
fn attribute() -> impl Strategy<Value = Option<u32>> {
    prop::option::of(1..u32::MAX)
}

prop_compose! {
    fn route()(
        dst in net(), gw in prop::option::of(net()), mtu in attribute(), advmss in attribute(),
        priority in attribute(), table in prop::option::of(any::<u32>()), scope in prop::option::of(any::<u8>()),
    ) -> Route {
        Route { dst, gw: gw.map(|net| net.addr()), mtu, advmss, priority, table, scope }
    }
}

prop_compose! {
    fn interface()(
        name in "[a-z]{1,5}", mac in "([0-9a-f]{2})?", mtu in attribute(), sandbox in "(/run/[a-z]{1,5})?",
        socket_path in "[a-z]{0,3}", pci_id in "[0-9]{0,3}",
    ) -> Interface {
        Interface { name, mac, mtu, sandbox, socket_path, pci_id }
    }
}

prop_compose! {
    fn result()(
        interfaces in prop::collection::vec(interface(), 0..3),
        ips in prop::collection::vec((prop::option::of(0..3_u32), net(), prop::option::of(net())), 0..4),
        routes in prop::collection::vec(route(), 0..4),
        nameservers in prop::collection::vec("[0-9.]{1,8}", 0..3),
        domain in "[a-z]{0,4}",
    ) -> CniResult {
        let ip = |(interface, address, gateway): (Option<u32>, IpNet, Option<IpNet>)| {
            IpConfig { interface, address, gateway: gateway.map(|net| net.addr()) }
        };
        CniResult {
            interfaces,
            ips: ips.into_iter().map(ip).collect(),
            routes,
            dns: Dns { nameservers, domain, ..Dns::default() },
        }
    }
}

fn reread(result: &CniResult, version: Version) -> CniResult {
    let text = result.to_json(version).expect("a version with lists");
    let value = serde_json::from_str(&text).expect("JSON");
    CniResult::from_value(&value, Version::V0_1_0).expect("a result")
}

proptest! {
    #[test]
    fn nothing_is_lost_in_the_current_versions(result in result()) {
        prop_assert_eq!(&reread(&result, Version::V1_1_0), &result);
        prop_assert_eq!(&reread(&result, Version::V1_0_0), &result);
    }

    #[test]
    fn older_versions_lose_what_interfaces_did_not_have(result in result()) {
        let mut expected = result.clone();
        for interface in &mut expected.interfaces {
            (interface.mtu, interface.socket_path, interface.pci_id) = (None, String::new(), String::new());
        }
        for version in [Version::V0_3_0, Version::V0_3_1, Version::V0_4_0] {
            prop_assert_eq!(&reread(&result, version), &expected);
        }
    }

    #[test]
    fn the_first_versions_keep_the_first_address_of_each_family(result in result()) {
        for version in [Version::V0_1_0, Version::V0_2_0] {
            if result.ips.is_empty() {
                prop_assert!(result.to_json(version).is_err());
                continue;
            }
            let read = reread(&result, version);
            for is_v4 in [true, false] {
                let family = |result: &CniResult| {
                    result.ips.iter().map(|ip| ip.address).find(|net| net.addr().is_ipv4() == is_v4)
                };
                prop_assert_eq!(family(&read), family(&result));
            }
            prop_assert!(read.ips.len() <= 2);
        }
    }
}

#[test]
fn an_attribute_of_zero_counts_as_absent() {
    let document = serde_json::json!({
        "interfaces": [{"name": "eth0", "mtu": 0}],
        "routes": [{"dst": "10.0.0.0/8", "mtu": 0, "advmss": 0, "priority": 0, "table": 0, "scope": 0}],
    });
    let result = CniResult::from_value(&document, Version::V1_1_0).expect("a result");
    assert_eq!(result.interfaces[0].mtu, None);
    let route = &result.routes[0];
    assert_eq!(
        (route.mtu, route.advmss, route.priority),
        (None, None, None)
    );
    assert_eq!((route.table, route.scope), (Some(0), Some(0)));
    assert_eq!(reread(&result, Version::V1_1_0), result);
}

use super::*;

use underpass_cni::NetConf;

fn identity() -> Identity {
    Identity {
        network: "n1".to_owned(),
        container: "c1".to_owned(),
        ifname: "eth0".to_owned(),
    }
}

fn conf(keys: &str) -> AttachmentConf {
    let document = format!(r#"{{"cniVersion":"1.1.0","name":"n1","type":"underpass",{keys}}}"#);
    let conf = NetConf::parse(document.as_bytes()).expect("a name is enough");
    AttachmentConf {
        network: Conf::of_network(&conf).expect("a valid config"),
        mac: None,
        ports: Vec::new(),
    }
}

fn ip(address: &str, gateway: &str) -> IpConfig {
    IpConfig {
        interface: None,
        address: address.parse().expect("an address"),
        gateway: gateway.parse().ok(),
    }
}

fn lease(ips: &[(&str, &str)], routes: Vec<CniRoute>) -> LeaseResult {
    LeaseResult {
        ips: ips
            .iter()
            .map(|(address, gateway)| ip(address, gateway))
            .collect(),
        routes,
        dns: Dns::default(),
        subnets: Vec::new(),
    }
}

fn plan(conf: &AttachmentConf, lease: LeaseResult) -> Plan {
    Plan::new(
        identity(),
        conf,
        lease,
        Driver::Veth,
        Some(InheritedMtu {
            mtu: 1400,
            uplink: "eth0",
        }),
        "/run/netns/n1",
    )
    .expect("a plan")
}

/// The whole plan, as a person reads it.
fn text(plan: &Plan) -> String {
    let mut lines = vec![
        format!("host {} {}", plan.host.name, plan.host.mac),
        format!("pod {} {}", plan.container.name, plan.container.mac),
        format!("mtu {} flags {:#b}", plan.mtu, plan.flags),
    ];
    lines.extend(plan.addresses.iter().map(|net| format!("address {net}")));
    lines.extend(plan.gateways.iter().map(|addr| format!("gateway {addr}")));
    lines.extend(plan.routes.iter().map(|route| {
        let attributes = [
            ("mtu", route.mtu),
            ("advmss", route.advmss),
            ("priority", route.priority),
            (
                "scope",
                Some(route.scope.into()).filter(|scope| *scope != 0),
            ),
        ];
        let mut words = vec![format!("route {route}")];
        words.extend(
            attributes
                .into_iter()
                .filter_map(|(name, value)| Some(format!("{name} {}", value?))),
        );
        words.extend(route.source.map(|source| format!("src {source}")));
        words.join(" ")
    }));
    lines.extend(plan.no_masquerade.iter().map(|net| format!("keep {net}")));
    lines.join("\n")
}

#[test]
fn dual_stack_with_routes_and_masquerade() {
    let mut special = CniRoute::new("192.168.0.0/16".parse().expect("a prefix"), None);
    special.mtu = Some(1300);
    special.advmss = Some(1200);
    special.priority = Some(5);
    special.table = Some(100);
    let plan = plan(
        &conf(r#""ipMasq":true,"isDefaultGateway":true"#),
        lease(
            &[
                ("10.1.2.5/24", "10.1.2.1"),
                ("2001:db8:1::5/64", "2001:db8:1::1"),
            ],
            vec![special],
        ),
    );
    insta::assert_snapshot!(text(&plan), @r"
    host veth836d7657cb1 86:7a:88:d6:78:fb
    pod eth0 8e:c0:c6:a8:b9:f4
    mtu 1400 flags 0b1001111
    address 10.1.2.5/24
    address 2001:db8:1::5/64
    gateway 10.1.2.1
    gateway 2001:db8:1::1
    route 10.1.2.1/32 scope 253 src 10.1.2.5
    route 2001:db8:1::1/128 scope 253 src 2001:db8:1::5
    route 10.1.2.0/24 via 10.1.2.1 src 10.1.2.5
    route 2001:db8:1::/64 via 2001:db8:1::1 src 2001:db8:1::5
    route 192.168.0.0/16 via 10.1.2.1 table 100 mtu 1300 advmss 1200 priority 5
    route 0.0.0.0/0 via 10.1.2.1
    route ::/0 via 2001:db8:1::1
    keep 10.1.2.0/24
    keep 224.0.0.0/4
    keep 2001:db8:1::/64
    keep fe80::/10
    keep ff00::/8
    ");
}

#[test]
fn without_a_gateway_the_next_hop_is_link_local() {
    let plan = plan(
        &conf(r#""bypass":"off","antiSpoof":false"#),
        lease(&[("10.1.2.5/32", ""), ("fd00::5/128", "")], Vec::new()),
    );
    insta::assert_snapshot!(text(&plan), @r"
    host veth836d7657cb1 86:7a:88:d6:78:fb
    pod eth0 8e:c0:c6:a8:b9:f4
    mtu 1400 flags 0b1
    address 10.1.2.5/32
    address fd00::5/128
    gateway 169.254.1.1
    gateway fe80::1
    route 169.254.1.1/32 scope 253 src 10.1.2.5
    route fe80::1/128 scope 253 src fd00::5
    ");
}

#[test]
fn an_interface_without_ipam_has_only_its_ends() {
    let plan = plan(&conf(r#""mtu":9000"#), LeaseResult::default());
    insta::assert_snapshot!(text(&plan), @r"
    host veth836d7657cb1 86:7a:88:d6:78:fb
    pod eth0 8e:c0:c6:a8:b9:f4
    mtu 9000 flags 0b1001011
    ");
}

#[test]
fn several_addresses_of_a_family_share_gateways_and_keep_their_order() {
    let plan = plan(
        &conf(r#""ipMasq":true,"nonMasqueradeCIDRs":["172.16.0.0/12"]"#),
        lease(
            &[
                ("10.1.2.5/24", "10.1.2.1"),
                ("10.1.2.6/24", "10.1.2.1"),
                ("10.9.0.2/16", "10.9.0.1"),
            ],
            vec![CniRoute::new("0.0.0.0/0".parse().expect("a prefix"), None)],
        ),
    );
    insta::assert_snapshot!(text(&plan), @r"
    host veth836d7657cb1 86:7a:88:d6:78:fb
    pod eth0 8e:c0:c6:a8:b9:f4
    mtu 1400 flags 0b1001111
    address 10.1.2.5/24
    address 10.1.2.6/24
    address 10.9.0.2/16
    gateway 10.1.2.1
    gateway 10.9.0.1
    route 10.1.2.1/32 scope 253 src 10.1.2.5
    route 10.9.0.1/32 scope 253 src 10.9.0.2
    route 10.1.2.0/24 via 10.1.2.1 src 10.1.2.5
    route 10.9.0.0/16 via 10.9.0.1 src 10.9.0.2
    route 0.0.0.0/0 via 10.1.2.1
    keep 172.16.0.0/12
    keep 224.0.0.0/4
    keep fe80::/10
    keep ff00::/8
    ");
}

#[test]
fn the_result_has_the_shape_of_ptp() {
    let plan = plan(
        &conf(r#""ipam":{}"#),
        lease(&[("10.1.2.5/24", "10.1.2.1")], Vec::new()),
    );
    let document = plan
        .result
        .to_json(underpass_cni::Version::V1_1_0)
        .expect("a result with an address");
    insta::assert_snapshot!(document, @r#"
    {
        "cniVersion": "1.1.0",
        "interfaces": [
            {
                "name": "veth836d7657cb1",
                "mac": "86:7a:88:d6:78:fb",
                "mtu": 1400
            },
            {
                "name": "eth0",
                "mac": "8e:c0:c6:a8:b9:f4",
                "mtu": 1400,
                "sandbox": "/run/netns/n1"
            }
        ],
        "ips": [
            {
                "interface": 1,
                "address": "10.1.2.5/24",
                "gateway": "10.1.2.1"
            }
        ]
    }
    "#);
}

#[test]
fn a_default_route_of_the_ipam_is_not_repeated() {
    let default: IpNet = "0.0.0.0/0".parse().expect("a prefix");
    let gateway = "10.1.2.9".parse().ok();
    let plan = plan(
        &conf(r#""isDefaultGateway":true"#),
        lease(
            &[("10.1.2.5/24", "10.1.2.1")],
            vec![CniRoute::new(default, gateway)],
        ),
    );
    assert_eq!(plan.result.routes, [CniRoute::new(default, gateway)]);
}

#[test]
fn an_mtu_too_small_for_ipv6_is_refused() {
    let refuse = |keys: &str, address: &str| {
        let lease = lease(&[(address, "")], Vec::new());
        Plan::new(identity(), &conf(keys), lease, Driver::Veth, None, "").err()
    };
    let error = refuse(r#""mtu":1000"#, "fd00::5/64").expect("IPv6 needs more");
    assert!(error.to_string().contains("1280"), "{error}");
    assert_eq!(refuse(r#""mtu":1000"#, "10.0.0.5/24"), None);
    assert_eq!(refuse(r#""mtu":68"#, "10.0.0.5/24"), None);
}

#[test]
fn what_no_interface_and_no_router_can_have_is_refused() {
    let refuse = |ips: &[(&str, &str)], routes| {
        let conf = conf(r#""ipam":{}"#);
        let answer = Plan::new(
            identity(),
            &conf,
            lease(ips, routes),
            Driver::Veth,
            None,
            "",
        );
        answer.err().map(|error| {
            assert_eq!(error.code.number(), 7, "{error}");
            error.msg
        })
    };
    for (address, gateway, words) in [
        (
            "10.0.0.5/24",
            "fd00::1",
            "gateway fd00::1 of the address 10.0.0.5/24",
        ),
        (
            "fd00::5/64",
            "10.0.0.1",
            "gateway 10.0.0.1 of the address fd00::5/64",
        ),
        ("10.0.0.5/24", "0.0.0.0", "gateway 0.0.0.0"),
        ("fd00::5/64", "ff02::1", "gateway ff02::1"),
        ("224.0.0.5/24", "", "address 224.0.0.5/24"),
        ("ff02::5/64", "", "address ff02::5/64"),
        ("127.0.0.5/8", "", "address 127.0.0.5/8"),
        ("::1/128", "", "address ::1/128"),
    ] {
        let error = refuse(&[(address, gateway)], Vec::new()).expect(words);
        assert!(error.contains(words), "{error}");
    }
    for address in ["10.0.0.5/24", "fd00::5/64"] {
        let error = refuse(&[(address, ""), (address, "")], Vec::new()).expect("a duplicate");
        assert!(error.contains("twice"), "{error}");
    }
    let route = |dst: &str, gw: &str| {
        CniRoute::new(
            dst.parse().expect("a prefix"),
            Some(gw.parse().expect("an address")),
        )
    };
    let both = [("10.0.0.5/24", "10.0.0.1"), ("fd00::5/64", "fe80::1")];
    for (dst, gw) in [
        ("0.0.0.0/0", "fd00::1"),
        ("::/0", "10.0.0.1"),
        ("0.0.0.0/0", "255.255.255.255"),
        ("::/0", "::"),
    ] {
        let error = refuse(&both, vec![route(dst, gw)]).expect("no next hop");
        assert!(
            error.contains(&format!("gw {gw} of the route to {dst}")),
            "{error}"
        );
    }
    for (dst, gw) in [("0.0.0.0/0", "192.0.2.1"), ("::/0", "fe80::2")] {
        assert_eq!(refuse(&both, vec![route(dst, gw)]), None);
    }
    let scoped = |dst: &str, scope| CniRoute {
        scope: Some(scope),
        ..CniRoute::new(dst.parse().expect("a prefix"), None)
    };
    let error = refuse(&both, vec![scoped("192.0.2.0/24", 253)]).expect("a scope of no next hop");
    assert!(
        error.contains("scope 253 of the route to 192.0.2.0/24"),
        "{error}"
    );
    assert_eq!(refuse(&both, vec![scoped("192.0.2.0/24", 0)]), None);
    assert_eq!(refuse(&both, vec![scoped("2001:db8::/32", 253)]), None);
    // Without a next hop the destination is on the link.
    assert_eq!(refuse(&both[1..], vec![scoped("192.0.2.0/24", 253)]), None);
}

#[test]
fn more_addresses_than_the_maps_hold_are_refused() {
    let many: Vec<_> = (1..=9).map(|n| format!("10.0.0.{n}/24")).collect();
    let many: Vec<_> = many.iter().map(|address| (address.as_str(), "")).collect();
    let answer = Plan::new(
        identity(),
        &conf(r#""ipam":{}"#),
        lease(&many, Vec::new()),
        Driver::Veth,
        None,
        "",
    );
    assert!(answer.is_err_and(|error| error.to_string().contains("9 addresses")));
}

#[test]
fn what_was_asked_for_comes_before_what_goes_without_saying() {
    let route = |dst: &str, gateway: &str, set: fn(&mut CniRoute)| {
        let mut route = CniRoute::new(dst.parse().expect("a prefix"), gateway.parse().ok());
        set(&mut route);
        route
    };
    let asked = vec![
        route("10.1.2.0/24", "10.1.2.1", |route| route.mtu = Some(1300)),
        route("0.0.0.0/0", "10.1.2.1", |route| route.priority = Some(10)),
        route("0.0.0.0/0", "10.1.2.1", |route| route.priority = Some(20)),
        // In Go, zero is what was not said.
        route("0.0.0.0/0", "10.1.2.1", |route| {
            (route.mtu, route.advmss, route.priority) = (Some(0), Some(0), Some(0));
        }),
        route("0.0.0.0/0", "10.1.2.1", |_| {}),
    ];
    let plan = plan(
        &conf(r#""ipMasq":true"#),
        lease(&[("10.1.2.5/24", "10.1.2.1")], asked),
    );
    let text = text(&plan);
    let routes: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("route"))
        .collect();
    insta::assert_snapshot!(routes.join("\n"), @r"
    route 10.1.2.1/32 scope 253 src 10.1.2.5
    route 10.1.2.0/24 via 10.1.2.1 mtu 1300
    route 0.0.0.0/0 via 10.1.2.1 priority 10
    route 0.0.0.0/0 via 10.1.2.1 priority 20
    route 0.0.0.0/0 via 10.1.2.1
    ");
}

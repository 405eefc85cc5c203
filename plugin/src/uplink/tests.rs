use super::*;

use std::net::IpAddr;

use crate::netlink::{link::Mac, route::Route};

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
    };
    let uplinks = surroundings.uplinks(None);
    assert_eq!(uplinks[0].device.flags, device::LAYER3);
    assert_eq!(uplinks[1].device.flags, 0);
    assert_eq!(uplinks[0].device.masquerade6, Addr::default());
    assert_eq!(smallest_mtu(&uplinks), Some(1420));
    assert_eq!(smallest_mtu(&[]), None);
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
    };
    let services: Vec<_> = surroundings.service_addresses();
    let expected = ["10.96.0.1", "fd00:96::1", "169.254.20.10"];
    assert_eq!(
        services,
        expected.map(|addr| addr.parse::<IpAddr>().expect("an address"))
    );
    assert_eq!(names(&surroundings.uplinks(None)), ["eth0"]);
}

use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::link::LinkHeader;

use super::*;

fn link(index: u32, attributes: &[LinkAttribute]) -> Link {
    let mut message = LinkMessage::default();
    message.header = LinkHeader {
        index,
        flags: LinkFlags::Up,
        ..LinkHeader::default()
    };
    message.attributes = attributes.to_vec();
    read_link(message)
}

fn address(net: &str, device: u32, is_bare: bool) -> Address {
    let net: IpNet = net.parse().expect("a network");
    let mut message = AddressMessage::default();
    message.header.family = if net.addr().is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    message.header.index = device;
    message.header.prefix_len = net.prefix_len();
    message.attributes = vec![AddressAttribute::Address(net.addr())];
    if is_bare {
        let flags = AddressAttribute::Flags(AddressFlags::Noprefixroute);
        message.attributes.push(flags);
    }
    read_address(message).expect("an address")
}

fn seen(addresses: Vec<Address>) -> Seen {
    let mac = LinkAttribute::Address(vec![2, 0, 0, 0, 0, 1]);
    let alias = LinkAttribute::IfAlias("underpass:pods:c1:eth0".to_owned());
    let dummy = LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Dummy)]);
    Seen {
        links: vec![
            link(2, std::slice::from_ref(&mac)),
            link(3, &[]),
            link(4, &[mac.clone(), alias]),
            link(5, &[mac, dummy]),
        ],
        addresses,
        routes: BTreeSet::new(),
    }
}

#[test]
fn pods_do_not_have_all_routes_listed() {
    for net in ["10.1.0.1/32", "fd00:1::1/128"] {
        assert!(!seen(vec![address(net, 4, true)]).needs_routes(), "{net}");
    }
    for net in ["192.0.2.1/24", "2001:db8::1/64"] {
        assert!(seen(vec![address(net, 2, true)]).needs_routes(), "{net}");
        assert!(!seen(vec![address(net, 2, false)]).needs_routes(), "{net}");
    }
}

#[test]
fn on_a_link_are_those_who_can_be_found_there() {
    for (net, alone) in [
        ("192.0.2.1/24", "192.0.2.1/32"),
        ("2001:db8::1/64", "2001:db8::1/128"),
    ] {
        let on_link = |device, is_bare| -> Vec<IpNet> {
            let seen = seen(vec![address(net, device, is_bare)]);
            seen.on_link().iter().map(|link| link.net).collect()
        };
        let [net, alone] = [net, alone].map(|net| net.parse::<IpNet>().expect("a network"));
        assert_eq!(on_link(2, false), [net.trunc()]);
        assert_eq!(on_link(2, true), [alone]);
        assert_eq!(on_link(3, false), [alone], "no link-layer address");
        assert_eq!(on_link(4, false), [], "a pod's");
        assert_eq!(on_link(5, false), [], "a dummy's");
    }
}

/// Clouds give a card an address alone; on a dummy there is one that others announce.
#[test]
fn an_address_alone_is_on_a_card_and_not_on_a_dummy() {
    for net in ["203.0.113.1/32", "2001:db8:77::1/128"] {
        let seen = seen(vec![address(net, 5, false), address(net, 2, false)]);
        let devices: Vec<u32> = seen.on_link().iter().map(|link| link.device).collect();
        assert_eq!(devices, [2], "{net}");
    }
}

#[test]
fn the_narrowest_way_out_is_that_of_no_pod() {
    let with = |index, attributes: &[LinkAttribute]| {
        let mtu = 1000 + index * 100;
        link(index, &[attributes, &[LinkAttribute::Mtu(mtu)]].concat())
    };
    let alias = LinkAttribute::IfAlias("underpass:pods:c1:eth0".to_owned());
    let ours = LinkAttribute::IfName(DEVICE.to_owned());
    let seen = Seen {
        links: vec![
            with(1, &[alias]),
            with(2, &[ours]),
            with(3, &[]),
            with(4, &[]),
        ],
        addresses: Vec::new(),
        routes: BTreeSet::new(),
    };
    assert!(seen.has_narrower(1301) && !seen.has_narrower(1300));
    for (devices, narrowest) in [
        (&[][..], None),
        (&[1, 2, 9], None),
        (&[4], Some(1400)),
        (&[1, 2, 3, 4], Some(1300)),
    ] {
        let devices = devices.iter().copied().collect();
        assert_eq!(seen.narrowest(&devices), narrowest, "{devices:?}");
    }
}

//! The cluster's plan of addresses.

use std::net::IpAddr;

use underpass_tests::prelude::*;

/// What pods get addresses from.
pub(crate) const CLUSTER: [&str; 2] = ["10.244.0.0/16", "fd00:244::/48"];
/// What Services get addresses from.
pub(crate) const SERVICES: &str = "10.96.0.0/16,fd00:96::/112";

/// The address of a machine on a link.
pub(crate) fn node(family: Family, link: u8, number: u8) -> IpAddr {
    let third = 10 + link;
    match family {
        V4 => IpAddr::from([198, 18, third, number]),
        V6 => IpAddr::from([0x2001, 0xdb8, third.into(), 0, 0, 0, 0, number.into()]),
    }
}

/// The same with the length of the link's prefix.
pub(crate) fn on_link(family: Family, link: u8, number: u8) -> String {
    let length = if family == V4 { "24" } else { "64" };
    format!("{}/{length}", node(family, link, number))
}

//! Ranges of containers' addresses that cover what an uplink's link has already: the node's own address there, or a router's.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;
use underpass_netlink::Netlink;

use super::Uplink;
use crate::error::Error;

/// An address that containers could be given, and is somebody's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Overlap {
    address: IpAddr,
    whose: Whose,
    uplink: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Whose {
    Node,
    Router,
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            address,
            whose,
            uplink,
        } = self;
        match whose {
            Whose::Node => write!(f, "{address}, which the node has on its uplink {uplink}"),
            Whose::Router => write!(
                f,
                "{address}, the next hop of a default route by the uplink {uplink}"
            ),
        }
    }
}

/// Looks for addresses of the uplinks, and of their routers, that `covers` names. One that a device has alone, without a link of
/// others, is in nobody's way: no container is given it. (So another plugin's tunnel may have been left with the gateway of
/// its pods.)
pub(crate) fn overlaps(
    node: &Netlink,
    uplinks: &[Uplink],
    covers: impl Fn(IpAddr) -> bool,
) -> Result<Vec<Overlap>, Error> {
    let mut found = Vec::new();
    let default_routes = node.default_routes()?;
    for Uplink { index, name, .. } in uplinks {
        let own = node.addresses_on(*index)?.into_iter();
        let own = own.filter(|address| !is_alone(address.net));
        let own = own.map(|address| (address.net.addr(), Whose::Node));
        let routes = default_routes.iter().filter(|route| route.index == *index);
        let next_hops = routes.filter_map(|route| Some((route.route.gateway?, Whose::Router)));
        let covered = own.chain(next_hops).filter(|(address, _)| covers(*address));
        found.extend(covered.map(|(address, whose)| Overlap {
            address,
            whose,
            uplink: name.clone(),
        }));
    }
    found.dedup();
    Ok(found)
}

fn is_alone(net: IpNet) -> bool {
    net.prefix_len() == net.max_prefix_len()
}

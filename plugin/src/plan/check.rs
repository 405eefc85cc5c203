//! What a lease must hold to become an interface: the kernel would refuse it without a word on why, or misread it.

use std::net::IpAddr;

use underpass_abi::endpoint::MAX_ADDRESSES;
use underpass_cni::{Error, IpConfig, Route};
use underpass_netlink::route::SCOPE_LINK;

use super::same_family;
use crate::conf::{MTU_MAX, MTU_MIN};

/// Refuses addresses and routes that no interface can have.
pub(super) fn lease(ips: &[IpConfig], routes: &[Route]) -> Result<(), Error> {
    if ips.len() > MAX_ADDRESSES {
        return Err(Error::config(format!(
            "the IPAM gave {} addresses: an interface can have {MAX_ADDRESSES}; leave ranges out of ipam",
            ips.len()
        )));
    }
    for (index, ip) in ips.iter().enumerate() {
        address(ip, &ips[..index])?;
    }
    for route in routes {
        mtu(route)?;
        next_hop(route, ips)?;
    }
    Ok(())
}

/// An interface's limits are those of its routes.
fn mtu(route: &Route) -> Result<(), Error> {
    match route.mtu {
        Some(mtu) if mtu != 0 && !(MTU_MIN..=MTU_MAX).contains(&mtu) => {
            Err(Error::config(format!(
                "invalid mtu {mtu} of the route to {}: it must be 0 (as the interface) or {MTU_MIN} to {MTU_MAX}",
                route.dst
            )))
        }
        _ => Ok(()),
    }
}

/// Refuses what the kernel would not give to an interface, or would misread: it takes the first bytes of a gateway of
/// the other family for one.
fn address(ip: &IpConfig, others: &[IpConfig]) -> Result<(), Error> {
    let address = ip.address;
    if !is_of_a_host(address.addr()) {
        return Err(Error::config(format!(
            "invalid address {address} from the IPAM: no interface can have it; correct the ranges of ipam"
        )));
    }
    if others.iter().any(|other| other.address == address) {
        return Err(Error::config(format!(
            "invalid address {address} from the IPAM: it gave it twice; correct its part of the config, ipam"
        )));
    }
    if ip.gateway == Some(address.addr()) {
        return Err(Error::config(format!(
            "invalid gateway {} of the address {address}: it is that address itself; correct the ranges of ipam",
            address.addr()
        )));
    }
    match ip.gateway {
        Some(gateway) if !is_next_hop(gateway, address.addr()) => Err(Error::config(format!(
            "invalid gateway {gateway} of the address {address}: it must be {}; correct the ranges of ipam",
            router(address.addr())
        ))),
        _ => Ok(()),
    }
}

/// Refuses routes by a next hop that nobody can be, and those that the kernel allows without a next hop only.
fn next_hop(route: &Route, ips: &[IpConfig]) -> Result<(), Error> {
    let dst = route.dst;
    match route.gw {
        Some(gw) if !is_next_hop(gw, dst.addr()) => {
            return Err(Error::config(format!(
                "invalid gw {gw} of the route to {dst}: it must be {}, or left out",
                router(dst.addr())
            )));
        }
        _ => {}
    }
    let has_next_hop = ips
        .iter()
        .any(|ip| same_family(ip.address.addr(), dst.addr()));
    match route.scope {
        // Of IPv6 the kernel does not look at it.
        Some(scope) if scope >= SCOPE_LINK && dst.addr().is_ipv4() && has_next_hop => {
            Err(Error::config(format!(
                "invalid scope {scope} of the route to {dst}: routes lead by a gateway here, so it must be below {SCOPE_LINK}, or left out"
            )))
        }
        _ => Ok(()),
    }
}

fn is_next_hop(gateway: IpAddr, towards: IpAddr) -> bool {
    same_family(gateway, towards) && is_of_a_host(gateway)
}

/// Describes a next hop, for messages.
fn router(towards: IpAddr) -> &'static str {
    if towards.is_ipv4() {
        "an IPv4 address that a router can have"
    } else {
        "an IPv6 address that a router can have"
    }
}

/// Tells whether an interface that is no loopback device can have the address.
fn is_of_a_host(address: IpAddr) -> bool {
    let is_broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
    !(address.is_unspecified() || address.is_loopback() || address.is_multicast() || is_broadcast)
}

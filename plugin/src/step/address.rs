//! The container's side: its addresses, its only neighbours, its end set up.

use std::{
    net::{IpAddr, Ipv6Addr},
    thread,
    time::{Duration, Instant},
};

use ipnet::{IpNet, Ipv6Net};
use tracing::warn;
use underpass_netlink::{
    Mac, Netlink,
    addr::Scope,
    link::{Admin, Change, Device},
    neigh::Role,
};

use super::{Attachment, Inspection, Interface, Step, sysctl};
use crate::{
    conf::MacCheck,
    error::Error,
    finding::{Finding, Findings},
};

/// Gives the container its addresses. They go with the pair, so there is nothing to undo.
pub(crate) struct Addresses;

impl Step<Interface> for Addresses {
    fn name(&self) -> &'static str {
        "addresses"
    }

    fn apply(&self, attachment: &mut Attachment<'_, Interface>) -> Result<(), Error> {
        let Interface {
            plan,
            container,
            pod,
            ..
        } = &attachment.made;
        pod.set_link(
            container,
            Change {
                admin: Some(Admin::Up),
                no_addr_gen: sysctl::has_ipv6(plan.mtu),
                ..Change::default()
            },
        )?;
        for net in &plan.addresses {
            pod.add_address(container, *net, Scope::Global)?;
        }
        if plan.has_v6() {
            pod.add_address(container, link_local(plan.container.mac), Scope::Link)?;
        }
        for addr in &plan.gateways {
            pod.add_neighbour(container, Role::Router, *addr, plan.host.mac)?;
        }
        Ok(())
    }

    /// Compares the addresses and gateways that the runtime remembers with those that are there.
    fn verify(
        &self,
        inspection: &Inspection<'_, Interface>,
        findings: &mut Findings,
    ) -> Result<(), Error> {
        let (host, ends) = (&inspection.host, &inspection.found);
        let container = &ends.container;
        if !container.up {
            findings.push(Finding::Down(container.name.clone()));
        }
        let addresses = ends.pod.addresses_on(container.index)?;
        let neighbours = ends.pod.neighbours(container.index)?;
        for ip in &ends.ips {
            let has = addresses.iter().any(|address| address.net == ip.address);
            if !has {
                findings.push(Finding::NoAddress {
                    container: container.name.clone(),
                    address: ip.address,
                });
            }
            let Some(gateway) = ip.gateway else { continue };
            let is_known = neighbours.iter().any(|neighbour| neighbour.addr == gateway);
            if ends.mac_check == MacCheck::On && !is_known {
                // It is answered, unless the node's `arp_ignore` or its firewall (neighbour discovery is ICMPv6) forbids that.
                let finding = Finding::NoGateway {
                    gateway,
                    mac: host.mac,
                    container: container.name.clone(),
                };
                warn!("{finding}");
            }
            // The kernel forgets neighbours when the interface's MAC changes, and then asks; only a
            // wrong one leads nowhere.
            let astray = neighbours
                .iter()
                .find(|neighbour| neighbour.addr == gateway && neighbour.mac != host.mac);
            if let Some(neighbour) = astray {
                findings.push(Finding::OtherGateway {
                    gateway,
                    mac: neighbour.mac,
                    container: container.name.clone(),
                    host: host.name.clone(),
                    host_mac: host.mac,
                });
            }
        }
        Ok(())
    }
}

/// How long the kernel may take to deliver packets to a new address.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(1);
/// How often it is asked.
const DELIVERY_POLL: Duration = Duration::from_micros(200);

/// Waits until packets to the new IPv6 addresses, of both ends, are delivered.
pub(crate) struct Delivery;

impl Step<Interface> for Delivery {
    fn name(&self) -> &'static str {
        "delivery"
    }

    fn apply(&self, attachment: &mut Attachment<'_, Interface>) -> Result<(), Error> {
        let Interface {
            plan,
            container,
            pod,
            ..
        } = &attachment.made;
        await_delivery(pod, container, plan.addresses.iter().map(IpNet::addr))?;
        await_delivery(
            attachment.node,
            &attachment.host,
            plan.gateways.iter().copied(),
        )
    }

    /// Finds nothing: what was waited for comes with the addresses, and [`Addresses`] looks at those.
    fn verify(&self, _: &Inspection<'_, Interface>, _: &mut Findings) -> Result<(), Error> {
        Ok(())
    }
}

/// Waits until the IPv6 addresses among these are delivered to.
///
/// The kernel answers the request for an IPv6 address before the address has its local route: deferred
/// work adds that (`addrconf_dad_work`), also where duplicates are not looked for. On a busy node it
/// takes milliseconds, and until then what is sent to the address is lost.
fn await_delivery(
    netlink: &Netlink,
    device: &Device,
    addrs: impl Iterator<Item = IpAddr>,
) -> Result<(), Error> {
    let start = Instant::now();
    for addr in addrs.filter(IpAddr::is_ipv6) {
        while !netlink.delivers(device, addr)? {
            if start.elapsed() > DELIVERY_TIMEOUT {
                warn!(
                    "{addr} is on {}, but the kernel does not deliver to it after {} ms: first packets may be lost",
                    device.name,
                    DELIVERY_TIMEOUT.as_millis()
                );
                return Ok(());
            }
            thread::sleep(DELIVERY_POLL);
        }
    }
    Ok(())
}

/// The link-local address that belongs to a MAC (RFC 4291, appendix A).
pub(super) fn link_local(mac: Mac) -> IpNet {
    let mut id = [0, 0, 0, 0xff, 0xfe, 0, 0, 0];
    id[..3].copy_from_slice(&mac.0[..3]);
    id[5..].copy_from_slice(&mac.0[3..]);
    id[0] ^= 2;
    let addr = Ipv6Addr::from((0xfe80_u128 << 112) | u128::from(u64::from_be_bytes(id)));
    Ipv6Net::new(addr, 64).map_or(IpNet::from(IpAddr::V6(addr)), IpNet::V6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_local_addresses_follow_from_macs() {
        let mac = Mac([0x02, 0x11, 0x22, 0x33, 0x44, 0x55]);
        assert_eq!(link_local(mac).to_string(), "fe80::11:22ff:fe33:4455/64");
    }
}

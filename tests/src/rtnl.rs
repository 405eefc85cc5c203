//! Devices, addresses and routes of a network namespace, made and changed by rtnetlink: no process is started for it, and none of the
//! plugin's own netlink code is used.

use std::{net::IpAddr, os::fd::AsRawFd as _};

use anyhow::{Context as _, Result};
use ipnet::IpNet;
use rtnetlink::{
    Error, Handle, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder,
    packet_route::{
        address::AddressHeaderFlags,
        link::{InfoData, InfoVeth, LinkMessage},
        route::{RouteHeader, RouteScope, RouteType},
        rule::RuleAction,
    },
};
use tokio::runtime::{Builder, Runtime};

use crate::{Family, netns::Netns};

/// The message that changes a device, before it is sent.
pub type Change = LinkMessageBuilder<LinkUnspec>;

/// A socket of a network namespace. It stays on the thread that entered the namespace.
#[derive(Debug)]
pub struct Rtnl {
    runtime: Runtime,
    handle: Handle,
}

impl Netns {
    /// Changes devices, addresses and routes of this namespace.
    pub fn rtnl<T: Send>(&self, work: impl FnOnce(&Rtnl) -> Result<T> + Send) -> Result<T> {
        self.run(|| work(&Rtnl::open()?))
            .with_context(|| format!("in {}", self.name()))
    }

    /// Sets a device up.
    pub fn set_up(&self, device: &str) -> Result<()> {
        self.rtnl(|rtnl| rtnl.set_up(device))
    }

    /// Deletes a device.
    pub fn delete_link(&self, device: &str) -> Result<()> {
        self.rtnl(|rtnl| rtnl.delete(device))
    }

    /// Gives a device an MTU, in bytes.
    pub fn set_mtu(&self, device: &str, mtu: u32) -> Result<()> {
        self.rtnl(|rtnl| rtnl.set(device, |device| device.mtu(mtu)))
    }

    /// Connects this namespace with another one by a veth pair, both ends up, each with this MTU, in bytes.
    pub fn cable(&self, name: &str, other: &Self, peer: &str, mtu: u32) -> Result<()> {
        self.rtnl(|rtnl| {
            rtnl.add_veth(name, mtu, peer, Some(other))?;
            rtnl.set_up(name)
        })?;
        other.set_up(peer)
    }
}

impl Rtnl {
    fn open() -> Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_io()
            .build()
            .context("start a runtime")?;
        let handle = {
            let _inside = runtime.enter();
            let (connection, handle, _) =
                rtnetlink::new_connection().context("open a netlink socket")?;
            tokio::spawn(connection);
            handle
        };
        Ok(Self { runtime, handle })
    }

    fn wait(&self, request: impl Future<Output = Result<(), Error>>) -> Result<()> {
        Ok(self.runtime.block_on(request)?)
    }

    /// Makes a device.
    pub fn add(&self, link: LinkMessage) -> Result<()> {
        self.wait(self.handle.link().add(link).execute())
            .context("make a device")
    }

    /// Makes a veth pair, both ends down, each with this MTU, in bytes. The peer is in `netns`, or here.
    pub fn add_veth(&self, name: &str, mtu: u32, peer: &str, netns: Option<&Netns>) -> Result<()> {
        let mut other = LinkUnspec::new_with_name(peer).mtu(mtu);
        if let Some(netns) = netns {
            other = other.setns_by_fd(netns.as_raw_fd());
        }
        let pair = LinkVeth::new(name, peer)
            .mtu(mtu)
            .set_info_data(InfoData::Veth(InfoVeth::Peer(other.build())));
        self.add(pair.build())
            .with_context(|| format!("connect {name} and {peer}"))
    }

    /// Changes a device.
    pub fn set(&self, device: &str, change: impl FnOnce(Change) -> Change) -> Result<()> {
        let message = change(LinkUnspec::new_with_index(index(device)?)).build();
        self.wait(self.handle.link().set(message).execute())
            .with_context(|| format!("change {device}"))
    }

    /// Sets a device up.
    pub fn set_up(&self, device: &str) -> Result<()> {
        self.set(device, Change::up)
    }

    /// Deletes a device.
    pub fn delete(&self, device: &str) -> Result<()> {
        self.wait(self.handle.link().del(index(device)?).execute())
            .with_context(|| format!("delete {device}"))
    }

    /// Gives a device an address, whose network has a prefix of so many bits. Nobody looks for duplicates.
    pub fn add_address(&self, device: &str, address: IpAddr, bits: u8) -> Result<()> {
        let handle = self.handle.address();
        let mut request = handle.add(index(device)?, address, bits);
        if address.is_ipv6() {
            request.message_mut().header.flags |= AddressHeaderFlags::Nodad;
        }
        self.wait(request.execute())
            .with_context(|| format!("give {device} the address {address}/{bits}"))
    }

    /// Takes an address off a device.
    pub fn delete_address(&self, device: &str, address: IpAddr, bits: u8) -> Result<()> {
        let handle = self.handle.address();
        let message = handle
            .add(index(device)?, address, bits)
            .message_mut()
            .clone();
        self.wait(handle.del(message).execute())
            .with_context(|| format!("take the address {address}/{bits} off {device}"))
    }

    /// Adds a route.
    pub fn add_route(&self, route: Route<'_>) -> Result<()> {
        self.route(route, false)
    }

    /// Adds a route, in place of one to the same destination.
    pub fn replace_route(&self, route: Route<'_>) -> Result<()> {
        self.route(route, true)
    }

    fn route(&self, route: Route<'_>, replace: bool) -> Result<()> {
        let mut request = self.handle.route().add(route.message()?);
        if replace {
            request = request.replace();
        }
        self.wait(request.execute())
            .with_context(|| format!("{route:?}"))
    }

    /// Has packets to these addresses routed by the main table, whatever rules with a higher number say.
    pub fn add_rule_to_main(&self, to: &str, number: u32) -> Result<()> {
        let to: IpNet = to.parse()?;
        let rule = self
            .handle
            .rule()
            .add()
            .priority(number)
            .table_id(RouteHeader::RT_TABLE_MAIN.into())
            .action(RuleAction::ToTable);
        let bits = to.prefix_len();
        match to.addr() {
            IpAddr::V4(addr) => self.wait(rule.v4().destination_prefix(addr, bits).execute()),
            IpAddr::V6(addr) => self.wait(rule.v6().destination_prefix(addr, bits).execute()),
        }
        .with_context(|| format!("add a rule for {to}"))
    }
}

/// A route of the main table.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Route<'a> {
    to: &'a str,
    via: Option<IpAddr>,
    by: Option<&'a str>,
    kind: RouteType,
}

impl<'a> Route<'a> {
    /// A route to these addresses, as `10.0.0.0/8` or `::1/128`.
    pub const fn to(to: &'a str) -> Self {
        Self {
            to,
            via: None,
            by: None,
            kind: RouteType::Unicast,
        }
    }

    /// A route to everything of a family.
    pub const fn default(family: Family) -> Self {
        Self::to(family.everywhere())
    }

    /// Its next hop is this neighbour.
    pub const fn via(mut self, gateway: IpAddr) -> Self {
        self.via = Some(gateway);
        self
    }

    /// Its packets leave by this device.
    pub const fn by(mut self, device: &'a str) -> Self {
        self.by = Some(device);
        self
    }

    /// Its packets are dropped.
    pub const fn blackhole(mut self) -> Self {
        self.kind = RouteType::BlackHole;
        self
    }

    fn message(self) -> Result<rtnetlink::packet_route::route::RouteMessage> {
        let to: IpNet = self.to.parse().with_context(|| self.to.to_owned())?;
        let mut route = RouteMessageBuilder::<IpAddr>::new()
            .destination_prefix(to.addr(), to.prefix_len())
            .map_err(anyhow::Error::msg)?
            .kind(self.kind);
        match self.via {
            Some(gateway) => route = route.gateway(gateway).map_err(anyhow::Error::msg)?,
            // As `ip route` does: what has no next hop is on the link.
            None if self.kind == RouteType::Unicast => route = route.scope(RouteScope::Link),
            None => {}
        }
        if let Some(device) = self.by {
            route = route.output_interface(index(device)?);
        }
        Ok(route.build())
    }
}

/// The number of a device of the calling thread's namespace.
fn index(device: &str) -> Result<u32> {
    nix::net::if_::if_nametoindex(device).with_context(|| format!("find the device {device}"))
}

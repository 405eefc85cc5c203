//! The kernel's side: what there is of ours, and what makes it what it should be.
//!
//! A route is ours if it has our protocol number, so that neither an agent that starts nor one of another version
//! needs a memory. The device is ours by its name.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use anyhow::Context as _;
use futures::TryStreamExt as _;
use ipnet::IpNet;
use rtnetlink::Handle;
use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage};
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};

use crate::plan::{Desired, OnLink};

pub(crate) mod events;
mod routes;
mod tunnel;

/// The device of VXLAN.
pub(crate) const DEVICE: &str = "underpass-vxlan";

/// Changes routes and devices of this network namespace.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    handle: Handle,
    tunnel: TunnelOptions,
    /// The number of the VXLAN device, for who listens.
    device: Arc<AtomicU32>,
}

/// What the cluster decides of VXLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TunnelOptions {
    /// The network identifier.
    pub(crate) id: u32,
    /// The UDP port on the outside.
    pub(crate) port: u16,
}

/// A device, as far as it matters here.
struct Link {
    index: u32,
    name: String,
    mtu: u32,
    is_up: bool,
    is_loopback: bool,
}

impl Kernel {
    /// Opens a socket of this network namespace. `device` will have the number of the VXLAN device.
    pub(crate) fn open(tunnel: TunnelOptions, device: Arc<AtomicU32>) -> anyhow::Result<Self> {
        // Events have a socket of their own: where one overflows answers get lost.
        let (connection, handle, _) =
            rtnetlink::new_connection().context("cannot open a socket for routes")?;
        tokio::spawn(connection);
        Ok(Self {
            handle,
            tunnel,
            device,
        })
    }

    /// Lists the prefixes that are on the node's links, apart from those of our own device.
    pub(crate) async fn on_link(&self) -> anyhow::Result<Vec<OnLink>> {
        let links = self.links().await?;
        let addresses = self.addresses().await?;
        let on_link = addresses.iter().filter_map(|message| {
            let link = links
                .iter()
                .find(|link| link.index == message.header.index)?;
            let net = net_of(message)?;
            (link.is_up && !link.is_loopback && link.name != DEVICE).then_some(OnLink {
                net: prefix_of(message)?,
                own: net.addr(),
                device: link.index,
                mtu: link.mtu,
            })
        });
        Ok(on_link.collect())
    }

    /// Makes the kernel have what is desired. Returns what had to be changed, a sentence each. Goes on past errors.
    pub(crate) async fn apply(&self, desired: &Desired) -> (Vec<String>, Vec<anyhow::Error>) {
        let mut changes = Vec::new();
        let mut errors = Vec::new();
        // The device comes before the routes that need it, and goes after them.
        let device = match &desired.tunnel {
            Some(tunnel) => {
                let kept = self.keep_tunnel(tunnel, desired, &mut changes, &mut errors);
                match kept.await {
                    Ok(device) => Some(device),
                    Err(error) => {
                        errors.push(error);
                        None
                    }
                }
            }
            None => None,
        };
        self.keep_routes(desired, device, &mut changes, &mut errors)
            .await;
        if desired.tunnel.is_none()
            && let Err(error) = self.remove_tunnel(&mut changes).await
        {
            errors.push(error);
        }
        (changes, errors)
    }

    async fn links(&self) -> anyhow::Result<Vec<Link>> {
        let messages: Vec<LinkMessage> = self
            .handle
            .link()
            .get()
            .execute()
            .try_collect()
            .await
            .context("cannot list the devices")?;
        let link = |message: LinkMessage| {
            let mut link = Link {
                index: message.header.index,
                name: String::new(),
                mtu: 0,
                is_up: message.header.flags.contains(LinkFlags::Up),
                is_loopback: message.header.flags.contains(LinkFlags::Loopback),
            };
            for attribute in message.attributes {
                match attribute {
                    LinkAttribute::IfName(name) => link.name = name,
                    LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                    _ => {}
                }
            }
            link
        };
        Ok(messages.into_iter().map(link).collect())
    }

    async fn addresses(&self) -> anyhow::Result<Vec<AddressMessage>> {
        self.handle
            .address()
            .get()
            .execute()
            .try_collect()
            .await
            .context("cannot list the addresses")
    }
}

/// The prefix that is on the link: with another address at the other end, that one's.
fn prefix_of(message: &AddressMessage) -> Option<IpNet> {
    let address = message
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        });
    let prefix = IpNet::new(address?, message.header.prefix_len).ok()?;
    Some(prefix.trunc())
}

/// The node's own address, with the length of its prefix.
fn net_of(message: &AddressMessage) -> Option<IpNet> {
    let find =
        |which: fn(&AddressAttribute) -> Option<IpAddr>| message.attributes.iter().find_map(which);
    let local = find(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    let address = find(|attribute| match attribute {
        AddressAttribute::Address(address) => Some(*address),
        _ => None,
    });
    IpNet::new(local.or(address)?, message.header.prefix_len).ok()
}

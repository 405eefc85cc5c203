//! The VXLAN device, and what it knows of those of other nodes.

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::Context as _;
use futures::TryStreamExt as _;
use ipnet::IpNet;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::link::{
    InfoData, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use rtnetlink::packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use rtnetlink::{LinkMessageBuilder, LinkUnspec, LinkVxlan};

use super::{DEVICE, Kernel, net_of};
use crate::plan::{Desired, Mac, Neighbour, Tunnel};

/// The device as the kernel describes it.
struct Existing {
    index: u32,
    mtu: u32,
    is_up: bool,
    mac: Vec<u8>,
    vxlan: Vec<InfoVxlan>,
}

impl Kernel {
    /// Makes the device, its addresses and what it knows as they are desired. Returns its number.
    pub(super) async fn keep_tunnel(
        &self,
        tunnel: &Tunnel,
        desired: &Desired,
        changes: &mut Vec<String>,
    ) -> anyhow::Result<u32> {
        let mut existing = self.existing().await?;
        if let Some(device) = &existing
            && !self.is_same(device, tunnel)
        {
            self.delete(device.index).await?;
            existing = None;
        }
        if existing.is_none() {
            self.create(tunnel).await?;
            changes.push(format!("device {DEVICE}, outside {}", tunnel.local));
            existing = self.existing().await?;
        }
        let device = existing.with_context(|| format!("{DEVICE} was deleted while it was made"))?;
        if device.mtu != tunnel.mtu || !device.is_up {
            let message = LinkUnspec::new_with_index(device.index)
                .mtu(tunnel.mtu)
                .up()
                .build();
            let request = self.handle.link().set(message);
            request
                .execute()
                .await
                .with_context(|| format!("cannot set {DEVICE} up with an MTU of {}", tunnel.mtu))?;
            changes.push(format!(
                "device {DEVICE} is up with an MTU of {}",
                tunnel.mtu
            ));
        }
        self.keep_addresses(device.index, &tunnel.addresses, changes)
            .await?;
        self.keep_neighbours(device.index, &desired.neighbours, changes)
            .await?;
        self.keep_forwarding(device.index, &desired.forwarding, changes)
            .await?;
        Ok(device.index)
    }

    /// Deletes the device, if there is one.
    pub(super) async fn remove_tunnel(&self, changes: &mut Vec<String>) -> anyhow::Result<()> {
        if let Some(device) = self.existing().await? {
            self.delete(device.index).await?;
            changes.push(format!("no device {DEVICE} any more"));
        }
        Ok(())
    }

    async fn existing(&self) -> anyhow::Result<Option<Existing>> {
        let messages: Vec<LinkMessage> = self
            .handle
            .link()
            .get()
            .execute()
            .try_collect()
            .await
            .context("cannot list the devices")?;
        let ours = |message: &LinkMessage| {
            message
                .attributes
                .iter()
                .any(|attribute| matches!(attribute, LinkAttribute::IfName(name) if name == DEVICE))
        };
        let Some(message) = messages.into_iter().find(ours) else {
            return Ok(None);
        };
        let mut device = Existing {
            index: message.header.index,
            mtu: 0,
            is_up: message.header.flags.contains(LinkFlags::Up),
            mac: Vec::new(),
            vxlan: Vec::new(),
        };
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::Mtu(mtu) => device.mtu = mtu,
                LinkAttribute::Address(mac) => device.mac = mac,
                LinkAttribute::LinkInfo(infos) => {
                    for info in infos {
                        if let LinkInfo::Data(InfoData::Vxlan(vxlan)) = info {
                            device.vxlan = vxlan;
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(Some(device))
    }

    /// What can't be changed on a device that is there.
    fn is_same(&self, device: &Existing, tunnel: &Tunnel) -> bool {
        let local = match tunnel.local {
            IpAddr::V4(address) => InfoVxlan::Local(address),
            IpAddr::V6(address) => InfoVxlan::Local6(address),
        };
        let wanted = [
            InfoVxlan::Id(self.tunnel.id),
            InfoVxlan::Port(self.tunnel.port),
            InfoVxlan::Learning(false),
            local,
        ];
        device.mac == tunnel.mac && wanted.iter().all(|wanted| device.vxlan.contains(wanted))
    }

    async fn create(&self, tunnel: &Tunnel) -> anyhow::Result<()> {
        let device = LinkMessageBuilder::<LinkVxlan>::new(DEVICE)
            .id(self.tunnel.id)
            .port(self.tunnel.port)
            .learning(false);
        let device = match tunnel.local {
            IpAddr::V4(address) => device.local(address),
            IpAddr::V6(address) => device.local6(address),
        };
        let message = device
            .address(tunnel.mac.to_vec())
            .mtu(tunnel.mtu)
            .up()
            .build();
        let request = self.handle.link().add(message);
        request.execute().await.with_context(|| {
            format!(
                "cannot make {DEVICE} (VXLAN {}, UDP port {}, outside {}): another VXLAN device may have the same \
                 identifier and port",
                self.tunnel.id, self.tunnel.port, tunnel.local
            )
        })
    }

    async fn delete(&self, index: u32) -> anyhow::Result<()> {
        let request = self.handle.link().del(index);
        request
            .execute()
            .await
            .with_context(|| format!("cannot delete {DEVICE}"))
    }

    async fn keep_addresses(
        &self,
        index: u32,
        wanted: &BTreeSet<IpNet>,
        changes: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        let mut missing = wanted.clone();
        for message in self.addresses().await? {
            if message.header.index != index {
                continue;
            }
            let Some(net) = net_of(&message) else {
                continue;
            };
            let is_link_local =
                matches!(net.addr(), IpAddr::V6(address) if address.is_unicast_link_local());
            if !missing.remove(&net) && !is_link_local {
                let request = self.handle.address().del(message);
                request
                    .execute()
                    .await
                    .with_context(|| format!("cannot take {net} from {DEVICE}"))?;
                changes.push(format!("no address {net} on {DEVICE} any more"));
            }
        }
        for net in missing {
            let request = self
                .handle
                .address()
                .add(index, net.addr(), net.prefix_len());
            request
                .execute()
                .await
                .with_context(|| format!("cannot give {net} to {DEVICE}"))?;
            changes.push(format!("address {net} on {DEVICE}"));
        }
        Ok(())
    }

    async fn keep_neighbours(
        &self,
        index: u32,
        wanted: &BTreeSet<Neighbour>,
        changes: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        let mut missing = wanted.clone();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            for message in self.permanent(index, family).await? {
                let Some(neighbour) = neighbour(&message) else {
                    continue;
                };
                if !missing.remove(&neighbour) {
                    self.forget(message).await?;
                    changes.push(format!("no neighbour {} any more", neighbour.address));
                }
            }
        }
        for neighbour in missing {
            let request = self
                .handle
                .neighbours()
                .add(index, neighbour.address)
                .link_layer_address(&neighbour.mac)
                .state(NeighbourState::Permanent)
                .replace();
            request
                .execute()
                .await
                .with_context(|| format!("cannot make the neighbour {}", neighbour.address))?;
            changes.push(format!("neighbour {}", neighbour.address));
        }
        Ok(())
    }

    async fn keep_forwarding(
        &self,
        index: u32,
        wanted: &BTreeSet<(Mac, IpAddr)>,
        changes: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        let mut missing = wanted.clone();
        for message in self.permanent(index, AddressFamily::Bridge).await? {
            let Some(entry) = neighbour(&message) else {
                continue;
            };
            if !missing.remove(&(entry.mac, entry.address)) {
                self.forget(message).await?;
                changes.push(format!("no node at {} any more", entry.address));
            }
        }
        for (mac, outside) in missing {
            let request = self
                .handle
                .neighbours()
                .add_bridge(index, &mac)
                .destination(outside)
                .flags(NeighbourFlags::Own)
                .state(NeighbourState::Permanent)
                .replace();
            request
                .execute()
                .await
                .with_context(|| format!("cannot tell {DEVICE} of the node at {outside}"))?;
            changes.push(format!("node at {outside}"));
        }
        Ok(())
    }

    async fn forget(&self, message: NeighbourMessage) -> anyhow::Result<()> {
        let request = self.handle.neighbours().del(message);
        request
            .execute()
            .await
            .with_context(|| format!("cannot delete an entry of {DEVICE}"))
    }

    /// Lists the permanent entries of the device: those that somebody made.
    async fn permanent(
        &self,
        index: u32,
        family: AddressFamily,
    ) -> anyhow::Result<Vec<NeighbourMessage>> {
        let request = self.handle.neighbours().get().set_address_family(family);
        let mut messages: Vec<NeighbourMessage> = request
            .execute()
            .try_collect()
            .await
            .context("cannot list the neighbours")?;
        messages.retain(|message| {
            message.header.ifindex == index && message.header.state == NeighbourState::Permanent
        });
        Ok(messages)
    }
}

fn neighbour(message: &NeighbourMessage) -> Option<Neighbour> {
    let mut address = None;
    let mut mac = None;
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => {
                address = Some(IpAddr::from(*ip));
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => {
                address = Some(IpAddr::from(*ip));
            }
            // The forwarding database says an address without its family.
            NeighbourAttribute::Destination(NeighbourAddress::Other(bytes)) => {
                address = match bytes.len() {
                    4 => <[u8; 4]>::try_from(bytes.as_slice()).ok().map(IpAddr::from),
                    _ => <[u8; 16]>::try_from(bytes.as_slice())
                        .ok()
                        .map(IpAddr::from),
                };
            }
            NeighbourAttribute::LinkLayerAddress(bytes) => {
                mac = Mac::try_from(bytes.as_slice()).ok();
            }
            _ => {}
        }
    }
    Some(Neighbour {
        address: address?,
        mac: mac?,
    })
}

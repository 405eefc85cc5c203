//! The VXLAN device, and what it knows of those of other nodes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::atomic::Ordering;

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
    /// Makes the device, its addresses and what it knows as they are desired. Returns its number, if there is one at
    /// the end; what could not be done with it is in `errors`.
    pub(super) async fn keep_tunnel(
        &self,
        tunnel: &Tunnel,
        desired: &Desired,
        changes: &mut Vec<String>,
        errors: &mut Vec<anyhow::Error>,
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
        self.device.store(device.index, Ordering::Relaxed);
        if let Err(error) = self.keep_up(&device, tunnel, changes).await {
            errors.push(error);
        }
        self.keep_addresses(device.index, &tunnel.addresses, changes, errors)
            .await;
        self.keep_neighbours(device.index, &desired.neighbours, changes, errors)
            .await;
        self.keep_forwarding(device.index, &desired.forwarding, changes, errors)
            .await;
        Ok(device.index)
    }

    async fn keep_up(
        &self,
        device: &Existing,
        tunnel: &Tunnel,
        changes: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        if device.mtu == tunnel.mtu && device.is_up {
            return Ok(());
        }
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
        Ok(())
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
        errors: &mut Vec<anyhow::Error>,
    ) {
        let mut missing = wanted.clone();
        let addresses = match self.addresses().await {
            Ok(addresses) => addresses,
            Err(error) => return errors.push(error),
        };
        for message in addresses {
            if message.header.index != index {
                continue;
            }
            let Some(net) = net_of(&message) else {
                continue;
            };
            let is_link_local =
                matches!(net.addr(), IpAddr::V6(address) if address.is_unicast_link_local());
            if !missing.remove(&net) && !is_link_local {
                let outcome = self.handle.address().del(message).execute().await;
                let what = format!("no address {net} on {DEVICE} any more");
                note(outcome, what, changes, errors);
            }
        }
        for net in missing {
            let request = self
                .handle
                .address()
                .add(index, net.addr(), net.prefix_len());
            let what = format!("address {net} on {DEVICE}");
            note(request.execute().await, what, changes, errors);
        }
    }

    async fn keep_neighbours(
        &self,
        index: u32,
        wanted: &BTreeSet<Neighbour>,
        changes: &mut Vec<String>,
        errors: &mut Vec<anyhow::Error>,
    ) {
        let mut missing = wanted.clone();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let entries = match self.permanent(index, family).await {
                Ok(entries) => entries,
                Err(error) => return errors.push(error),
            };
            for message in entries {
                let Some(neighbour) = neighbour(&message) else {
                    continue;
                };
                if !missing.remove(&neighbour) {
                    let outcome = self.handle.neighbours().del(message).execute().await;
                    let what = format!("no neighbour {} any more", neighbour.address);
                    note(outcome, what, changes, errors);
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
            let what = format!("neighbour {} on {DEVICE}", neighbour.address);
            note(request.execute().await, what, changes, errors);
        }
    }

    async fn keep_forwarding(
        &self,
        index: u32,
        wanted: &BTreeSet<(Mac, IpAddr)>,
        changes: &mut Vec<String>,
        errors: &mut Vec<anyhow::Error>,
    ) {
        let mut missing = wanted.clone();
        let entries = match self.permanent(index, AddressFamily::Bridge).await {
            Ok(entries) => entries,
            Err(error) => return errors.push(error),
        };
        for message in entries {
            let Some(entry) = neighbour(&message) else {
                continue;
            };
            if !missing.remove(&(entry.mac, entry.address)) {
                let outcome = self.handle.neighbours().del(message).execute().await;
                let what = format!("no node at {} behind {DEVICE} any more", entry.address);
                note(outcome, what, changes, errors);
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
            let what = format!("node at {outside} behind {DEVICE}");
            note(request.execute().await, what, changes, errors);
        }
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

/// Notes what became of one change. The next comparison tries again.
fn note(
    outcome: Result<(), rtnetlink::Error>,
    what: String,
    changes: &mut Vec<String>,
    errors: &mut Vec<anyhow::Error>,
) {
    match outcome {
        Ok(()) => changes.push(what),
        Err(error) => errors.push(anyhow::Error::new(error).context(format!("not done: {what}"))),
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

//! Neighbours that never expire: nobody on a veth has to ask who has an address.

use std::net::IpAddr;

use netlink_packet_route::{
    RouteNetlinkMessage,
    neighbour::{
        NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
    },
    route::RouteType,
};

use super::{Error, Mac, Mode, Netlink, addr::family, link::Device};

/// A permanent neighbour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Neighbour {
    /// Its address.
    pub addr: IpAddr,
    /// The MAC that packets to it are sent to.
    pub mac: Mac,
}

/// What a neighbour is to its device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The end of a way.
    Host,
    /// Routes lead by it. For IPv6 the kernel wants to know (`NTF_ROUTER`): it takes a gateway that is not marked for one that has ceased to be a
    /// router, and forgets the path MTUs behind it as soon as it tidies up, half a minute later, not after ten minutes (`rt6_age_examine_exception` in
    /// `net/ipv6/route.c`, since Linux 4.15).
    Router,
}

impl Neighbour {
    fn from_message(message: NeighbourMessage) -> Option<Self> {
        let mut addr = None;
        let mut mac = None;
        for attribute in message.attributes {
            match attribute {
                NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => {
                    addr = Some(IpAddr::V4(v4));
                }
                NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => {
                    addr = Some(IpAddr::V6(v6));
                }
                NeighbourAttribute::LinkLayerAddress(bytes) => {
                    mac = bytes.as_slice().try_into().ok().map(Mac);
                }
                _ => {}
            }
        }
        (message.header.state == NeighbourState::Permanent).then_some(())?;
        Some(Self {
            addr: addr?,
            mac: mac?,
        })
    }
}

impl Netlink {
    /// Adds or replaces a permanent neighbour.
    pub fn add_neighbour(
        &self,
        device: &Device,
        role: Role,
        addr: IpAddr,
        mac: Mac,
    ) -> Result<(), Error> {
        let mut message = NeighbourMessage::default();
        if role == Role::Router {
            message.header.flags = NeighbourFlags::Router;
        }
        message.header.family = family(addr);
        message.header.ifindex = device.index;
        message.header.state = NeighbourState::Permanent;
        message.header.kind = RouteType::Unicast;
        message.attributes = vec![
            NeighbourAttribute::Destination(addr.into()),
            NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()),
        ];
        self.change(
            &RouteNetlinkMessage::NewNeighbour(message),
            Mode::Replace,
            || format!("make {addr} a neighbour at {mac} on {}", device.name),
        )
    }

    /// Lists the permanent neighbours on a device.
    pub fn neighbours(&self, index: u32) -> Result<Vec<Neighbour>, Error> {
        let mut message = NeighbourMessage::default();
        message.attributes.push(NeighbourAttribute::IfIndex(index));
        let message = RouteNetlinkMessage::GetNeighbour(message);
        let answers = self.dump(
            &message,
            |_| true,
            || format!("list the neighbours on device number {index}"),
        )?;
        Ok(answers
            .into_iter()
            .filter_map(|message| match message {
                RouteNetlinkMessage::NewNeighbour(message) => Neighbour::from_message(message),
                _ => None,
            })
            .collect())
    }
}

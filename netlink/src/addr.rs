//! Addresses of devices.

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope},
};

use super::{Error, Mode, Netlink, link::Device, socket::word};

/// Offset of the device's index in an `ifaddrmsg`.
const INDEX_AT: usize = 4;

/// An address as the kernel describes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a flag of the kernel's"
)]
pub struct Address {
    /// The device that has it.
    pub index: u32,
    /// Address and length of its on-link prefix.
    pub net: IpNet,
    /// Valid beyond its link and host.
    pub global: bool,
    /// A secondary IPv4 address, or a temporary IPv6 address: never the default source.
    pub secondary: bool,
    /// Valid for a while, if nobody prolongs that: of IPv6 most often one that a router has advertised the prefix of.
    pub has_lifetime: bool,
    /// Not usable as a source: deprecated, tentative or failed duplicate detection.
    pub unusable: bool,
}

/// The reach of a new address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// Everywhere.
    Global,
    /// On its link alone.
    Link,
}

impl Address {
    fn from_message(message: AddressMessage) -> Option<Self> {
        let mut flags = AddressFlags::empty();
        let mut address = None;
        let mut local = None;
        for attribute in message.attributes {
            match attribute {
                AddressAttribute::Address(addr) => address = Some(addr),
                AddressAttribute::Local(addr) => local = Some(addr),
                AddressAttribute::Flags(all) => flags = all,
                _ => {}
            }
        }
        // On point-to-point links the first is the peer's.
        let addr = local.or(address)?;
        Some(Self {
            index: message.header.index,
            net: IpNet::new(addr, message.header.prefix_len).ok()?,
            global: message.header.scope == AddressScope::Universe,
            secondary: flags.contains(AddressFlags::Secondary),
            has_lifetime: !flags.contains(AddressFlags::Permanent),
            unusable: flags.intersects(
                AddressFlags::Deprecated | AddressFlags::Tentative | AddressFlags::Dadfailed,
            ),
        })
    }
}

impl Netlink {
    /// Gives an address to a device: usable at once (no duplicate detection). A global one comes
    /// without the route to its prefix that the kernel would add.
    pub fn add_address(&self, device: &Device, net: IpNet, scope: Scope) -> Result<(), Error> {
        let mut flags = match scope {
            Scope::Global => AddressFlags::Noprefixroute,
            Scope::Link => AddressFlags::empty(),
        };
        if net.addr().is_ipv6() {
            flags |= AddressFlags::Nodad;
        }
        let mut message = address_message(device.index, net);
        message.header.scope = match scope {
            Scope::Global => AddressScope::Universe,
            Scope::Link => AddressScope::Link,
        };
        message.attributes.push(AddressAttribute::Flags(flags));
        self.change(
            &RouteNetlinkMessage::NewAddress(message),
            Mode::Create,
            || format!("give {net} to {}", device.name),
        )
    }

    /// Lists all addresses of the namespace.
    pub fn addresses(&self) -> Result<Vec<Address>, Error> {
        self.addresses_where(|_| true)
    }

    /// Lists the addresses of the devices whose index is chosen. The others are not decoded, which on a node
    /// with hundreds of containers would be most of the work.
    pub fn addresses_where(
        &self,
        mut chosen: impl FnMut(u32) -> bool,
    ) -> Result<Vec<Address>, Error> {
        let wanted = |payload: &[u8]| word(payload, INDEX_AT).is_some_and(&mut chosen);
        self.list_addresses(AddressMessage::default(), wanted)
    }

    /// Lists the addresses of one device, which may be gone.
    pub fn addresses_on(&self, index: u32) -> Result<Vec<Address>, Error> {
        let mut message = AddressMessage::default();
        message.header.index = index;
        match self.list_addresses(message, |_| true) {
            Err(error) if error.is_absent() => Ok(Vec::new()),
            answer => answer,
        }
    }

    fn list_addresses(
        &self,
        message: AddressMessage,
        wanted: impl FnMut(&[u8]) -> bool,
    ) -> Result<Vec<Address>, Error> {
        let message = RouteNetlinkMessage::GetAddress(message);
        let answers = self.dump(&message, wanted, || "list the addresses".to_owned())?;
        Ok(answers
            .into_iter()
            .filter_map(|message| match message {
                RouteNetlinkMessage::NewAddress(message) => Address::from_message(message),
                _ => None,
            })
            .collect())
    }
}

fn address_message(index: u32, net: IpNet) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family(net.addr());
    message.header.prefix_len = net.prefix_len();
    message.header.index = index;
    message.attributes = vec![
        AddressAttribute::Address(net.addr()),
        AddressAttribute::Local(net.addr()),
    ];
    message
}

/// The netlink family of an address.
pub(super) const fn family(addr: IpAddr) -> AddressFamily {
    match addr {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

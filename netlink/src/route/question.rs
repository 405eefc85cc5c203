//! What a list of routes is asked for: the kernel leaves out all others.

use netlink_packet_route::{
    AddressFamily,
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteType},
};

/// Which routes are listed.
pub(super) struct Question {
    pub(super) family: AddressFamily,
    pub(super) table: u32,
    /// The device, or any.
    pub(super) by: Option<u32>,
    pub(super) protocol: RouteProtocol,
    pub(super) kind: RouteType,
}

impl Question {
    /// All of a table, of both families.
    pub(super) fn of(table: u32) -> Self {
        Self {
            family: AddressFamily::Unspec,
            table,
            by: None,
            protocol: RouteProtocol::Unspec,
            kind: RouteType::Unspec,
        }
    }

    pub(super) fn message(&self) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header = RouteHeader {
            address_family: self.family,
            table: u8::try_from(self.table).unwrap_or(RouteHeader::RT_TABLE_UNSPEC),
            protocol: self.protocol,
            kind: self.kind,
            ..RouteHeader::default()
        };
        message.attributes.push(RouteAttribute::Table(self.table));
        message.attributes.extend(self.by.map(RouteAttribute::Oif));
        message
    }
}

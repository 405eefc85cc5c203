//! What the kernel tells everybody who listens of changes, in the order in which they were made.

use anyhow::{Context as _, Result};
use rtnetlink::{
    MulticastGroup,
    packet_core::{NetlinkMessage, NetlinkPayload},
    packet_route::RouteNetlinkMessage,
    sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE},
};

use crate::netns::Netns;

/// Room for what comes before anybody reads it, in bytes.
const ROOM: u32 = 1 << 20;

/// Changes that a namespace has seen, and that nobody has read yet.
pub struct Announcements(Socket);

impl Netns {
    /// Listens to changes of these kinds from now on.
    pub fn announcements(&self, groups: &[MulticastGroup]) -> Result<Announcements> {
        let listen = || {
            let mut socket = Socket::new(NETLINK_ROUTE)?;
            socket.set_rx_buf_sz(ROOM)?;
            socket.set_non_blocking(true)?;
            socket.bind(&SocketAddr::new(0, 0))?;
            for group in groups {
                socket.add_membership(*group as u32)?;
            }
            Ok::<_, std::io::Error>(socket)
        };
        let socket = self.run(listen).context("listen to the kernel's changes")?;
        Ok(Announcements(socket))
    }
}

impl Announcements {
    /// Reads what has come. Fails if some of it was lost.
    pub fn read(&self) -> Result<Vec<RouteNetlinkMessage>> {
        let mut read = Vec::new();
        loop {
            let bytes = match self.0.recv_from_full() {
                Ok((bytes, _)) => bytes,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(read),
                Err(error) => return Err(error).context("read the kernel's changes"),
            };
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)?;
                // Each begins at a multiple of four bytes.
                let length = usize::try_from(message.header.length)?.next_multiple_of(4);
                rest = rest.get(length..).unwrap_or_default();
                if let NetlinkPayload::InnerMessage(message) = message.payload {
                    read.push(message);
                }
            }
        }
    }
}

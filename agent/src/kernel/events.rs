//! What others change in the kernel: told at once, read later.
//!
//! An event is never the reason for one action: it says that it is time to compare. What is lost of them (a full
//! socket buffer) is found by the next comparison.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Context as _;
use futures::StreamExt as _;
use rtnetlink::packet_core::NetlinkPayload;
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::{MulticastGroup, new_multicast_connection};
use tokio::sync::Notify;

const GROUPS: [MulticastGroup; 6] = [
    MulticastGroup::Link,
    MulticastGroup::Ipv4Ifaddr,
    MulticastGroup::Ipv6Ifaddr,
    MulticastGroup::Ipv4Route,
    MulticastGroup::Ipv6Route,
    MulticastGroup::Neigh,
];

/// What of the kernel may have become another.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// Anything that routes, or the VXLAN device, depend on.
    pub(crate) any: Notify,
    /// Devices and addresses: what `underpass apply` looks at.
    pub(crate) devices: Notify,
    /// The number of the VXLAN device, once there is one.
    pub(crate) device: Arc<AtomicU32>,
}

/// Opens a socket of this network namespace, and listens.
pub(crate) fn listen() -> anyhow::Result<Arc<Events>> {
    let (connection, _, mut messages) = new_multicast_connection(&GROUPS)
        .context("cannot open a socket for what happens to routes")?;
    let events = Arc::new(Events::default());
    tokio::spawn(connection);
    let tell = Arc::clone(&events);
    tokio::spawn(async move {
        while let Some((message, _)) = messages.next().await {
            match message.payload {
                NetlinkPayload::InnerMessage(message) => tell.hear(&message),
                // The socket's buffer was full: nobody knows what was in the messages that were lost.
                NetlinkPayload::Overrun(_) => tell.all(),
                _ => {}
            }
        }
    });
    Ok(events)
}

impl Events {
    fn hear(&self, message: &RouteNetlinkMessage) {
        match message {
            RouteNetlinkMessage::NewLink(_)
            | RouteNetlinkMessage::DelLink(_)
            | RouteNetlinkMessage::NewAddress(_)
            | RouteNetlinkMessage::DelAddress(_) => self.all(),
            RouteNetlinkMessage::DelRoute(_) => self.any.notify_one(),
            // Those of other devices come and go.
            RouteNetlinkMessage::DelNeighbour(entry)
                if entry.header.ifindex == self.device.load(Ordering::Relaxed) =>
            {
                self.any.notify_one();
            }
            _ => {}
        }
    }

    fn all(&self) {
        self.any.notify_one();
        self.devices.notify_one();
    }
}

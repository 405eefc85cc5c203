//! What others change in the kernel: told at once, read later.
//!
//! An event is never the reason for one action: it says that it is time to compare. What is lost of them (a full
//! socket buffer) is found by the next comparison.

use std::sync::Arc;

use anyhow::Context as _;
use futures::StreamExt as _;
use rtnetlink::packet_core::NetlinkPayload;
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::neighbour::NeighbourState;
use rtnetlink::{Handle, MulticastGroup, new_multicast_connection};
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
}

/// Opens a socket of this network namespace, and listens.
pub(crate) fn listen() -> anyhow::Result<(Handle, Arc<Events>)> {
    let (connection, handle, mut messages) =
        new_multicast_connection(&GROUPS).context("cannot open a socket for routes")?;
    let events = Arc::new(Events::default());
    tokio::spawn(connection);
    let tell = Arc::clone(&events);
    tokio::spawn(async move {
        while let Some((message, _)) = messages.next().await {
            let NetlinkPayload::InnerMessage(message) = message.payload else {
                continue;
            };
            match message {
                RouteNetlinkMessage::NewLink(_)
                | RouteNetlinkMessage::DelLink(_)
                | RouteNetlinkMessage::NewAddress(_)
                | RouteNetlinkMessage::DelAddress(_) => {
                    tell.any.notify_one();
                    tell.devices.notify_one();
                }
                RouteNetlinkMessage::DelRoute(_) => tell.any.notify_one(),
                // Pods' neighbours come and go; ours are permanent.
                RouteNetlinkMessage::DelNeighbour(entry)
                    if entry.header.state == NeighbourState::Permanent =>
                {
                    tell.any.notify_one();
                }
                _ => {}
            }
        }
    });
    Ok((handle, events))
}

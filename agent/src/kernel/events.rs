//! What others change in the kernel: told at once, read later.
//!
//! An event is never the reason for one action: it says that it is time to compare. What is lost of them (a full
//! socket buffer) is found by the next comparison.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use futures::StreamExt as _;
use ipnet::IpNet;
use rtnetlink::packet_core::NetlinkPayload;
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::{MulticastGroup, new_multicast_connection};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::routes::matters;

/// What uplinks depend on.
const DEVICES: [MulticastGroup; 3] = [
    MulticastGroup::Link,
    MulticastGroup::Ipv4Ifaddr,
    MulticastGroup::Ipv6Ifaddr,
];

/// What a daemon may change by the thousand: where this socket overflows, devices are still heard of.
const ROUTES: [MulticastGroup; 3] = [
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
    /// The ranges of pods: of other routes most are nothing to us. They do not overlap.
    ranges: Mutex<BTreeSet<IpNet>>,
}

/// Opens sockets of this network namespace, and listens. Each is a task of `sockets`.
pub(crate) fn listen(sockets: &mut JoinSet<()>) -> anyhow::Result<Arc<Events>> {
    let events = Arc::new(Events::default());
    follow(&DEVICES, &events, Events::all, sockets)?;
    follow(&ROUTES, &events, |events| events.any.notify_one(), sockets)?;
    Ok(events)
}

/// Listens to these groups. Where the socket's buffer was full nobody knows what was lost, and `anything` is told.
fn follow(
    groups: &[MulticastGroup],
    events: &Arc<Events>,
    anything: fn(&Events),
    sockets: &mut JoinSet<()>,
) -> anyhow::Result<()> {
    let (connection, _, mut messages) = new_multicast_connection(groups)
        .context("cannot open a socket for what happens to routes")?;
    sockets.spawn(connection);
    let tell = Arc::clone(events);
    tokio::spawn(async move {
        while let Some((message, _)) = messages.next().await {
            match message.payload {
                NetlinkPayload::InnerMessage(message) => tell.hear(&message),
                NetlinkPayload::Overrun(_) => anything(&tell),
                _ => {}
            }
        }
    });
    Ok(())
}

impl Events {
    /// Has routes to these ranges heard of.
    pub(crate) fn attend_to(&self, ranges: BTreeSet<IpNet>) {
        *self.ranges.lock().unwrap_or_else(PoisonError::into_inner) = ranges;
    }

    fn hear(&self, message: &RouteNetlinkMessage) {
        match message {
            RouteNetlinkMessage::NewLink(_)
            | RouteNetlinkMessage::DelLink(_)
            | RouteNetlinkMessage::NewAddress(_)
            | RouteNetlinkMessage::DelAddress(_) => self.all(),
            // Our own changes as well: the comparison after them finds all right, and changes nothing.
            RouteNetlinkMessage::NewRoute(route) | RouteNetlinkMessage::DelRoute(route) => {
                let ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
                if matters(route, &ranges) {
                    self.any.notify_one();
                }
            }
            // Those of other devices come and go. One that takes the place of ours is new.
            RouteNetlinkMessage::NewNeighbour(entry) | RouteNetlinkMessage::DelNeighbour(entry)
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

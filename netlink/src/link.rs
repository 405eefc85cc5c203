//! Devices: the container's pair, its attributes, and what is known of the others.

use std::{collections::BTreeSet, fmt, os::fd::AsRawFd as _};

pub use netlink_packet_route::link::InfoKind;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    link::{
        AfSpecInet, AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoGeneve, InfoNetkit,
        InfoPortKind, InfoVeth, InfoVxlan, LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo,
        LinkLayerType, LinkMessage, NetkitMode, State,
    },
    stats::{StatsFilterMask, StatsMessage},
};

use super::{
    Error, Mac, Mode, Netlink, Netns,
    socket::word,
    xdp::{self, Attached},
};

/// Offset of the index in an `ifinfomsg` and in an `if_stats_msg`.
const INDEX_AT: usize = 4;

/// A device as the kernel describes it.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent facts, each a flag of the kernel's message"
)]
pub struct Link {
    /// Its number in its network namespace.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// The text that `ip link` shows as its alias.
    pub alias: Option<String>,
    /// Driver: `veth`, `bridge`, `dummy`, `wireguard`; none for most hardware.
    pub kind: Option<InfoKind>,
    /// Zero on devices without an Ethernet address.
    pub mac: Mac,
    /// In bytes, without the Ethernet header.
    pub mtu: u32,
    /// True if it is set up.
    pub up: bool,
    /// True if packets can pass: it is up, has a carrier, and the kernel has taken note of both.
    pub operational: bool,
    /// True if it is the loopback device.
    pub loopback: bool,
    /// True if its packets carry an Ethernet header.
    pub ethernet: bool,
    /// The group that somebody put it into, 0 by default (`ip link set … group`).
    pub group: u32,
    /// Bridge, bond or VRF that it belongs to.
    pub controller: Option<u32>,
    /// True if [`Self::controller`] is a VRF.
    pub in_vrf: bool,
    /// Of a veth or netkit the peer, of a device that is made on another (a VLAN, a macvlan) that one: its index, in its own
    /// namespace.
    pub peer: Option<u32>,
    /// Where [`Self::peer`] is in another namespace: the number by which this namespace knows that one
    /// (`IFLA_LINK_NETNSID`).
    pub peer_netns: Option<i32>,
    /// Its own `net.ipv4.conf.<name>.rp_filter`.
    pub rp_filter: i32,
    /// Of a VXLAN or Geneve device: the UDP port at which it is the end of a tunnel, host order.
    pub port: Option<u16>,
    /// XDP programs that it has.
    pub xdp: Vec<Attached>,
}

impl Link {
    fn from_message(message: LinkMessage) -> Self {
        let flags = message.header.flags;
        let mut link = Self {
            index: message.header.index,
            up: flags.contains(LinkFlags::Up),
            loopback: flags.contains(LinkFlags::Loopback),
            ethernet: message.header.link_layer_type == LinkLayerType::Ether,
            ..Self::default()
        };
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name = name,
                LinkAttribute::IfAlias(alias) => link.alias = Some(alias),
                LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                LinkAttribute::OperState(state) => link.operational = state == State::Up,
                LinkAttribute::Group(group) => link.group = group,
                LinkAttribute::Controller(index) => link.controller = Some(index),
                LinkAttribute::Link(index) => link.peer = Some(index),
                LinkAttribute::LinkNetNsId(id) => link.peer_netns = Some(id),
                LinkAttribute::Address(bytes) => {
                    if let Ok(mac) = bytes.as_slice().try_into() {
                        link.mac = Mac(mac);
                    }
                }
                LinkAttribute::AfSpecUnspec(families) => link.rp_filter = rp_filter(&families),
                LinkAttribute::Xdp(description) => link.xdp = xdp::attached(&description),
                LinkAttribute::LinkInfo(infos) => {
                    for info in infos {
                        match info {
                            LinkInfo::Kind(kind) => link.kind = Some(kind),
                            LinkInfo::PortKind(kind) => link.in_vrf = kind == InfoPortKind::Vrf,
                            LinkInfo::Data(data) => link.port = port(&data),
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        link
    }

    /// Tells whether it is a veth.
    #[must_use]
    pub fn is_veth(&self) -> bool {
        self.kind == Some(InfoKind::Veth)
    }

    /// Tells whether it is a netkit.
    #[must_use]
    pub fn is_netkit(&self) -> bool {
        self.kind == Some(InfoKind::Netkit)
    }

    /// Tells whether it is one end of a pair: a veth or a netkit.
    #[must_use]
    pub fn is_paired(&self) -> bool {
        self.is_veth() || self.is_netkit()
    }
}

fn port(data: &InfoData) -> Option<u16> {
    match data {
        InfoData::Vxlan(data) => data.iter().find_map(|item| match item {
            InfoVxlan::Port(port) => Some(*port),
            _ => None,
        }),
        InfoData::Geneve(data) => data.iter().find_map(|item| match item {
            InfoGeneve::Port(port) => Some(*port),
            _ => None,
        }),
        _ => None,
    }
}

/// Zero, which changes nothing, if the device has no IPv4.
fn rp_filter(families: &[AfSpecUnspec]) -> i32 {
    let settings = families.iter().find_map(|family| match family {
        AfSpecUnspec::Inet(settings) => settings.iter().find_map(|settings| match settings {
            AfSpecInet::DevConf(settings) => Some(settings.rp_filter),
            _ => None,
        }),
        _ => None,
    });
    settings.unwrap_or(0)
}

/// The driver of a pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Driver {
    /// The oldest, which every kernel has.
    Veth,
    /// Since 6.7, with `CONFIG_NETKIT`: a pair whose one end may run programs on what the other sends.
    Netkit,
}

impl Driver {
    /// The name that the kernel has for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Veth => "veth",
            Self::Netkit => "netkit",
        }
    }

    fn info(self, peer: LinkMessage) -> [LinkInfo; 2] {
        let (kind, data) = match self {
            Self::Veth => (InfoKind::Veth, InfoData::Veth(InfoVeth::Peer(peer))),
            // With Ethernet headers: neighbours, ARP and everything else are as on a veth.
            Self::Netkit => (
                InfoKind::Netkit,
                InfoData::Netkit(vec![
                    InfoNetkit::Mode(NetkitMode::L2),
                    InfoNetkit::Peer(peer),
                ]),
            ),
        };
        [LinkInfo::Kind(kind), LinkInfo::Data(data)]
    }
}

/// A device to change: the kernel wants its number, people its name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    /// Its number in its network namespace.
    pub index: u32,
    /// Its name.
    pub name: String,
}

impl From<&Link> for Device {
    fn from(link: &Link) -> Self {
        Self {
            index: link.index,
            name: link.name.clone(),
        }
    }
}

/// One end of a pair to be made.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its MAC.
    pub mac: Mac,
}

/// A name for a device in a question.
#[derive(Clone, Copy, Debug)]
pub enum By<'a> {
    /// By its number in the network namespace.
    Index(u32),
    /// By its name.
    Name(&'a str),
}

impl fmt::Display for By<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "device number {index}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// The state that somebody gives a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admin {
    /// The device sends and receives.
    Up,
    /// The device does neither.
    Down,
}

/// Attributes of an existing device to change in one request; those that are `None` or false stay
/// as they are.
#[derive(Clone, Copy, Default, Debug)]
pub struct Change<'a> {
    /// Text that `ip link` shows, at most 255 bytes.
    pub alias: Option<&'a str>,
    /// The group of devices that it belongs to; 0 is that of all that are in no other.
    pub group: Option<u32>,
    /// Keep the kernel from making an IPv6 link-local address of its own.
    pub no_addr_gen: bool,
    /// Set the device up or down.
    pub admin: Option<Admin>,
}

impl Netlink {
    /// Makes a pair in one request, both ends down: one in this namespace, in this group of devices, its peer inside
    /// `netns`.
    pub fn create_pair(
        &self,
        driver: Driver,
        end: End<'_>,
        peer: End<'_>,
        netns: &Netns,
        mtu: u32,
        group: u32,
    ) -> Result<(), Error> {
        let attributes = |end: End<'_>| {
            vec![
                LinkAttribute::IfName(end.name.to_owned()),
                LinkAttribute::Address(end.mac.0.to_vec()),
                LinkAttribute::Mtu(mtu),
            ]
        };
        let mut inside = LinkMessage::default();
        inside.attributes = attributes(peer);
        inside
            .attributes
            .push(LinkAttribute::NetNsFd(netns.as_raw_fd()));
        let mut message = LinkMessage::default();
        message.attributes = attributes(end);
        message.attributes.push(LinkAttribute::Group(group));
        message
            .attributes
            .push(LinkAttribute::LinkInfo(driver.info(inside).into()));
        self.change(&RouteNetlinkMessage::NewLink(message), Mode::Create, || {
            format!(
                "create the {} pair {} (here) and {} (in {netns})",
                driver.name(),
                end.name,
                peer.name
            )
        })
        .map_err(|error| {
            error.advise(
                &[libc::EOPNOTSUPP],
                "this kernel has no such devices; load the module of that name",
            )
        })
    }

    /// Changes a device.
    pub fn set_link(&self, device: &Device, change: Change<'_>) -> Result<(), Error> {
        let mut message = LinkMessage::default();
        message.header.index = device.index;
        if let Some(admin) = change.admin {
            message.header.change_mask = LinkFlags::Up;
            message.header.flags = match admin {
                Admin::Up => LinkFlags::Up,
                Admin::Down => LinkFlags::empty(),
            };
        }
        if let Some(alias) = change.alias {
            message
                .attributes
                .push(LinkAttribute::IfAlias(alias.to_owned()));
        }
        if let Some(group) = change.group {
            message.attributes.push(LinkAttribute::Group(group));
        }
        if change.no_addr_gen {
            let inet6 = AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]);
            message
                .attributes
                .push(LinkAttribute::AfSpecUnspec(vec![inet6]));
        }
        self.change(
            &RouteNetlinkMessage::SetLink(message),
            Mode::Existing,
            || format!("configure {}", device.name),
        )
    }

    /// Deletes a device; of a pair, both ends. Returns whether there was one.
    pub fn delete_link(&self, index: u32) -> Result<bool, Error> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        let answer = self.change(
            &RouteNetlinkMessage::DelLink(message),
            Mode::Existing,
            || format!("delete device number {index}"),
        );
        match answer {
            Ok(()) => Ok(true),
            Err(error) if error.is_absent() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Finds the device of that index or name, if there is one.
    pub fn link(&self, by: By<'_>) -> Result<Option<Link>, Error> {
        let mut message = LinkMessage::default();
        match by {
            By::Index(index) => message.header.index = index,
            By::Name(name) => message
                .attributes
                .push(LinkAttribute::IfName(name.to_owned())),
        }
        message
            .attributes
            .push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        let answer = self.get(&RouteNetlinkMessage::GetLink(message), || {
            format!("look up {by}")
        });
        match answer {
            Ok(Some(RouteNetlinkMessage::NewLink(message))) => {
                Ok(Some(Link::from_message(message)))
            }
            Ok(_) => Ok(None),
            Err(error) if error.is_absent() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Lists all devices of the namespace.
    pub fn links(&self) -> Result<Vec<Link>, Error> {
        self.links_where(|_| true)
    }

    /// Lists the indices of all devices of the namespace.
    ///
    /// A list of devices tells a kilobyte about each. The kernel's shortest list that names every device
    /// is one of statistics that hardly any device has: 32 bytes each, and a thirtieth of the time.
    pub fn indices(&self) -> Result<BTreeSet<u32>, Error> {
        let mut message = StatsMessage::default();
        // An empty mask is refused.
        message.header.filter_mask = StatsFilterMask::AfSpec;
        let message = RouteNetlinkMessage::GetStats(message);
        let mut indices = Vec::new();
        let note = |payload: &[u8]| {
            indices.extend(word(payload, INDEX_AT));
            false
        };
        self.dump(&message, note, || "number the devices".to_owned())?;
        Ok(indices.into_iter().collect())
    }

    /// Lists the devices whose index is chosen. The others are not decoded.
    pub fn links_where(&self, mut chosen: impl FnMut(u32) -> bool) -> Result<Vec<Link>, Error> {
        let mut message = LinkMessage::default();
        message.header.interface_family = AddressFamily::Unspec;
        message
            .attributes
            .push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        let message = RouteNetlinkMessage::GetLink(message);
        let wanted = |payload: &[u8]| word(payload, INDEX_AT).is_some_and(&mut chosen);
        let answers = self.dump(&message, wanted, || "list the devices".to_owned())?;
        let mut links: Vec<Link> = Vec::new();
        let mut known = BTreeSet::new();
        for message in answers {
            if let RouteNetlinkMessage::NewLink(message) = message
                && known.insert(message.header.index)
            {
                links.push(Link::from_message(message));
            }
        }
        Ok(links)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_indices_as_devices() {
        let netlink = Netlink::open().expect("a socket");
        // Others may make devices meanwhile.
        for _ in 0..100 {
            let before = netlink.indices().expect("indices");
            let links = netlink.links().expect("links");
            if before == netlink.indices().expect("indices") {
                let listed: BTreeSet<u32> = links.iter().map(|link| link.index).collect();
                assert_eq!(before, listed);
                let some = netlink.links_where(|index| index == 1).expect("links");
                assert_eq!(some.len(), 1);
                assert!(some[0].loopback);
                return;
            }
        }
        panic!("the devices changed all the time");
    }
}

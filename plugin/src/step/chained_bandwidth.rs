//! Bandwidth in a chain: the filters of [`super::bandwidth`] on the ends of a pair that another plugin has made,
//! maybe ours.
//!
//! Of an interface of ours the programs have to know that it is shaped, because the bypass would go past the
//! filter. Containers of other plugins have no bypass.

use std::path::Path;

use underpass_abi::endpoint::{Device as Entry, Owner, device};
use underpass_cni::Error as CniError;
use underpass_dataplane::{Maps, Pins, lock::Lock};
use underpass_netlink::{
    Netlink,
    link::{By, Device, Link},
    qdisc::Tbf,
};

use super::{
    Undo,
    bandwidth::{compare, filter},
};
use crate::{
    conf::bandwidth::{Bandwidth, Limit},
    error::Error,
    finding::{Finding, Findings},
    identity::Alias,
};

const NAME: &str = "chained bandwidth";
/// The handle of the filters of one attachment in a chain, `2a7f:` in `tc`: by it a DEL knows them from those of a container
/// that was given the same namespace since, or of another network's interface of that name. That of the keys of an
/// interface of ours, and of the reference plugin, is `1:`; those that the kernel chooses begin at `8000:`.
fn handle(owner: &Owner) -> u16 {
    const FIRST: u16 = 0x1000;
    const LAST: u16 = 0x7fff;
    let [high, low, ..] = *owner;
    FIRST + u16::from_be_bytes([high, low]) % (LAST - FIRST + 1)
}

/// The ends of a container's pair.
pub(crate) struct Ends<'a> {
    /// A socket in the node's namespace.
    node: &'a Netlink,
    /// A socket in the container's namespace.
    pod: &'a Netlink,
    host: Link,
    container: Link,
    /// That of our filters.
    handle: u16,
    /// None where nothing is loaded, and for interfaces of others.
    maps: Option<Maps>,
}

/// One end, which sends what has to be limited.
struct End<'a> {
    /// Seen from the container.
    direction: &'static str,
    netlink: &'a Netlink,
    device: Device,
    limit: Limit,
}

impl<'a> Ends<'a> {
    /// Finds the ends: none if the container has no such interface, or if that is no pair with the host. A container
    /// that may make interfaces can make one that seems to be the other end of somebody else's: an attachment of ours
    /// is told by its alias.
    pub(crate) fn find(
        node: &'a Netlink,
        pod: &'a Netlink,
        ifname: &str,
        owner: Owner,
    ) -> Result<Option<Self>, Error> {
        let container = pod.link(By::Name(ifname))?.filter(Link::is_paired);
        let Some((container, peer)) = container.and_then(|link| link.peer.map(|peer| (link, peer)))
        else {
            return Ok(None);
        };
        let host = node.link(By::Index(peer))?;
        let host =
            host.filter(|host| host.kind == container.kind && host.peer == Some(container.index));
        let is_anothers = |host: &Link| Alias::of(host).is_some_and(|alias| alias.owner != owner);
        Ok(host.filter(|host| !is_anothers(host)).map(|host| Self {
            node,
            pod,
            host,
            container,
            handle: handle(&owner),
            maps: None,
        }))
    }

    /// Opens the maps, if the interface is ours: those of others have no use for them.
    pub(crate) fn open_maps(&mut self, root: &Path) -> Result<(), Error> {
        if Alias::of(&self.host).is_some() {
            self.maps = Maps::open_existing(&Pins::at(root))?;
        }
        Ok(())
    }

    /// Refuses an interface of ours that the maps do not know: they are the wrong ones.
    pub(crate) fn require_known(&self, root: &Path) -> Result<(), Error> {
        if Alias::of(&self.host).is_none() || self.entry()?.is_some() {
            return Ok(());
        }
        Err(CniError::config(format!(
            "invalid bpfRoot {}: {} is an interface of underpass, and nothing there knows it: give `bandwidth` the \
             bpfRoot of the plugin that made the interface",
            root.display(),
            self.host.name
        ))
        .into())
    }

    /// Limits both directions, or changes nothing.
    pub(crate) fn apply(&mut self, limits: Bandwidth) -> Result<(), Error> {
        let mtu = self.mtu()?;
        let mut undo = Undo::default();
        for end in self.ends(limits) {
            let tbf = filter(end.limit, mtu);
            if is_limited(&end, tbf)? {
                continue;
            }
            let handle = self.handle;
            end.netlink.add_tbf(&end.device, handle, tbf)?;
            undo.push(NAME, move || {
                end.netlink.delete_root(&end.device, handle)?;
                Ok(())
            });
        }
        if limits.ingress.is_some() {
            self.mark(device::SHAPED)?;
        }
        undo.keep();
        Ok(())
    }

    /// Compares the filters with the limits.
    pub(crate) fn verify(&self, limits: Bandwidth, findings: &mut Findings) -> Result<(), Error> {
        let mtu = self.mtu()?;
        for end in self.ends(limits) {
            let actual = end.netlink.root_tbf(end.device.index)?;
            let name = &end.device.name;
            findings.extend(compare(end.direction, end.limit, mtu, name, actual));
        }
        let is_unknown = |entry: Entry| entry.flags & (device::FOREIGN | device::SHAPED) == 0;
        if limits.ingress.is_some() && self.entry()?.is_some_and(is_unknown) {
            findings.push(Finding::ShapingUnknown(self.host.name.clone()));
        }
        Ok(())
    }

    /// Takes off what an ADD has put there, by its handle, and then tells the programs.
    pub(crate) fn revert(&mut self, root: &Path) -> Result<(), Error> {
        self.remove(self.pod, &self.container)?;
        if self.remove(self.node, &self.host)? {
            self.open_maps(root)?;
            self.mark(0)?;
        }
        Ok(())
    }

    /// Takes our filter off an end, by its handle. Returns whether there was one.
    fn remove(&self, netlink: &Netlink, link: &Link) -> Result<bool, Error> {
        let root = netlink.root_qdisc(link.index)?;
        if root.is_none_or(|root| root.handle != self.handle || root.tbf.is_none()) {
            return Ok(false);
        }
        Ok(netlink.delete_root(&Device::from(link), self.handle)?)
    }

    /// The ends that limit something, and what they limit.
    fn ends(&self, limits: Bandwidth) -> impl Iterator<Item = End<'a>> + use<'a> {
        let ends = [
            ("ingress", limits.ingress, self.node, &self.host),
            ("egress", limits.egress, self.pod, &self.container),
        ];
        let ends = ends.map(|(direction, limit, netlink, link)| {
            let device = Device::from(link);
            limit.map(|limit| End {
                direction,
                netlink,
                device,
                limit,
            })
        });
        ends.into_iter().flatten()
    }

    /// What the programs know of the host's end.
    fn entry(&self) -> Result<Option<Entry>, Error> {
        let entry = self.maps.as_ref().map(|maps| maps.device(self.host.index));
        Ok(entry.transpose()?.flatten())
    }

    /// The MTU that the pair was made with: a later plugin may have changed that of the devices.
    fn mtu(&self) -> Result<u32, Error> {
        Ok(self.entry()?.map_or(self.host.mtu, |entry| entry.mtu))
    }

    /// Tells the programs whether the host's end is shaped ([`device::SHAPED`], or zero). From then on packets to
    /// the container pass its queue, those of known flows too: the epoch has each of them looked at again. XDP leaves
    /// to tc what has to pass a queue.
    fn mark(&mut self, shaped: u32) -> Result<(), Error> {
        let Some(maps) = &mut self.maps else {
            return Ok(());
        };
        let _lock = Lock::acquire(maps.pins().root())?;
        let Some(entry) = maps.device(self.host.index)? else {
            return Ok(());
        };
        let flags = entry.flags & !device::SHAPED | shaped;
        if entry.flags & device::FOREIGN != 0 || entry.flags == flags {
            return Ok(());
        }
        maps.set_device(self.host.index, Entry { flags, ..entry })?;
        Ok(maps.raise_epoch()?)
    }
}

/// Tells whether the end has the very filter already, and refuses to be the second that limits it.
fn is_limited(end: &End<'_>, wanted: Tbf) -> Result<bool, Error> {
    let Some(root) = end.netlink.root_qdisc(end.device.index)? else {
        return Ok(false);
    };
    if root.tbf == Some(wanted) {
        return Ok(true);
    }
    let is = match root.tbf {
        Some(tbf) => format!("is limited to {} bit/s already", u128::from(tbf.rate) * 8),
        None => "can't be limited".to_owned(),
    };
    let direction = end.direction;
    Err(CniError::config(format!(
        "invalid {direction}Rate {}: {direction} of the container {is}, by the root qdisc {} {:x}: of {}: give the limit \
         to one plugin of the chain, by its keys or by the capability `bandwidth`",
        end.limit.rate, root.kind, root.handle, end.device.name
    ))
    .into())
}

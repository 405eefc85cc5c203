//! The pair of devices: a veth, or a netkit.

use std::{
    cell::Cell,
    rc::Rc,
    thread,
    time::{Duration, Instant},
};

use tracing::warn;
use underpass_abi::endpoint::Owner;
use underpass_cni::Error as CniError;
use underpass_dataplane::{kernel, netkit};
use underpass_netlink::{
    self as netlink, Netlink, Netns,
    link::{Admin, By, Change, Device, Driver, End, Link},
};

use super::{
    Attachment, Detachment, Inspection, Interface, Pair, Revert, Step, Undo, detachment::Known,
    sysctl,
};
use crate::{
    conf,
    error::Error,
    finding::{Finding, Findings},
    identity::{self, Alias, Identity},
    plan::{self, Plan},
};

/// The name of making the pair, in the log and among the times of the last ADD.
pub(crate) const NAME: &str = "link";

/// Says what the pair will be on this kernel.
pub(crate) fn driver(asked: conf::Device) -> Result<Driver, CniError> {
    match asked {
        conf::Device::Netkit | conf::Device::Auto if netkit::is_supported() => Ok(Driver::Netkit),
        conf::Device::Veth | conf::Device::Auto => Ok(Driver::Veth),
        conf::Device::Netkit => Err(CniError::config(format!(
            "invalid device \"netkit\": it needs Linux 6.7 or newer, built with CONFIG_NETKIT, and this is {}; use \"veth\", or \"auto\"",
            kernel::release()
        ))),
    }
}

/// Makes the pair, both ends down. The kernel takes an alias only for a device that exists, so until then the group says
/// which network's the pair is; see [`identity::is_unfinished`].
pub(crate) fn make<'a>(
    node: &'a Netlink,
    netns: &Netns,
    plan: &Plan,
    undo: &mut Undo<'a>,
) -> Result<Pair, Error> {
    let created = node.create_pair(
        plan.driver,
        end(&plan.host),
        end(&plan.container),
        netns,
        plan.mtu,
        plan.identity.network_id(),
    );
    match created {
        Err(error) if error.is_present() => return Err(taken(node, &plan.identity)?),
        created => created?,
    }
    let owner = plan.identity.owner();
    // Once a DEL has taken it away, the name may be that of another ADD's.
    let index = Rc::new(Cell::new(None));
    let made = Rc::clone(&index);
    undo.push(NAME, move || match made.get() {
        Some(index) => match node.link(By::Index(index))? {
            Some(link) if is_of(&link, owner, Some(index)) => {
                node.delete_link(index)?;
                Ok(())
            }
            _ => Ok(()),
        },
        None => delete(node, owner, None),
    });
    let host = node
        .link(By::Name(&plan.host.name))?
        .ok_or(Error::AttachmentLost)?;
    index.set(Some(host.index));
    let peer = host.peer.ok_or(Error::AttachmentLost)?;
    let pair = Pair {
        host: Device {
            index: host.index,
            name: host.name,
        },
        container: Device {
            index: peer,
            name: plan.container.name.clone(),
        },
    };
    let alias = plan.identity.alias();
    node.set_link(
        &pair.host,
        Change {
            alias: Some(&alias),
            group: Some(0),
            no_addr_gen: sysctl::has_ipv6(plan.mtu),
            admin: None,
        },
    )
    .map_err(|error| {
        if error.is_absent() {
            Error::AttachmentLost
        } else {
            error.into()
        }
    })?;
    Ok(pair)
}

fn end(end: &plan::End) -> End<'_> {
    End {
        name: &end.name,
        mac: end.mac,
    }
}

/// Says why there can be no such pair: which of the two names is taken, and by whom.
pub(crate) fn taken(node: &Netlink, identity: &Identity) -> Result<Error, Error> {
    let host = identity.host_name();
    Ok(match node.link(By::Name(&host))? {
        Some(link) if is_of(&link, identity.owner(), None) => Error::attached(identity),
        Some(_) => Error::HostNameTaken(host),
        None => Error::NameTaken(identity.ifname.clone()),
    })
}

/// Finds the two ends, the host's first, and says what is wrong with them.
pub(crate) fn find(
    node: &Netlink,
    pod: &Netlink,
    owner: Owner,
    ifname: &str,
    mac: Option<&str>,
    findings: &mut Findings,
) -> Result<Option<(Link, Link)>, Error> {
    let name = identity::host_name(owner);
    let host = node.link(By::Name(&name))?;
    let container = pod.link(By::Name(ifname))?;
    match (&host, &container) {
        (None, _) => findings.push(Finding::NoHostEnd(name)),
        (_, None) => findings.push(Finding::NoContainerEnd(ifname.to_owned())),
        (Some(host), Some(container)) => {
            if !container.is_paired()
                || container.peer != Some(host.index)
                || host.peer != Some(container.index)
            {
                findings.push(Finding::NotPaired {
                    container: ifname.to_owned(),
                    host: name,
                });
            }
            let actual = container.mac;
            if let Some(remembered) =
                mac.filter(|mac| !mac.eq_ignore_ascii_case(&actual.to_string()))
            {
                findings.push(Finding::OtherMac {
                    container: ifname.to_owned(),
                    actual,
                    remembered: remembered.to_owned(),
                });
            }
        }
    }
    Ok(host.zip(container))
}

/// How long the kernel may take to notice that the container's end has a carrier.
const CARRIER_TIMEOUT: Duration = Duration::from_secs(1);
/// How often it is asked.
const CARRIER_POLL: Duration = Duration::from_micros(200);

/// Sets the host's end up, from where on packets pass.
pub(crate) struct HostEnd;

const HOST_END: &str = "host end";

impl Step<Interface> for HostEnd {
    fn name(&self) -> &'static str {
        HOST_END
    }

    /// Sets the host's end up, and waits until the container's end can send.
    ///
    /// The container's end has been up for a while, without a carrier. It gets one now, but the kernel
    /// gives it a queue only when its deferred work has taken note (`linkwatch`); on a busy node that
    /// takes milliseconds, and until then it drops what is sent.
    fn apply(&self, attachment: &mut Attachment<'_, Interface>) -> Result<(), Error> {
        let node = attachment.node;
        let host = attachment.host.clone();
        // By its number alone: a DEL may have come meanwhile, and after it another ADD, whose host's end has the name.
        attachment.undo.push(HOST_END, move || lower(node, &host));
        set(node, &attachment.host, Admin::Up)?;
        let Interface { container, pod, .. } = &attachment.made;
        let start = Instant::now();
        while start.elapsed() < CARRIER_TIMEOUT {
            let end = pod.link(By::Index(container.index))?;
            if end.is_some_and(|end| end.operational) {
                return Ok(());
            }
            thread::sleep(CARRIER_POLL);
        }
        warn!(
            "{} in the container is up, but the kernel has not noticed its carrier after {} ms: first packets may be lost",
            container.name,
            CARRIER_TIMEOUT.as_millis()
        );
        Ok(())
    }

    /// Says whether the host's end is up.
    fn verify(
        &self,
        inspection: &Inspection<'_, Interface>,
        findings: &mut Findings,
    ) -> Result<(), Error> {
        if !inspection.host.up {
            findings.push(Finding::Down(inspection.host.name.clone()));
        }
        Ok(())
    }
}

impl Revert for HostEnd {
    /// Sets the host's end down, if the maps know it.
    fn revert(&self, detachment: &mut Detachment<'_>) -> Result<(), Error> {
        match &detachment.known {
            Some(Known { record, .. }) if !detachment.is_superseded()? => {
                set_down(detachment.node, detachment.owner, record.ifindex)
            }
            _ => Ok(()),
        }
    }
}

/// Sets the host's end down, if it is there: from here on nothing that the container sends arrives, so
/// the programs need not know it any more. That takes a hundredth of the time of [`delete`].
fn set_down(node: &Netlink, owner: Owner, index: u32) -> Result<(), Error> {
    of(node, owner, Some(index))?
        .iter()
        .try_for_each(|link| lower(node, &Device::from(link)))
}

/// Sets a device down, if it is there.
fn lower(node: &Netlink, device: &Device) -> Result<(), Error> {
    match set(node, device, Admin::Down) {
        Err(error) if error.is_absent() => Ok(()),
        answer => Ok(answer?),
    }
}

fn set(node: &Netlink, device: &Device, admin: Admin) -> Result<(), netlink::Error> {
    let change = Change {
        admin: Some(admin),
        ..Change::default()
    };
    node.set_link(device, change)
}

/// Takes the pair away that [`make`] makes.
pub(crate) struct PairOfDevices;

impl Revert for PairOfDevices {
    fn revert(&self, detachment: &mut Detachment<'_>) -> Result<(), Error> {
        if detachment.is_superseded()? {
            return Ok(());
        }
        let index = detachment.known.as_ref().map(|known| known.record.ifindex);
        delete(detachment.node, detachment.owner, index)
    }

    /// What a container sends that the programs do not know leaves as it is.
    fn comes_before_the_rest(&self) -> bool {
        true
    }
}

/// Deletes the pair of an attachment, found by its name and, where maps know it, its index: somebody may have given it another
/// name. No pair is fine.
pub(super) fn delete(node: &Netlink, owner: Owner, index: Option<u32>) -> Result<(), Error> {
    for link in of(node, owner, index)? {
        node.delete_link(link.index)?;
    }
    Ok(())
}

/// Finds the host's end of an attachment, by its name and, if somebody gave it another, by its index.
fn of(node: &Netlink, owner: Owner, index: Option<u32>) -> Result<Vec<Link>, Error> {
    let name = identity::host_name(owner);
    let by_index = index.map(By::Index);
    let mut links: Vec<Link> = Vec::new();
    for by in [Some(By::Name(&name)), by_index].into_iter().flatten() {
        let link = node.link(by)?.filter(|link| is_of(link, owner, index));
        let is_new = |link: &Link| links.iter().all(|other| other.index != link.index);
        if let Some(link) = link.filter(is_new) {
            links.push(link);
        }
    }
    Ok(links)
}

/// Tells whose a device is by its alias. One that has none can only be ours by name: an ADD that was killed before it could
/// set the alias. So is one to which somebody gave another alias, if the maps know it by its index as well.
fn is_of(link: &Link, owner: Owner, index: Option<u32>) -> bool {
    if !link.is_paired() {
        return false;
    }
    match Alias::of(link) {
        Some(alias) => alias.owner == owner,
        None => {
            link.name == identity::host_name(owner)
                && (link.alias.is_none() || index == Some(link.index))
        }
    }
}

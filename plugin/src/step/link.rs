//! The pair of devices: a veth, or a netkit.

use std::{
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

use super::{Undo, sysctl};
use crate::{
    conf,
    error::Error,
    identity::{self, Alias},
    plan::{self, Plan},
};

/// The pair as it was made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Pair {
    /// The host's end, in the node's namespace.
    pub(crate) host: Device,
    /// The container's end, in its namespace.
    pub(crate) pod: Device,
}

/// What the pair will be on this kernel.
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

/// Makes the pair, both ends down.
pub(crate) fn apply<'a>(
    node: &'a Netlink,
    netns: &Netns,
    plan: &Plan,
    undo: &mut Undo<'a>,
) -> Result<Pair, Error> {
    let created = node.create_pair(
        plan.driver,
        end(&plan.host),
        end(&plan.pod),
        netns,
        plan.mtu,
    );
    match created {
        Err(error) if error.is_present() => {
            return Err(Error::NameTaken {
                pod: plan.pod.name.clone(),
                host: plan.host.name.clone(),
            });
        }
        created => created?,
    }
    let owner = plan.identity.owner();
    undo.push("link", move || revert(node, owner, None));
    let host = node
        .link(By::Name(&plan.host.name))?
        .ok_or_else(|| Error::Vanished(plan.host.name.clone()))?;
    let peer = host
        .peer
        .ok_or_else(|| Error::Vanished(plan.pod.name.clone()))?;
    let pair = Pair {
        host: Device {
            index: host.index,
            name: host.name,
        },
        pod: Device {
            index: peer,
            name: plan.pod.name.clone(),
        },
    };
    let alias = plan.identity.alias();
    node.set_link(
        &pair.host,
        Change {
            alias: Some(&alias),
            no_addr_gen: sysctl::has_ipv6(plan.mtu),
            admin: None,
        },
    )?;
    Ok(pair)
}

/// How long the kernel may take to notice that the container's end has a carrier.
const CARRIER_TIMEOUT: Duration = Duration::from_secs(1);
/// How often it is asked.
const CARRIER_POLL: Duration = Duration::from_micros(200);

/// Sets the host's end up, from where on packets pass.
///
/// The container's end has been up for a while, without a carrier. It gets one now, but the kernel
/// gives it a queue only when its deferred work has taken note (`linkwatch`); on a busy node that
/// takes milliseconds, and until then it drops what is sent.
pub(crate) fn open<'a>(
    node: &'a Netlink,
    pod: &Netlink,
    plan: &Plan,
    pair: &Pair,
    undo: &mut Undo<'a>,
) -> Result<(), Error> {
    let (owner, index) = (plan.identity.owner(), pair.host.index);
    undo.push("open", move || close(node, owner, index));
    set(node, &pair.host, Admin::Up)?;
    let start = Instant::now();
    while start.elapsed() < CARRIER_TIMEOUT {
        let end = pod.link(By::Index(pair.pod.index))?;
        if end.is_some_and(|end| end.operational) {
            return Ok(());
        }
        thread::sleep(CARRIER_POLL);
    }
    warn!(
        "{} in the container is up, but the kernel has not noticed its carrier after {} ms: first packets may be lost",
        pair.pod.name,
        CARRIER_TIMEOUT.as_millis()
    );
    Ok(())
}

/// Sets the host's end down, if it is there: from here on nothing that the container sends arrives, so
/// the programs need not know it any more. That takes a hundredth of the time of [`revert`].
pub(crate) fn close(node: &Netlink, owner: Owner, index: u32) -> Result<(), Error> {
    for link in of(node, owner, Some(index))? {
        let device = Device {
            index: link.index,
            name: link.name,
        };
        match set(node, &device, Admin::Down) {
            Err(error) if error.is_absent() => {}
            answer => answer?,
        }
    }
    Ok(())
}

fn set(node: &Netlink, device: &Device, admin: Admin) -> Result<(), netlink::Error> {
    let change = Change {
        admin: Some(admin),
        ..Change::default()
    };
    node.set_link(device, change)
}

/// The two ends, and what is wrong with them.
pub(crate) fn verify(
    node: &Netlink,
    pod: &Netlink,
    owner: Owner,
    ifname: &str,
    mac: Option<&str>,
    wrong: &mut Vec<String>,
) -> Result<Option<(Link, Link)>, Error> {
    let name = identity::host_name(owner);
    let here = node.link(By::Name(&name))?;
    let there = pod.link(By::Name(ifname))?;
    match (&here, &there) {
        (None, _) => wrong.push(format!("device {name} of the host is missing")),
        (_, None) => wrong.push(format!("interface {ifname} is missing in the container")),
        (Some(here), Some(there)) => {
            if !there.is_paired()
                || there.peer != Some(here.index)
                || here.peer != Some(there.index)
            {
                wrong.push(format!(
                    "{ifname} in the container is not the peer of {name}"
                ));
            }
            for link in [here, there] {
                if !link.up {
                    wrong.push(format!("{} is down", link.name));
                }
            }
            let actual = there.mac.to_string();
            if mac.is_some_and(|mac| !mac.eq_ignore_ascii_case(&actual)) {
                wrong.push(format!(
                    "{ifname} in the container has the MAC {actual}, prevResult says {}",
                    mac.unwrap_or_default()
                ));
            }
        }
    }
    Ok(here.zip(there))
}

/// Deletes the pair of an attachment, found by its name and, where maps know it, its index. No pair
/// is fine.
pub(crate) fn revert(node: &Netlink, owner: Owner, index: Option<u32>) -> Result<(), Error> {
    for link in of(node, owner, index)? {
        node.delete_link(link.index)?;
    }
    Ok(())
}

/// The host's end of an attachment, by its name and, if somebody gave it another, by its index.
fn of(node: &Netlink, owner: Owner, index: Option<u32>) -> Result<Vec<Link>, Error> {
    let name = identity::host_name(owner);
    let by_index = index.map(By::Index);
    let mut links: Vec<Link> = Vec::new();
    for by in [Some(By::Name(&name)), by_index].into_iter().flatten() {
        let link = node.link(by)?.filter(|link| is_of(link, owner));
        let is_new = |link: &Link| links.iter().all(|other| other.index != link.index);
        if let Some(link) = link.filter(is_new) {
            links.push(link);
        }
    }
    Ok(links)
}

/// A device without an alias can only be ours by name: an ADD that was killed before it could set
/// the alias.
fn is_of(link: &Link, owner: Owner) -> bool {
    if !link.is_paired() {
        return false;
    }
    if link.alias.is_none() {
        return link.name == identity::host_name(owner);
    }
    Alias::of(link).is_some_and(|alias| alias.owner == owner)
}

fn end(end: &plan::End) -> End<'_> {
    End {
        name: &end.name,
        mac: end.mac,
    }
}

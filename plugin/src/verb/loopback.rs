//! The plugin under the name `loopback`: it sets the container's loopback device up, as the reference plugin of
//! that name does. Runtimes call it for every container, whatever the networks are.

use std::path::{Path, PathBuf};

use ipnet::IpNet;
use underpass_cni::{
    CniResult, Error as CniError, Interface, IpConfig, NetworkRequest, Plugin, Request,
};
use underpass_netlink::{
    Netlink, Netns,
    link::{Admin, By, Change, Device, Link},
    netns,
};

use crate::{
    error::Error,
    finding::{Finding, Findings},
};

/// The device, whatever `CNI_IFNAME` says.
const LO: &str = "lo";
/// Its address, in the words of the reference plugin.
const MAC: &str = "00:00:00:00:00:00";

/// The plugin under the name `loopback`.
#[derive(Clone, Copy, Debug)]
pub struct Loopback;

impl Plugin for Loopback {
    fn add(&self, request: &Request) -> Result<CniResult, CniError> {
        let previous = request.conf.prev_result()?;
        let path = netns_path(request);
        let made = set_up(&path)?;
        Ok(previous.unwrap_or(made))
    }

    fn del(&self, request: &Request) -> Result<(), CniError> {
        Ok(set_down(&netns_path(request))?)
    }

    fn check(&self, request: &Request) -> Result<(), CniError> {
        Ok(check(&netns_path(request))?)
    }

    fn gc(&self, _: &NetworkRequest) -> Result<(), CniError> {
        Ok(())
    }

    fn status(&self, _: &NetworkRequest) -> Result<(), CniError> {
        Ok(())
    }
}

fn netns_path(request: &Request) -> PathBuf {
    request.attachment.netns.clone().unwrap_or_default()
}

/// Sets the device up, which is when the kernel gives it its addresses, and describes it.
fn set_up(path: &Path) -> Result<CniResult, Error> {
    let netns = Netns::open(path)?.ok_or_else(|| Error::NoNetns(path.to_owned()))?;
    let (netlink, lo) = look(&netns)?;
    set(&netlink, &lo, Admin::Up)?;
    let addresses: Vec<IpNet> = netlink
        .addresses_on(lo.index)?
        .into_iter()
        .map(|address| address.net)
        .collect();
    if let Some(other) = addresses.iter().find(|net| !net.addr().is_loopback()) {
        return Err(CniError::internal(format!(
            "loopback interface found with non-loopback address \"{}\": take it off {LO} of the container",
            other.addr()
        ))
        .into());
    }
    let v4 = addresses.iter().find(|net| net.addr().is_ipv4());
    let v6 = addresses.iter().find(|net| net.addr().is_ipv6());
    Ok(CniResult {
        interfaces: vec![Interface {
            name: LO.to_owned(),
            mac: MAC.to_owned(),
            sandbox: path.to_string_lossy().into_owned(),
            ..Interface::default()
        }],
        ips: [v4, v6]
            .into_iter()
            .flatten()
            .map(|address| IpConfig {
                interface: Some(0),
                address: *address,
                gateway: None,
            })
            .collect(),
        ..CniResult::default()
    })
}

/// Sets the device down, if the namespace is still there.
fn set_down(path: &Path) -> Result<(), Error> {
    match Netns::open(path) {
        // The process at this path is gone, and the node has another with its number.
        Ok(Some(netns)) if netns.is_own() => Ok(()),
        Ok(Some(netns)) => {
            let (netlink, lo) = look(&netns)?;
            set(&netlink, &lo, Admin::Down)
        }
        // What a deleted mount leaves behind is no namespace, either.
        Ok(None) | Err(netns::Error::NotANamespace { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn check(path: &Path) -> Result<(), Error> {
    let netns = Netns::open(path)?.ok_or_else(|| Error::NoNetns(path.to_owned()))?;
    let (_, lo) = look(&netns)?;
    let mut findings = Findings::default();
    if !lo.up {
        findings.push(Finding::Down(format!("loopback interface {LO}")));
    }
    findings.into_result()
}

fn look(netns: &Netns) -> Result<(Netlink, Link), Error> {
    let netlink = netns.run(Netlink::open)??;
    let lo = netlink.link(By::Name(LO))?.ok_or_else(|| {
        CniError::internal(format!(
            "the container in {netns} has no interface {LO}: somebody renamed it; give it that name again"
        ))
    })?;
    Ok((netlink, lo))
}

fn set(netlink: &Netlink, lo: &Link, admin: Admin) -> Result<(), Error> {
    let change = Change {
        admin: Some(admin),
        ..Change::default()
    };
    Ok(netlink.set_link(&Device::from(lo), change)?)
}

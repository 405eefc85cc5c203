//! `underpass doctor`: what is wrong with this node, what that means, and the command that mends it. Nothing is changed.
//!
//! A finding is an *error* if containers suffer or an ADD would fail, and a *warning* if something is not as it should be and
//! nobody suffers yet. A *hint* is what could be better on a node with which nothing is wrong: hints are no findings. Each
//! check looks first and decides then; the decisions are functions of what was seen.

use std::{
    collections::HashMap,
    io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use serde::Serialize;
use underpass_abi::endpoint::{Device, Endpoint, device};
use underpass_cni::net_dir::{self, NetworkFile};
use underpass_dataplane::{Maps, Pins};
use underpass_netlink::{Netlink, link::Link};

use super::{Failure, Format};
use crate::{
    error::Error,
    uplink::{Uplink, Uplinks},
};

mod devices;
pub(super) mod firewall;
mod kernel;
mod narrow_routes;
mod networkd;
pub(super) mod networks;
mod pins;
mod print;
mod routes;
mod stack;

/// How bad it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    /// Containers suffer, or an ADD would fail.
    Error,
    /// It is not as it should be.
    Warning,
    /// It could be better.
    Hint,
}

/// One thing that a check has found.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Diagnosis {
    /// The name that scripts and the documentation have for it.
    id: &'static str,
    severity: Severity,
    /// What is so, and what follows.
    what: String,
    /// What to do, with the command.
    fix: String,
}

impl Diagnosis {
    fn new(
        severity: Severity,
        id: &'static str,
        what: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            id,
            severity,
            what: what.into(),
            fix: fix.into(),
        }
    }

    fn error(id: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::new(Severity::Error, id, what, fix)
    }

    fn warning(id: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::new(Severity::Warning, id, what, fix)
    }

    fn hint(id: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::new(Severity::Hint, id, what, fix)
    }
}

/// A thing that could not be looked at.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct NotChecked {
    id: &'static str,
    why: String,
}

/// Everything that is printed.
#[derive(Default, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    findings: Vec<Diagnosis>,
    hints: Vec<Diagnosis>,
    not_checked: Vec<NotChecked>,
}

impl Report {
    /// Adds what a check has found.
    fn add(&mut self, diagnoses: impl IntoIterator<Item = Diagnosis>) {
        for diagnosis in diagnoses {
            match diagnosis.severity {
                Severity::Hint => self.hints.push(diagnosis),
                Severity::Error | Severity::Warning => self.findings.push(diagnosis),
            }
        }
    }

    /// Notes that something could not be looked at.
    fn not_checked(&mut self, id: &'static str, why: impl Into<String>) {
        let why = why.into();
        self.not_checked.push(NotChecked { id, why });
    }

    fn errors(&self) -> usize {
        let is_error = |diagnosis: &&Diagnosis| diagnosis.severity == Severity::Error;
        self.findings.iter().filter(is_error).count()
    }
}

/// Where to look.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places<'a> {
    /// See `--bpf-root`.
    pub(super) bpf_root: &'a Path,
    /// The folder of networks.
    pub(super) net_dir: &'a Path,
    /// `/`, except in tests.
    pub(super) host_root: &'a Path,
}

impl Places<'_> {
    /// Names a file of the host; `path` is relative to the root.
    fn host(&self, path: &str) -> PathBuf {
        self.host_root.join(path)
    }
}

/// What several checks look at.
struct Node<'a> {
    places: Places<'a>,
    netlink: Netlink,
    pins: Pins,
    /// None if nothing is loaded, or it can't be used.
    maps: Option<Maps>,
    /// True if something is pinned that can't be used.
    unusable: bool,
    links: HashMap<u32, Link>,
    devices: Vec<(u32, Device)>,
    endpoints: Vec<(IpAddr, Endpoint)>,
    /// As the maps know them, so that what a network's `uplinks` leaves out is none.
    uplinks: Vec<Uplink>,
    networks: Vec<Result<NetworkFile, underpass_cni::Error>>,
}

/// A check adds what it finds. Its error says why it could not look.
type Check = fn(&Node<'_>, &mut Report) -> Result<(), Error>;

/// All checks, by the name under which they appear when they could not look.
const CHECKS: [(&str, Check); 10] = [
    ("kernel", |node, report| {
        kernel::check(node, report);
        Ok(())
    }),
    ("pins", pins::check),
    ("network-stack", stack::check),
    ("devices", devices::check),
    ("foreign-filter", devices::check_filters),
    ("forward-policy", firewall::check),
    ("foreign-route", routes::check),
    ("route-mtu", narrow_routes::check),
    ("networks", networks::check),
    ("networkd-routes", |node, report| {
        networkd::check(node, report);
        Ok(())
    }),
];

pub(super) fn run(
    places: Places<'_>,
    format: Format,
    out: &mut impl io::Write,
) -> Result<(), Failure> {
    if !kernel::sees() {
        return Err(Failure::Blind);
    }
    let mut report = Report::default();
    let node = Node::look(places, &mut report)?;
    for (id, check) in CHECKS {
        if let Err(error) = check(&node, &mut report) {
            report.not_checked(id, error.to_string());
        }
    }
    report.findings.sort_by_key(|finding| finding.severity);
    match format {
        Format::Json => {
            serde_json::to_writer_pretty(&mut *out, &report).map_err(io::Error::from)?;
            writeln!(out)?;
        }
        Format::Human => print::report(&report, out)?,
    }
    match report.errors() {
        0 => Ok(()),
        errors => Err(Failure::Unwell(errors)),
    }
}

impl<'a> Node<'a> {
    fn look(places: Places<'a>, report: &mut Report) -> Result<Self, Error> {
        let netlink = Netlink::open()?;
        let pins = Pins::at(places.bpf_root);
        let opened = Maps::open_existing(&pins);
        report.add(opened.as_ref().err().map(pins::unusable));
        let unusable = opened.is_err();
        let maps = opened.unwrap_or_default();
        let links = netlink.links()?.into_iter();
        let mut node = Self {
            places,
            links: links.map(|link| (link.index, link)).collect(),
            netlink,
            pins,
            maps: None,
            unusable,
            devices: Vec::new(),
            endpoints: Vec::new(),
            uplinks: Vec::new(),
            networks: Vec::new(),
        };
        if let Some(maps) = &maps {
            node.devices = maps.devices()?;
            node.endpoints = maps.endpoints()?;
            node.endpoints.sort_unstable_by_key(|(addr, _)| *addr);
            let known = |uplink: &Uplink| {
                let mut devices = node.devices.iter();
                devices.any(|(index, _)| *index == uplink.index)
            };
            let found = Uplinks::find(&node.netlink, maps, None)?.list;
            node.uplinks = found.into_iter().filter(known).collect();
        }
        node.maps = maps;
        match net_dir::read(places.net_dir) {
            Ok(networks) => node.networks = networks,
            Err(error) => {
                let folder = places.net_dir.display();
                report.not_checked("networks", format!("cannot read {folder}: {error}"));
            }
        }
        Ok(node)
    }

    /// Gives the name of a device, if it is still there.
    fn name(&self, index: u32) -> Option<&str> {
        self.links.get(&index).map(|link| link.name.as_str())
    }

    /// Lists the host's ends of our own containers that are still there.
    fn pods(&self) -> impl Iterator<Item = &Link> {
        let is_pod =
            |entry: &Device| entry.flags & device::POD != 0 && entry.flags & device::FOREIGN == 0;
        let pods = self.devices.iter().filter(move |(_, entry)| is_pod(entry));
        pods.filter_map(|(index, _)| self.links.get(index))
    }
}

/// Names the first few of many.
pub(super) fn some<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    const SHOWN: usize = 3;
    let names: Vec<_> = names.into_iter().collect();
    let text = names[..names.len().min(SHOWN)].join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => text,
        more => format!("{text} and {more} more"),
    }
}

#[cfg(test)]
mod tests;

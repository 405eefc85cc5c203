//! `underpass status`: one picture of the node, for people and as JSON.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::Path,
};

use serde::Serialize;
use underpass_abi::{
    ABI,
    counter::{Counter, Kind},
    endpoint::{ALIAS_PREFIX, device},
    map,
};
use underpass_dataplane::{
    Maps, Pins, attach, kernel::release, layout::Layout, object, policy::Rules,
};
use underpass_netlink::{Netlink, link::Link};

use super::{BAD, FAINT, Failure, Format, GOOD, HEADING};
use crate::{
    error::Error, finding::Finding, left_behind::left_behind, step::xdp, stopwatch::Times,
};

pub(super) mod feature;
mod last_add;
pub(super) mod port;
mod stack;

use feature::Feature;
use stack::NetworkStack;

/// Everything that is printed.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    version: &'static str,
    abi: u32,
    kernel: String,
    bpf_root: String,
    loaded: bool,
    /// Another build than this one has loaded the programs.
    other_build: bool,
    /// Layouts that other versions of the plugin have left there.
    other_layouts: Vec<u32>,
    /// Devices of containers that the maps do not know.
    left_behind: Vec<String>,
    /// Raised by every change that flows must notice; 0 if nothing is loaded.
    epoch: u32,
    features: Vec<Feature>,
    network_stack: NetworkStack,
    devices: Vec<Device>,
    endpoints: Vec<Endpoint>,
    host_ports: Vec<port::HostPort>,
    /// None if there was none since boot.
    last_add: Option<Times>,
    counters: BTreeMap<&'static str, u64>,
}

#[derive(Serialize)]
struct Device {
    name: String,
    ifindex: u32,
    kind: DeviceKind,
    programs: Vec<Program>,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum DeviceKind {
    Pod,
    Uplink,
    Loopback,
}

impl DeviceKind {
    const fn of(flags: u32) -> Self {
        if flags & device::POD != 0 {
            Self::Pod
        } else if flags & device::LOOPBACK != 0 {
            Self::Loopback
        } else {
            Self::Uplink
        }
    }
}

#[derive(Serialize)]
struct Program {
    #[serde(rename = "program")]
    name: &'static str,
    hook: &'static str,
    attached: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    address: String,
    device: String,
    /// Network, container and interface, as the device's alias has them.
    attachment: String,
}

pub(super) fn run(root: &Path, format: Format, out: &mut impl io::Write) -> Result<(), Failure> {
    let status = Status::collect(root)?;
    match format {
        Format::Json => {
            serde_json::to_writer_pretty(&mut *out, &status).map_err(io::Error::from)?;
            writeln!(out)?;
        }
        Format::Human => status.print(out)?,
    }
    Ok(())
}

impl Status {
    fn collect(root: &Path) -> Result<Self, Error> {
        let pins = Pins::at(root);
        let maps = Maps::open_existing(&pins)?;
        let state = maps.as_ref().map(Maps::state).transpose()?;
        let loaded_by = maps.as_ref().map(Maps::node).transpose()?;
        let other_layouts = pins.layouts()?.into_iter().filter(Layout::is_other);
        let mut status = Self {
            version: env!("CARGO_PKG_VERSION"),
            abi: ABI,
            kernel: release(),
            bpf_root: root.display().to_string(),
            loaded: maps.is_some(),
            other_build: loaded_by.is_some_and(|node| node.build != object::build()),
            other_layouts: other_layouts.map(|layout| layout.number()).collect(),
            left_behind: devices_left_behind(root, maps.as_ref())?,
            epoch: state.map_or(0, |state| state.epoch),
            features: feature::collect(),
            network_stack: stack::collect(state.as_ref().map(Rules::in_force)),
            devices: Vec::new(),
            endpoints: Vec::new(),
            host_ports: Vec::new(),
            last_add: Times::of_last_add(root),
            counters: BTreeMap::new(),
        };
        let Some(maps) = maps else {
            return Ok(status);
        };
        let node = Netlink::open()?;
        let links: HashMap<u32, Link> = node
            .links()?
            .into_iter()
            .map(|link| (link.index, link))
            .collect();
        let name = |index: u32| {
            links
                .get(&index)
                .map_or_else(|| format!("(gone: {index})"), |link| link.name.clone())
        };
        let devices = maps.devices()?;
        let wanted: Vec<_> = devices
            .iter()
            .map(|(index, entry)| (*index, attach::places(entry.flags)))
            .collect();
        let missing = attach::missing(&node, &pins, &wanted)?;
        for ((index, entry), (_, places)) in devices.into_iter().zip(wanted) {
            let mut programs: Vec<_> = places
                .iter()
                .map(|place| Program {
                    name: place.program,
                    hook: place.hook.name(),
                    attached: !missing.contains(&(index, *place)),
                })
                .collect();
            let xdp = links.get(&index).map(|link| xdp::ours(&pins, &link.xdp));
            programs.extend(xdp.transpose()?.flatten().map(|mode| Program {
                name: map::FROM_WIRE_XDP,
                hook: mode.hook(),
                attached: true,
            }));
            status.devices.push(Device {
                name: name(index),
                ifindex: index,
                kind: DeviceKind::of(entry.flags),
                programs,
            });
        }
        status.devices.sort_by_key(|device| device.ifindex);
        let mut endpoints = maps.endpoints()?;
        endpoints.sort_unstable_by_key(|(addr, _)| *addr);
        let attachment = |index: u32| {
            links
                .get(&index)
                .and_then(|link| link.alias.as_deref())
                .and_then(|alias| alias.strip_prefix(ALIAS_PREFIX))
                .unwrap_or_default()
                .to_owned()
        };
        for (addr, endpoint) in endpoints {
            status.endpoints.push(Endpoint {
                address: format!("{addr}/{}", endpoint.prefix_len),
                device: name(endpoint.ifindex),
                attachment: attachment(endpoint.ifindex),
            });
        }
        status.host_ports = port::collect(&maps, attachment)?;
        status.counters = maps
            .counters()?
            .into_iter()
            .map(|(counter, value)| (counter.name(), value))
            .collect();
        Ok(status)
    }

    /// Says which programs are loaded, and what is there beside them.
    fn print_programs(&self, out: &mut impl io::Write) -> io::Result<()> {
        let Self {
            version,
            kernel,
            bpf_root,
            abi,
            ..
        } = self;
        writeln!(out, "underpass {version} on kernel {kernel}")?;
        if self.loaded {
            writeln!(
                out,
                "programs: {GOOD}loaded{GOOD:#}, pinned at {bpf_root} (layout {abi})"
            )?;
        } else {
            writeln!(
                out,
                "programs: {BAD}not loaded{BAD:#} at {bpf_root}: the first ADD loads them"
            )?;
        }

        if self.other_build {
            writeln!(
                out,
                "{BAD}by another build{BAD:#}: this one uses what is loaded, and takes over by `underpass upgrade`"
            )?;
        }
        for other in &self.other_layouts {
            writeln!(
                out,
                "{BAD}also there{BAD:#}: layout {other} of another version; `underpass unload` removes it, too"
            )?;
        }

        for device in &self.left_behind {
            writeln!(
                out,
                "{BAD}left behind{BAD:#}: {device} leads to a container that no map here knows; recreate the container"
            )?;
        }
        Ok(())
    }

    fn print(&self, out: &mut impl io::Write) -> io::Result<()> {
        self.print_programs(out)?;
        feature::print(&self.features, out)?;
        self.network_stack.print(out)?;
        if !self.loaded {
            return Ok(());
        }

        writeln!(out, "\n{HEADING}Devices{HEADING:#}")?;
        for device in &self.devices {
            let kind = match device.kind {
                DeviceKind::Pod => "pod",
                DeviceKind::Uplink => "uplink",
                DeviceKind::Loopback => "host",
            };
            write!(out, "  {:<16} {kind:<7}", device.name)?;
            for Program {
                name,
                hook,
                attached,
            } in &device.programs
            {
                let (style, word) = if *attached {
                    (GOOD, "")
                } else {
                    (BAD, " MISSING")
                };
                write!(out, " {hook}: {style}{name}{word}{style:#}")?;
            }
            writeln!(out)?;
        }

        writeln!(out, "\n{HEADING}Endpoints{HEADING:#}")?;
        for Endpoint {
            address,
            device,
            attachment,
        } in &self.endpoints
        {
            writeln!(
                out,
                "  {address:<40} {device:<16} {FAINT}{attachment}{FAINT:#}"
            )?;
        }

        port::print(&self.host_ports, out)?;
        if let Some(times) = &self.last_add {
            last_add::print(times, out)?;
        }

        writeln!(
            out,
            "\n{HEADING}Counters{HEADING:#} (those that are not zero)"
        )?;
        for counter in Counter::ALL {
            let value = self.counters.get(counter.name()).copied().unwrap_or(0);
            if value == 0 {
                continue;
            }
            let style = match counter.kind() {
                Kind::Drop => BAD,
                Kind::Event => GOOD,
            };
            writeln!(
                out,
                "  {style}{value:>12}{style:#}  {:<26} {FAINT}{}{FAINT:#}",
                counter.name(),
                counter.text()
            )?;
        }
        Ok(())
    }
}

/// Lists the devices of containers that the maps do not know, of all networks.
pub(super) fn devices_left_behind(root: &Path, maps: Option<&Maps>) -> Result<Vec<String>, Error> {
    let findings = left_behind(root, maps, |_| true)?;
    let devices = findings.iter().filter_map(|finding| match finding {
        Finding::LeftBehind { device, .. } => Some(device.clone()),
        _ => None,
    });
    Ok(devices.collect())
}

#[cfg(test)]
mod tests;

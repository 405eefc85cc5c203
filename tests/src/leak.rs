//! Everything that attachments leave on a node, to compare before and after.

use std::{
    collections::BTreeSet,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

use crate::{Node, counter::Registry};

/// Traces of attachments at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Traces {
    /// Names of all devices.
    pub devices: BTreeSet<String>,
    /// Routes of both families, as text.
    pub routes: BTreeSet<String>,
    /// Permanent neighbours.
    pub neighbours: BTreeSet<String>,
    /// Entries of maps.
    pub registry: Registry,
    /// Files under `bpfRoot`.
    pub pins: BTreeSet<PathBuf>,
    /// Files under `ipam.dataDir` that are named like an address.
    pub leases: BTreeSet<PathBuf>,
}

impl Traces {
    /// Looks at a node.
    pub fn of(node: &Node) -> Result<Self> {
        let netns = node.netns();
        let text = |arguments: &[&str], key: &str| -> Result<BTreeSet<String>> {
            let listed = netns.ip_json(arguments)?;
            let entries = listed.as_array().into_iter().flatten();
            Ok(entries
                .map(|entry| entry[key].to_string() + " " + &entry["dev"].to_string())
                .collect())
        };
        let mut routes = text(&["-4", "route", "show", "table", "all"], "dst")?;
        routes.extend(text(&["-6", "route", "show", "table", "all"], "dst")?);
        let devices = netns.ip_json(&["link", "show"])?;
        let names = devices.as_array().into_iter().flatten();
        let (pins, leases) = netns.run(|| {
            let mut pins = BTreeSet::new();
            collect(node.bpf_root(), &mut pins)?;
            let mut leases = BTreeSet::new();
            collect(node.data_dir(), &mut leases)?;
            leases.retain(|path| is_lease(path));
            anyhow::Ok((pins, leases))
        })?;
        Ok(Self {
            devices: names
                .filter_map(|link| link["ifname"].as_str().map(str::to_owned))
                .collect(),
            routes,
            neighbours: text(&["neighbour", "show", "nud", "permanent"], "dst")?,
            registry: Registry::read(node)?,
            pins,
            leases,
        })
    }

    /// Fails if a node shows other traces now.
    pub fn expect_same(&self, node: &Node) -> Result<()> {
        let now = Self::of(node)?;
        let [left, lost] = [now.beyond(self), self.beyond(&now)];
        ensure!(*self == now, "left behind: {left:#?}, lost: {lost:#?}");
        Ok(())
    }

    /// What these traces show and others do not, a line for each.
    fn beyond(&self, other: &Self) -> Vec<String> {
        let lines = |traces: &Self| -> BTreeSet<String> {
            let Self {
                devices,
                routes,
                neighbours,
                registry,
                pins,
                leases,
            } = traces;
            let mut lines = BTreeSet::from([format!("{registry:?}")]);
            lines.extend(devices.iter().map(|name| format!("device {name}")));
            lines.extend(routes.iter().map(|route| format!("route {route}")));
            lines.extend(neighbours.iter().map(|entry| format!("neighbour {entry}")));
            lines.extend(pins.iter().map(|path| format!("pin {}", path.display())));
            lines.extend(
                leases
                    .iter()
                    .map(|path| format!("lease {}", path.display())),
            );
            lines
        };
        lines(self).difference(&lines(other)).cloned().collect()
    }
}

fn collect(folder: &Path, files: &mut BTreeSet<PathBuf>) -> Result<()> {
    if !folder.try_exists()? {
        return Ok(());
    }
    for entry in fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            collect(&entry.path(), files)?;
        } else {
            files.insert(entry.path());
        }
    }
    Ok(())
}

/// Host-local names a lease like its address (colons may be written otherwise), and our index its link to it.
fn is_lease(path: &Path) -> bool {
    path.file_name()
        .and_then(|name| name.to_str())
        .map(|name| name.strip_prefix("lease-").unwrap_or(name))
        .is_some_and(|name| name.replace('_', ":").parse::<IpAddr>().is_ok())
}

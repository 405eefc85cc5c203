//! What is pinned below another bpfRoot for the same node, with containers of its own. A device has room for the programs of one
//! only: who took an uplink from the other would have its containers leave with their own addresses.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use aya::maps::{HashMap, Map, MapData};
use underpass_abi::{
    endpoint::{Attachment, Owner},
    map,
};
use underpass_netlink::{Netlink, link::Device};

use super::{Layout, number};
use crate::{
    Error, Pins,
    attach::{Hook, Place},
    home::{self, Home},
    pin::{Folder, HOME, PROGRAMS},
    raw_map::visit,
};

/// How far below the place where a bpffs is mounted a bpfRoot is looked for.
const DEEP: usize = 4;

impl Pins {
    /// Lists the layouts below other roots that are for the calling thread's network namespace, on every bpffs in sight. What can't
    /// be looked at is left out: it is as if it were gone.
    #[must_use]
    pub fn beside(&self) -> Vec<Layout> {
        let mut seen: BTreeSet<(u64, u64)> = identity(self.root()).into_iter().collect();
        let mut roots = Vec::new();
        for mount in mounts(&fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default())
        {
            collect(&mount, DEEP, &mut roots);
        }
        // One folder may be seen at several places.
        roots.retain(|root| identity(root).is_some_and(|identity| seen.insert(identity)));
        let layouts = roots
            .iter()
            .filter_map(|root| Self::at(root).layouts().ok());
        layouts.flatten().filter(Layout::is_here).collect()
    }
}

impl Layout {
    /// Names the folder of all layouts that it is in.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Lists the host's ends of its attachments, where this build can read them.
    #[must_use]
    pub fn devices(&self) -> Option<BTreeSet<u32>> {
        let path = Folder::at(&self.folder).map(map::OWNERS);
        let owners = Map::HashMap(MapData::from_pin(&path).ok()?);
        let owners: HashMap<_, Owner, Attachment> = owners.try_into().ok()?;
        let mut devices = BTreeSet::new();
        let note = |_: &Owner, record: &Attachment| {
            devices.insert(record.ifindex);
        };
        visit(&owners, note).ok()?;
        Some(devices)
    }

    fn is_here(&self) -> bool {
        let home = home::read(&self.folder.join(HOME), &self.root);
        self.folder.join(PROGRAMS).is_dir() && matches!(home, Ok(Some(Home::Here)))
    }

    /// Counts the attachments whose devices are among these.
    fn living(&self, devices: &BTreeSet<u32>) -> usize {
        match self.devices() {
            Some(known) => known.intersection(devices).count(),
            None => self.attachments().unwrap_or(0),
        }
    }
}

/// Fails if a device has programs in these places that are of another root, to which containers are attached that live. Those of
/// nobody that can be found are left over.
pub fn require_free(
    netlink: &Netlink,
    pins: &Pins,
    device: &Device,
    places: &[(u32, Place)],
) -> Result<(), Error> {
    let filters: Vec<_> = places
        .iter()
        .filter_map(|(index, place)| match place.hook {
            Hook::Tc(direction) => Some((*index, direction)),
            Hook::NetkitPeer => None,
        })
        .collect();
    let sitting: Vec<u32> = netlink
        .filter_programs(&filters)?
        .into_iter()
        .flatten()
        .collect();
    if sitting.is_empty() {
        return Ok(());
    }
    for layout in pins.beside() {
        let Ok(programs) = layout.programs() else {
            continue;
        };
        if !sitting.iter().any(|id| programs.0.contains_key(id)) {
            continue;
        }
        let attached = layout.living(&netlink.indices()?);
        if attached > 0 {
            return Err(Error::Claimed {
                device: device.name.clone(),
                root: layout.root,
                attached,
            });
        }
    }
    Ok(())
}

/// Finds the folders that have layouts in them.
fn collect(folder: &Path, deep: usize, roots: &mut Vec<PathBuf>) {
    let mut has_layouts = false;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        if number(&entry.file_name()).is_some() {
            has_layouts = true;
        } else if deep > 1 {
            collect(&entry.path(), deep - 1, roots);
        }
    }
    if has_layouts {
        roots.push(folder.to_owned());
    }
}

/// Reads where each bpffs is mounted, from a text as `/proc/<process>/mountinfo` has it.
fn mounts(text: &str) -> Vec<PathBuf> {
    let mount = |line: &str| {
        let (mount, kind) = line.split_once(" - ")?;
        let is_bpffs = kind.split(' ').next() == Some("bpf");
        let place = mount.split(' ').nth(4)?;
        is_bpffs.then(|| PathBuf::from(place.replace("\\040", " ")))
    };
    text.lines().filter_map(mount).collect()
}

/// What tells a folder from every other one.
fn identity(folder: &Path) -> Option<(u64, u64)> {
    let folder = fs::metadata(folder).ok()?;
    Some((folder.dev(), folder.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bpffs_is_found_among_the_mounts() {
        let text = "24 1 0:22 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n\
                    33 24 0:28 / /sys/fs/bpf rw,nosuid shared:9 - bpf bpf rw,mode=700\n\
                    34 1 0:29 / /run/my\\040bpf rw - bpf none rw\n";
        assert_eq!(
            mounts(text),
            [PathBuf::from("/sys/fs/bpf"), PathBuf::from("/run/my bpf")]
        );
        assert!(mounts("").is_empty());
    }
}

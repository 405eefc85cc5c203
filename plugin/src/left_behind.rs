//! Containers that have outlived the maps: their programs were unloaded, or the bpffs was wiped or mounted anew. What is
//! attached keeps its own maps and goes on, but nobody can find these any more. Those of another bpfRoot that can be found are not among them.

use std::{collections::BTreeSet, path::Path};

use underpass_dataplane::{Maps, Pins, layout::Layout};
use underpass_netlink::{Netlink, link::Link};

use crate::{
    error::Error,
    finding::{Finding, Findings},
    identity::Alias,
    uplink,
};

/// Finds the devices of containers that `maps` do not know, if there are any maps: of the attachments that `is_asked`
/// names.
pub(crate) fn left_behind(
    root: &Path,
    maps: Option<&Maps>,
    is_asked: impl Fn(&Alias) -> bool,
) -> Result<Findings, Error> {
    if let Some(maps) = maps {
        return unknown_to(maps, &known(maps)?, is_asked);
    }
    let mut links = Netlink::open()?.links()?;
    links.retain(|link| is_of_asked(link, &is_asked));
    Ok(not_elsewhere(root, links))
}

/// Does the same where `devices` are what the maps knew a moment ago. An ADD sets its device up when the maps know it, so one that is
/// down may be about to be known.
pub(crate) fn unknown_to(
    maps: &Maps,
    devices: &BTreeSet<u32>,
    is_asked: impl Fn(&Alias) -> bool,
) -> Result<Findings, Error> {
    let node = Netlink::open()?;
    let all = node.indices()?;
    let unknown = &all - devices;
    let mut links = uplink::devices(&node, &unknown, all.len())?;
    links.retain(|link| link.up && is_of_asked(link, &is_asked));
    if !links.is_empty() {
        // Those of ADDs that have ended meanwhile.
        let known = known(maps)?;
        links.retain(|link| !known.contains(&link.index));
    }
    Ok(not_elsewhere(maps.pins().root(), links))
}

fn is_of_asked(link: &Link, is_asked: impl Fn(&Alias) -> bool) -> bool {
    Alias::of(link).is_some_and(|alias| is_asked(&alias))
}

/// Says of which devices nobody knows: where no pins can be, the node has none of its own that these could be told from.
fn not_elsewhere(root: &Path, mut links: Vec<Link>) -> Findings {
    if !links.is_empty() && Pins::at(root).require_bpffs().is_ok() {
        let elsewhere = beside(root);
        links.retain(|link| !elsewhere.contains(&link.index));
    }
    let mut findings = Findings::default();
    findings.extend(links.into_iter().map(|link| Finding::LeftBehind {
        device: link.name,
        root: root.to_owned(),
    }));
    findings
}

/// The host's ends of containers of another bpfRoot of this node.
pub(crate) fn beside(root: &Path) -> BTreeSet<u32> {
    let layouts = Pins::at(root).beside();
    layouts
        .iter()
        .filter_map(Layout::devices)
        .flatten()
        .collect()
}

/// The devices that the maps know: an attachment's is one of them from before it is set up until it is gone.
fn known(maps: &Maps) -> Result<BTreeSet<u32>, Error> {
    let mut known = Vec::new();
    maps.each_device(|index, _| known.push(index))?;
    Ok(known.into_iter().collect())
}

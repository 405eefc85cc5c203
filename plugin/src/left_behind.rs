//! Containers that have outlived the maps: their programs were unloaded, or the bpffs was wiped or mounted anew. What is
//! attached keeps its own maps and goes on, but nobody can find these any more. Those of another bpfRoot that can be found are not among them.

use std::{collections::BTreeSet, path::Path};

use underpass_dataplane::{Maps, Pins, layout::Layout};
use underpass_netlink::{Netlink, link::Link};

use crate::{
    error::Error,
    finding::{Finding, Findings},
    identity::Alias,
    uplink::devices,
};

/// Finds the devices of containers that `maps` do not know, if there are any maps: of the attachments that `is_asked`
/// names. An ADD sets its device up when the maps know it, so one that is down may be about to be known.
pub(crate) fn left_behind(
    root: &Path,
    maps: Option<&Maps>,
    is_asked: impl Fn(&Alias) -> bool,
) -> Result<Findings, Error> {
    let node = Netlink::open()?;
    let is_asked = |link: &Link| Alias::of(link).is_some_and(|alias| is_asked(&alias));
    let mut links = match maps {
        None => {
            let mut links = node.links()?;
            links.retain(is_asked);
            links
        }
        Some(maps) => {
            let all = node.indices()?;
            let unknown = &all - &known(maps)?;
            let mut links = devices(&node, &unknown, all.len())?;
            links.retain(|link| link.up && is_asked(link));
            if !links.is_empty() {
                // Those of ADDs that have ended meanwhile.
                let known = known(maps)?;
                links.retain(|link| !known.contains(&link.index));
            }
            links
        }
    };
    // Where no pins can be, the node has none of its own that these could be told from.
    if !links.is_empty() && Pins::at(root).require_bpffs().is_ok() {
        let elsewhere = beside(root);
        links.retain(|link| !elsewhere.contains(&link.index));
    }
    let mut findings = Findings::default();
    findings.extend(links.into_iter().map(|link| Finding::LeftBehind {
        device: link.name,
        root: root.to_owned(),
    }));
    Ok(findings)
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

/// The host's ends that the maps know.
fn known(maps: &Maps) -> Result<BTreeSet<u32>, Error> {
    let attachments = maps.attachments()?.into_iter();
    Ok(attachments.map(|(_, record)| record.ifindex).collect())
}

//! Containers that have outlived the maps: their programs were unloaded, or the bpffs was wiped or mounted anew. What is
//! attached keeps its own maps and goes on, but nobody can find these any more.

use std::{collections::BTreeSet, path::Path};

use underpass_dataplane::Maps;
use underpass_netlink::Netlink;

use crate::{
    error::Error,
    finding::{Finding, Findings},
    identity::Alias,
};

/// Finds the devices of containers that `maps` do not know, if there are any maps: of the attachments that `is_asked`
/// names. An ADD sets its device up when the maps know it, so one that is down may be about to be known.
pub(crate) fn left_behind(
    root: &Path,
    maps: Option<&Maps>,
    is_asked: impl Fn(&Alias) -> bool,
) -> Result<Findings, Error> {
    let known = |maps: &Maps| -> Result<BTreeSet<u32>, Error> {
        let attachments = maps.attachments()?.into_iter();
        Ok(attachments.map(|(_, record)| record.ifindex).collect())
    };
    let node = Netlink::open()?;
    let links = match maps {
        None => node.links()?,
        Some(maps) => {
            let before = known(maps)?;
            let mut links = node.links_where(|index| !before.contains(&index))?;
            // Those of ADDs that have ended meanwhile.
            let after = known(maps)?;
            links.retain(|link| link.up && !after.contains(&link.index));
            links
        }
    };
    let mut findings = Findings::default();
    findings.extend(
        links
            .into_iter()
            .filter(|link| Alias::of(link).is_some_and(|alias| is_asked(&alias)))
            .map(|link| Finding::LeftBehind {
                device: link.name,
                root: root.to_owned(),
            }),
    );
    Ok(findings)
}

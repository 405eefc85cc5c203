//! Many ADDs, one after the other and all at once: what waits for what.

use std::time::Instant;

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::Value;
use underpass_tests::netns::Netns;

use super::{Ports, Site};
use crate::{plugin::Plugin, sample::Summary};

/// Containers of one series.
const CONTAINERS: usize = 50;

/// Wall time of a series, in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Series {
    pub(crate) containers: usize,
    pub(crate) in_a_row_ms: Summary,
    pub(crate) at_once_ms: Summary,
    /// At once against in a row.
    pub(crate) ratio: Summary,
}

/// Measures both ways in turn on the same node.
pub(super) fn measure(times: usize) -> Result<Series> {
    let site = Site::new(Plugin::Learned, Ports::None)?;
    // The first ADD of a node loads the programs.
    let first = site.container("first")?;
    site.add(&first)?;
    let containers = (0..CONTAINERS)
        .map(|number| site.container(&format!("pod{number}")))
        .collect::<Result<Vec<_>>>()?;
    let (mut row, mut once) = (Vec::new(), Vec::new());
    for _ in 0..times {
        row.push(wall(&site, &containers, in_a_row)?);
        once.push(wall(&site, &containers, at_once)?);
    }
    let enough = "no series were asked for";
    Ok(Series {
        containers: CONTAINERS,
        in_a_row_ms: Summary::of(&row).context(enough)?,
        at_once_ms: Summary::of(&once).context(enough)?,
        ratio: Summary::ratio(&once, &row).context(enough)?,
    })
}

/// Attaches containers: what each ADD printed.
type Way = fn(&Site, &[Netns]) -> Result<Vec<Vec<u8>>>;

/// Milliseconds until all are attached. They are detached again, untimed.
fn wall(site: &Site, containers: &[Netns], way: Way) -> Result<f64> {
    let (elapsed, results) = site.node.netns().run(|| {
        let start = Instant::now();
        let results = way(site, containers)?;
        anyhow::Ok((start.elapsed(), results))
    })?;
    for (container, result) in containers.iter().zip(results) {
        let result: Value = serde_json::from_slice(&result).context("read the result of an ADD")?;
        site.del(container, &site.network.after(&result))?;
    }
    Ok(elapsed.as_secs_f64() * 1e3)
}

fn in_a_row(site: &Site, containers: &[Netns]) -> Result<Vec<Vec<u8>>> {
    let calls = containers.iter();
    calls
        .map(|container| site.network.start("ADD", Some(container))?.finish())
        .collect()
}

fn at_once(site: &Site, containers: &[Netns]) -> Result<Vec<Vec<u8>>> {
    let running = containers
        .iter()
        .map(|container| site.network.start("ADD", Some(container)))
        .collect::<Result<Vec<_>>>()?;
    let finished = running.into_iter().map(crate::plugin::Running::finish);
    finished.collect()
}

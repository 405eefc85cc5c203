//! Memory of the pinned maps and programs, as the kernel accounts it.

use std::{fs, os::fd::AsRawFd as _};

use anyhow::{Context as _, Result};
use aya::{maps::MapData, programs::SchedClassifier};
use serde::Serialize;
use underpass_tests::{Node, counter::pins};

/// Bytes that a node's pins keep in the kernel.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Memory {
    pub(crate) containers: usize,
    pub(crate) maps: u64,
    pub(crate) programs: u64,
    /// Each map's share, largest first.
    pub(crate) largest: Vec<(String, u64)>,
}

impl Memory {
    /// Looks at a node.
    pub(super) fn of(node: &Node, containers: usize) -> Result<Self> {
        let folder = pins(node);
        node.netns().run(|| {
            let mut largest = Vec::new();
            for entry in fs::read_dir(folder.join("maps")).context("list the pinned maps")? {
                let path = entry?.path();
                let map = MapData::from_pin(&path)
                    .with_context(|| format!("open the pinned map {}", path.display()))?;
                let name = path.file_name().unwrap_or_default().display().to_string();
                largest.push((name, locked(map.fd())?));
            }
            largest.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
            let mut programs = 0;
            for entry in fs::read_dir(folder.join("programs")).context("list the programs")? {
                let path = entry?.path();
                let program = SchedClassifier::from_pin(&path)
                    .with_context(|| format!("open the pinned program {}", path.display()))?;
                programs += locked(program.fd()?)?;
            }
            Ok(Self {
                containers,
                maps: largest.iter().map(|(_, bytes)| bytes).sum(),
                programs,
                largest,
            })
        })
    }
}

/// `memlock` of a map or program.
fn locked(fd: impl std::os::fd::AsFd) -> Result<u64> {
    let path = format!("/proc/thread-self/fdinfo/{}", fd.as_fd().as_raw_fd());
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    text.lines()
        .find_map(|line| line.strip_prefix("memlock:")?.trim().parse().ok())
        .with_context(|| format!("{path} has no memlock"))
}

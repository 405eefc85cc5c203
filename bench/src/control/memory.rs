//! Memory of the pinned maps and programs, as the kernel accounts it.

use std::{cmp::Reverse, fs};

use anyhow::{Context as _, Result};
use aya::{maps::MapData, programs::SchedClassifier};
use serde::Serialize;
use underpass_tests::{Node, counter::pins};

use crate::fdinfo;

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
                largest.push((name, fdinfo::number(map.fd(), "memlock")?));
            }
            largest.sort_by_key(|(_, bytes)| Reverse(*bytes));
            let mut programs = 0;
            for entry in fs::read_dir(folder.join("programs")).context("list the programs")? {
                let path = entry?.path();
                let program = SchedClassifier::from_pin(&path)
                    .with_context(|| format!("open the pinned program {}", path.display()))?;
                programs += fdinfo::number(program.fd()?, "memlock")?;
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

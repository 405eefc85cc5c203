//! Memory of the pinned maps and programs, as the kernel accounts it.

use std::{
    cmp::Reverse,
    fs,
    net::{Ipv4Addr, Ipv6Addr},
    path::Path,
};

use anyhow::{Context as _, Result};
use aya::{
    Pod,
    maps::{HashMap, Map, MapData, MapError},
    programs::SchedClassifier,
};
use serde::Serialize;
use underpass_abi::{
    addr::{Addr4, Addr6, Family},
    flow::{Flow, Key, Tuple, protocol},
    map,
};
use underpass_tests::{
    Node,
    counter::{map_pin, pins},
};

use crate::fdinfo;

/// Bytes that a node's pins keep in the kernel.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Memory {
    pub(crate) containers: usize,
    /// Entries in the tables of flows.
    pub(crate) flows: usize,
    pub(crate) maps: u64,
    pub(crate) programs: u64,
    /// Each map's share, largest first.
    pub(crate) largest: Vec<(String, u64)>,
}

impl Memory {
    /// Looks at a node with so many entries in its tables of flows, as far as there is room: half of them IPv4, half IPv6.
    /// They are made here, and lead nowhere.
    pub(super) fn with_flows(node: &Node, containers: usize, flows: u32) -> Result<Self> {
        node.netns().run(|| {
            fill(&map_pin(node, map::FLOWS4), flows / 2, |number| {
                Addr4::from(Ipv4Addr::from_bits(number))
            })?;
            fill(&map_pin(node, map::FLOWS6), flows / 2, |number| {
                Addr6::from(Ipv6Addr::from_bits(u128::from(number)))
            })
        })?;
        Self::of(node, containers)
    }

    /// Looks at a node.
    pub(super) fn of(node: &Node, containers: usize) -> Result<Self> {
        let folder = pins(node);
        node.netns().run(|| {
            let mut largest = Vec::new();
            for entry in fs::read_dir(folder.join("maps")).context("list the pinned maps")? {
                let path = entry?.path();
                let map = MapData::from_pin(&path)
                    .with_context(|| format!("open the pinned map {}", path.display()))?;
                let pin = path.file_name().unwrap_or_default().to_string_lossy();
                let name = pin.split('-').next().unwrap_or_default().to_owned();
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
            let flows = entries::<Addr4>(&map_pin(node, map::FLOWS4))?
                + entries::<Addr6>(&map_pin(node, map::FLOWS6))?;
            Ok(Self {
                containers,
                flows,
                maps: largest.iter().map(|(_, bytes)| bytes).sum(),
                programs,
                largest,
            })
        })
    }
}

type Flows<A> = HashMap<MapData, Key<A>, Flow<A>>;

fn open<A>(path: &Path) -> Result<Flows<A>>
where
    Key<A>: Pod,
    Flow<A>: Pod,
{
    let map = MapData::from_pin(path)
        .map(Map::HashMap)
        .with_context(|| format!("open the pinned map {}", path.display()))?;
    map.try_into()
        .with_context(|| format!("use {} as a table of flows", path.display()))
}

/// Adds flows between addresses that are all different.
fn fill<A: Family>(path: &Path, flows: u32, address: impl Fn(u32) -> A) -> Result<()>
where
    Key<A>: Pod,
    Flow<A>: Pod + Default,
{
    let mut map = open::<A>(path)?;
    for number in 0..flows {
        let tuple = Tuple::new(protocol::UDP, address(number), 1, address(u32::MAX), 2);
        match map.insert(tuple.key().0, Flow::default(), 0) {
            Err(MapError::SyscallError(error))
                if error.io_error.raw_os_error() == Some(libc::E2BIG) =>
            {
                break;
            }
            answer => answer.with_context(|| format!("add a flow to {}", path.display()))?,
        }
    }
    Ok(())
}

fn entries<A>(path: &Path) -> Result<usize>
where
    Key<A>: Pod,
    Flow<A>: Pod,
{
    open::<A>(path)?
        .keys()
        .try_fold(0, |count, key| key.map(|_| count + 1))
        .with_context(|| format!("count the flows in {}", path.display()))
}

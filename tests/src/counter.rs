//! The plugin's counters and maps, read from their pins.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{HashMap, Map, MapData, PerCpuArray};
use underpass_abi::{
    ABI,
    addr::Addr,
    counter::{Counter, Kind},
    endpoint::{Attachment, Device, Endpoint, Owner},
    map,
    port::{HostPort, PortTarget, ShadowedPort},
};

use crate::{Node, patience, traffic::SILENCE};

/// Where a node's pins are.
#[must_use]
pub fn pins(node: &Node) -> PathBuf {
    node.bpf_root().join(format!("v{ABI}"))
}

/// Where a map of a node is pinned.
///
/// # Panics
/// If no map of this build has that name.
#[must_use]
pub fn map_pin(node: &Node, name: &str) -> PathBuf {
    let pin = map::pinned(name).unwrap_or_else(|| panic!("no map {name} is pinned"));
    pins(node).join("maps").join(pin.to_string())
}

/// All counters at one moment.
#[derive(Clone, PartialEq, Eq)]
pub struct Counters([u64; Counter::ALL.len()]);

impl Counters {
    /// Reads the counters of a node, the sum of all CPUs.
    pub fn read(node: &Node) -> Result<Self> {
        let data = open(node, map::COUNTERS)?;
        let array: PerCpuArray<_, u64> =
            Map::PerCpuArray(data).try_into().context("open COUNTERS")?;
        let mut sums = [0; Counter::ALL.len()];
        for (sum, &counter) in sums.iter_mut().zip(Counter::ALL) {
            let values = array
                .get(&(counter as u32), 0)
                .with_context(|| format!("read counter {}", counter.name()))?;
            *sum = values.iter().sum();
        }
        Ok(Self(sums))
    }

    /// Fails unless a node of this name has put packets past its stack onto an uplink, and into a container.
    pub fn expect_bypass(node: &Node, name: &str) -> Result<()> {
        let counted = Self::read(node)?;
        for counter in [Counter::BypassWire, Counter::BypassPeer] {
            ensure!(counted.get(counter) > 0, "{name}: no {}", counter.name());
        }
        Ok(())
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, counter: Counter) -> u64 {
        self.0[counter as usize]
    }

    /// What was counted since an earlier moment.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut difference = self.0;
        for (now, before) in difference.iter_mut().zip(earlier.0) {
            *now -= before;
        }
        Self(difference)
    }

    /// Packets that took the bypass, either way.
    #[must_use]
    pub fn bypassed(&self) -> u64 {
        [Counter::BypassPeer, Counter::BypassWire, Counter::BypassXdp]
            .map(|counter| self.get(counter))
            .into_iter()
            .sum()
    }

    /// Packets that a program dropped, for any reason.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        Counter::ALL
            .iter()
            .filter(|counter| counter.kind() == Kind::Drop)
            .map(|&counter| self.get(counter))
            .sum()
    }
}

impl fmt::Debug for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = Counter::ALL
            .iter()
            .map(|&counter| (counter.name(), self.get(counter)))
            .filter(|(_, count)| *count > 0);
        f.debug_map().entries(counted).finish()
    }
}

/// Counters of the traffic between two moments.
#[derive(Debug)]
pub struct Meter<'a> {
    node: &'a Node,
    start: Counters,
}

impl<'a> Meter<'a> {
    /// Starts to count.
    pub fn start(node: &'a Node) -> Result<Self> {
        Ok(Self {
            node,
            start: Counters::read(node)?,
        })
    }

    /// What was counted since the start.
    pub fn read(&self) -> Result<Counters> {
        Ok(Counters::read(self.node)?.since(&self.start))
    }

    /// Fails unless the counter rises by at least `least`, soon.
    pub fn expect(&self, counter: Counter, least: u64) -> Result<()> {
        let end = Instant::now() + patience::here(SILENCE);
        loop {
            let now = self.read()?;
            if now.get(counter) >= least {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "expected at least {least} for {}, counted: {now:?}",
                counter.name()
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Fails if the counter rose.
    pub fn expect_none(&self, counter: Counter) -> Result<()> {
        let now = self.read()?;
        ensure!(
            now.get(counter) == 0,
            "expected nothing for {}, counted: {now:?}",
            counter.name()
        );
        Ok(())
    }

    /// Fails if any packet took the bypass.
    pub fn expect_no_bypass(&self) -> Result<()> {
        let counted = self.read()?;
        ensure!(
            counted.bypassed() == 0,
            "no packet may take the bypass here, counted: {counted:?}"
        );
        Ok(())
    }
}

/// Opens a pinned map of a node.
pub fn open(node: &Node, name: &str) -> Result<MapData> {
    let path = map_pin(node, name);
    node.netns()
        .run(|| MapData::from_pin(&path))
        .with_context(|| format!("open the pinned map {}", path.display()))
}

/// What the maps say about attachments.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Registry {
    /// Pod addresses, and the device of each.
    pub endpoints: BTreeMap<Addr, u32>,
    /// Host veths among the devices.
    pub pods: Vec<u32>,
    /// Owners.
    pub owners: Vec<Owner>,
    /// How many destinations are kept from masquerade.
    pub destinations: usize,
    /// Host ports (family, protocol, address, port in network order), and the device of each.
    pub ports: BTreeMap<(u8, u8, Addr, u16), u32>,
    /// How many older mappings of host ports wait.
    pub shadowed_ports: usize,
}

impl Registry {
    /// Reads the maps of a node; empty if nothing was ever loaded.
    pub fn read(node: &Node) -> Result<Self> {
        let loaded = node.netns().run(|| exists(&pins(node)));
        if !loaded {
            return Ok(Self::default());
        }
        let endpoints: HashMap<_, Addr, Endpoint> =
            Map::HashMap(open(node, map::ENDPOINTS)?).try_into()?;
        let devices: HashMap<_, u32, Device> =
            Map::HashMap(open(node, map::DEVICES)?).try_into()?;
        let owners: HashMap<_, Owner, Attachment> =
            Map::HashMap(open(node, map::OWNERS)?).try_into()?;
        let destinations: aya::maps::LpmTrie<_, [u8; 20], u32> =
            Map::LpmTrie(open(node, map::NO_MASQUERADE)?).try_into()?;
        let ports: HashMap<_, HostPort, PortTarget> =
            Map::HashMap(open(node, map::PORTS)?).try_into()?;
        let shadowed: HashMap<_, ShadowedPort, PortTarget> =
            Map::HashMap(open(node, map::SHADOWED_PORTS)?).try_into()?;
        let mut registry = Self::default();
        for entry in &ports {
            let (port, target) = entry?;
            registry.ports.insert(
                (port.family, port.protocol, port.addr, port.port),
                target.ifindex,
            );
        }
        registry.shadowed_ports = shadowed.keys().filter_map(Result::ok).count();
        for entry in &endpoints {
            let (addr, endpoint) = entry?;
            registry.endpoints.insert(addr, endpoint.ifindex);
        }
        for entry in &devices {
            let (ifindex, device) = entry?;
            if device.flags & underpass_abi::endpoint::device::POD != 0 {
                registry.pods.push(ifindex);
            }
        }
        for owner in owners.keys() {
            registry.owners.push(owner?);
        }
        registry.pods.sort_unstable();
        registry.owners.sort_unstable();
        registry.destinations = destinations.iter().filter_map(Result::ok).count();
        Ok(registry)
    }
}

/// Has the programs believe that a device leads to the network namespace with this inode number.
pub fn renumber(node: &Node, device: &str, netns: u32) -> Result<()> {
    let index = node.netns().ifindex(device)?;
    let mut devices: HashMap<_, u32, Device> =
        Map::HashMap(open(node, map::DEVICES)?).try_into()?;
    let known = devices.get(&index, 0)?;
    devices.insert(index, Device { netns, ..known }, 0)?;
    Ok(())
}

fn exists(path: &Path) -> bool {
    path.try_exists().unwrap_or(false)
}

//! The pinned maps that user space reads and writes, each opened when it is first needed: what is attached, the node's state, and what was
//! counted.

use std::{net::IpAddr, path::Path, sync::Arc};

use aya::{
    Pod,
    maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, xdp::DevMapHash},
};
use underpass_abi::{
    addr::Addr,
    counter::Counter,
    endpoint::{Attachment, Device, Endpoint, Owner, role},
    map,
    node::{Node, State, Tunnels},
};

use crate::{
    Changed, Error, Loaded, Pins,
    lock::{Lock, Use},
    object,
    raw_map::visit,
    upgrade,
};

mod flow;
mod no_masquerade;

pub use flow::{FlowCount, FlowEntry};

/// The maps of one node. An upgrade waits until they are dropped.
#[derive(Debug)]
pub struct Maps {
    _use: Arc<Use>,
    pins: Pins,
    endpoints: HashMap<MapData, Addr, Endpoint>,
    devices: HashMap<MapData, u32, Device>,
    owners: HashMap<MapData, Owner, Attachment>,
}

impl Maps {
    /// Opens the maps. The pins are complete. Waits for an upgrade that is running, and ends one that was killed.
    pub fn open(pins: &Pins) -> Result<Self, Error> {
        Self::open_used(pins, upgrade::settled(pins)?)
    }

    /// Opens the maps, after loading and pinning them and the usual programs if this is the first call since boot. Waits as [`Self::open`]
    /// does.
    pub fn open_or_load(root: &Path) -> Result<Self, Error> {
        Self::open_or_load_sized(root, None)
    }

    /// Does what [`Self::open_or_load`] does; if it loads, then with flow tables of so many entries (one of
    /// [`FLOWS_ASKED`](crate::object::FLOWS_ASKED)), else of what the node's memory suggests.
    pub fn open_or_load_sized(root: &Path, flows: Option<u32>) -> Result<Self, Error> {
        let pins = Pins::at(root);
        let in_use = upgrade::settled(&pins)?;
        object::load_unless_loaded(&pins, flows)?;
        Self::open_used(&pins, in_use)
    }

    fn open_used(pins: &Pins, in_use: Arc<Use>) -> Result<Self, Error> {
        Ok(Self {
            _use: in_use,
            pins: pins.clone(),
            endpoints: open(pins, map::ENDPOINTS, Map::HashMap)?,
            devices: open(pins, map::DEVICES, Map::HashMap)?,
            owners: open(pins, map::OWNERS, Map::HashMap)?,
        })
    }

    /// Opens the maps, if anything was ever loaded for the calling thread's network namespace.
    pub fn open_existing(pins: &Pins) -> Result<Option<Self>, Error> {
        if !pins.exist() {
            // Who only looks makes no lock. Who may not look is told so.
            return pins.loaded().map(|_| None);
        }
        let in_use = upgrade::settled(pins)?;
        match pins.loaded()? {
            Loaded::Here => Self::open_used(pins, in_use).map(Some),
            Loaded::Nothing | Loaded::Leftover => Ok(None),
        }
    }

    /// Finds what an attachment put into maps.
    pub fn attachment(&self, owner: Owner) -> Result<Option<Attachment>, Error> {
        found(self.owners.get(&owner, 0), map::OWNERS)
    }

    /// Lists all attachments.
    pub fn attachments(&self) -> Result<Vec<(Owner, Attachment)>, Error> {
        entries(&self.owners, map::OWNERS)
    }

    /// Lists the attachments that are chosen. The others are not kept on the way.
    pub fn attachments_where(
        &self,
        mut chosen: impl FnMut(&Attachment) -> bool,
    ) -> Result<Vec<(Owner, Attachment)>, Error> {
        entries_where(&self.owners, map::OWNERS, |_, record| chosen(record))
    }

    /// Lists the attachments whose interface is of our making, not another plugin's.
    pub fn interfaces(&self) -> Result<Vec<Attachment>, Error> {
        let attachments = self.attachments_where(|record| record.role == role::INTERFACE)?;
        Ok(attachments.into_iter().map(|(_, record)| record).collect())
    }

    /// Tells whether there is any attachment.
    pub fn has_attachments(&self) -> Result<bool, Error> {
        let first = self.owners.keys().next().transpose();
        Ok(first.map_err(Error::map(map::OWNERS))?.is_some())
    }

    /// Records an attachment, which may not be there yet.
    pub fn add_attachment(&mut self, owner: Owner, attachment: &Attachment) -> Result<(), Error> {
        self.owners
            .insert(owner, attachment, u64::from(aya_flags::NO_EXIST))
            .map_err(Error::map(map::OWNERS))
    }

    /// Forgets an attachment.
    pub fn remove_attachment(&mut self, owner: Owner) -> Result<(), Error> {
        gone(self.owners.remove(&owner), map::OWNERS)
    }

    /// Finds what the programs know of a device.
    pub fn device(&self, index: u32) -> Result<Option<Device>, Error> {
        found(self.devices.get(&index, 0), map::DEVICES)
    }

    /// Visits all devices that the programs know, and keeps none.
    pub fn each_device(&self, mut each: impl FnMut(u32, &Device)) -> Result<(), Error> {
        let name = map::DEVICES;
        visit(&self.devices, |index, device| each(*index, device))
            .map_err(|source| Error::List { name, source })
    }

    /// Lists all devices that the programs know.
    pub fn devices(&self) -> Result<Vec<(u32, Device)>, Error> {
        entries(&self.devices, map::DEVICES)
    }

    /// Tells the programs of a device.
    pub fn set_device(&mut self, index: u32, device: Device) -> Result<(), Error> {
        self.devices
            .insert(index, device, 0)
            .map_err(Error::map(map::DEVICES))
    }

    /// Makes the programs forget a device.
    pub fn remove_device(&mut self, index: u32) -> Result<(), Error> {
        gone(self.devices.remove(&index), map::DEVICES)
    }

    /// Finds the host veth that owns an address.
    pub fn endpoint(&self, addr: Addr) -> Result<Option<Endpoint>, Error> {
        found(self.endpoints.get(&addr, 0), map::ENDPOINTS)
    }

    /// Has a host veth be sent frames by XDP. It is one of the calling thread's network namespace; the
    /// kernel takes it out when it goes.
    pub fn add_xdp_pod(&self, index: u32) -> Result<(), Error> {
        Ok(self.xdp_pods()?.insert(index, index, None, 0)?)
    }

    /// Tells whether a host veth is sent frames by XDP.
    pub fn is_xdp_pod(&self, index: u32) -> Result<bool, Error> {
        found(self.xdp_pods()?.get(index, 0), map::XDP_PODS).map(|found| found.is_some())
    }

    fn xdp_pods(&self) -> Result<DevMapHash<MapData>, Error> {
        open(&self.pins, map::XDP_PODS, Map::DevMapHash)
    }

    /// Lists all addresses and their owners.
    pub fn endpoints(&self) -> Result<Vec<(IpAddr, Endpoint)>, Error> {
        let all = entries(&self.endpoints, map::ENDPOINTS)?;
        Ok(all
            .into_iter()
            .map(|(addr, endpoint)| (addr.into(), endpoint))
            .collect())
    }

    /// Gives an address to a host veth, whoever had it: the caller knows that it is nobody's who lives.
    pub fn set_endpoint(&mut self, addr: Addr, endpoint: Endpoint) -> Result<(), Error> {
        self.endpoints
            .insert(addr, endpoint, 0)
            .map_err(Error::map(map::ENDPOINTS))
    }

    /// Takes an address from a host veth, unless another has it by now.
    pub fn remove_endpoint(&mut self, addr: Addr, index: u32) -> Result<(), Error> {
        match self.endpoint(addr)? {
            Some(endpoint) if endpoint.ifindex == index => {
                gone(self.endpoints.remove(&addr), map::ENDPOINTS)
            }
            _ => Ok(()),
        }
    }

    /// Makes every flow validate itself again at its next packet. The caller holds the lock.
    pub fn raise_epoch(&self) -> Result<(), Error> {
        self.update_state(|state| state.epoch = state.epoch.checked_add(1).unwrap_or(1))
            .map(drop)
    }

    /// Sets the highest level of log records, 0 for none. The caller holds the lock.
    pub fn set_trace(&self, level: u32) -> Result<(), Error> {
        self.update_state(|state| state.trace = level).map(drop)
    }

    /// Has the programs keep containers out of these tunnels. The caller raises the epoch, if anything changed, after
    /// everything else that it changes.
    pub fn set_tunnels(&self, _lock: &Lock, tunnels: Tunnels) -> Result<Changed, Error> {
        self.update_state(|state| state.tunnels = tunnels)
    }

    /// Reads what the programs were loaded with.
    pub fn node(&self) -> Result<Node, Error> {
        node(&self.pins)
    }

    /// Reads the node's state.
    pub fn state(&self) -> Result<State, Error> {
        let state: Array<_, State> = open(&self.pins, map::STATE, Map::Array)?;
        state.get(&0, 0).map_err(Error::map(map::STATE))
    }

    /// Changes a part of the state, and leaves the rest as it is. The caller holds the lock.
    pub(crate) fn update_state(&self, change: impl FnOnce(&mut State)) -> Result<Changed, Error> {
        let mut map: Array<_, State> = open(&self.pins, map::STATE, Map::Array)?;
        let before = map.get(&0, 0).map_err(Error::map(map::STATE))?;
        let mut after = before;
        change(&mut after);
        if after == before {
            return Ok(Changed::No);
        }
        map.set(0, after, 0).map_err(Error::map(map::STATE))?;
        Ok(Changed::Yes)
    }

    /// Reads all counters, summed over the CPUs.
    pub fn counters(&self) -> Result<Vec<(Counter, u64)>, Error> {
        let map: PerCpuArray<_, u64> = open(&self.pins, map::COUNTERS, Map::PerCpuArray)?;
        Counter::ALL
            .iter()
            .map(|&counter| {
                let values = map
                    .get(&(counter as u32), 0)
                    .map_err(Error::map(map::COUNTERS))?;
                Ok((counter, values.iter().sum()))
            })
            .collect()
    }

    /// Names the pins that these maps were opened from.
    #[must_use]
    pub fn pins(&self) -> &Pins {
        &self.pins
    }
}

/// Flags of map updates, as the kernel numbers them.
mod aya_flags {
    /// `BPF_NOEXIST`.
    pub(super) const NO_EXIST: u32 = 1;
}

/// Reads what the programs of these pins were loaded with.
pub(crate) fn node(pins: &Pins) -> Result<Node, Error> {
    let constants: Array<_, Node> = open(pins, map::CONSTANTS, Map::Array)?;
    constants.get(&0, 0).map_err(Error::map(map::CONSTANTS))
}

/// Opens a pinned map as the type that it must be: sizes of keys and values are compared with the
/// kernel's.
pub(crate) fn open<T>(pins: &Pins, name: &'static str, kind: fn(MapData) -> Map) -> Result<T, Error>
where
    T: TryFrom<Map, Error = MapError>,
{
    T::try_from(kind(pins.map(name)?)).map_err(Error::map(name))
}

pub(crate) fn found<T>(
    answer: Result<T, MapError>,
    name: &'static str,
) -> Result<Option<T>, Error> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) => Err(Error::map(name)(error)),
    }
}

pub(crate) fn gone(answer: Result<(), MapError>, name: &'static str) -> Result<(), Error> {
    match answer {
        Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error))
            if error.io_error.raw_os_error() == Some(libc::ENOENT) =>
        {
            Ok(())
        }
        Err(error) => Err(Error::map(name)(error)),
    }
}

/// Reads all entries of a map.
pub(crate) fn entries<K: Pod, V: Pod>(
    map: &HashMap<MapData, K, V>,
    name: &'static str,
) -> Result<Vec<(K, V)>, Error> {
    entries_where(map, name, |_, _| true)
}

/// Reads the entries of a map that are chosen.
fn entries_where<K: Pod, V: Pod>(
    map: &HashMap<MapData, K, V>,
    name: &'static str,
    mut chosen: impl FnMut(&K, &V) -> bool,
) -> Result<Vec<(K, V)>, Error> {
    let mut all = Vec::new();
    let note = |key: &K, value: &V| {
        if chosen(key, value) {
            all.push((*key, *value));
        }
    };
    visit(map, note).map_err(|source| Error::List { name, source })?;
    Ok(all)
}

//! The pinned maps that user space reads and writes, each opened when it is first needed.

use std::{net::IpAddr, os::fd::AsFd as _, path::Path, sync::Arc};

use aya::{
    Pod,
    maps::{
        Array, HashMap, IterableMap as _, Map, MapData, MapError, PerCpuArray,
        lpm_trie::{Key as TrieKey, LpmTrie},
        xdp::DevMapHash,
    },
};
use ipnet::IpNet;
use underpass_abi::{
    addr::{Addr, Addr4, Addr6, Family},
    counter::Counter,
    endpoint::{Attachment, Destination, Device, Endpoint, Owner},
    flow::{Flow, Key, state},
    map,
    node::{Node, State},
};

use crate::{Error, Loaded, Pins, bpf, lock::Use, object, upgrade};

/// Bits of a [`Destination`] before its address.
const NETWORK_BITS: u32 = 32;
/// Bits of a mapped address before its IPv4 part.
const MAPPED_BITS: u32 = 96;

/// An entry of a flow map: its key and its value.
pub type FlowEntry<A> = (Key<A>, Flow<A>);

/// How many entries a table of flows has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FlowCount {
    /// Those whose packets go past the stack.
    pub bypass: u64,
    /// The others.
    pub stack: u64,
}

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

    /// Gives an address to a host veth, whoever had it.
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

    /// Lists the destinations of a network that see the container's own address.
    pub fn no_masquerade(&self, network: u32) -> Result<Vec<IpNet>, Error> {
        let trie = self.trie()?;
        let mut nets = Vec::new();
        for key in trie.keys() {
            let key = key.map_err(Error::map(map::NO_MASQUERADE))?;
            let destination = key.data();
            if destination.network == network {
                nets.extend(net(key.prefix_len(), destination.addr));
            }
        }
        Ok(nets)
    }

    /// Adds destinations of a network that see the container's own address.
    pub fn add_no_masquerade(&self, network: u32, nets: &[IpNet]) -> Result<(), Error> {
        if nets.is_empty() {
            return Ok(());
        }
        let mut trie = self.trie()?;
        nets.iter()
            .try_for_each(|net| trie.insert(&key(network, *net), 1, 0))
            .map_err(Error::map(map::NO_MASQUERADE))
    }

    /// Removes all destinations of a network that see the container's own address.
    pub fn clear_no_masquerade(&self, network: u32) -> Result<(), Error> {
        self.remove_no_masquerade(network, &self.no_masquerade(network)?)
    }

    /// Removes some destinations of a network that see the container's own address.
    pub fn remove_no_masquerade(&self, network: u32, nets: &[IpNet]) -> Result<(), Error> {
        let mut trie = self.trie()?;
        nets.iter()
            .try_for_each(|net| gone(trie.remove(&key(network, *net)), map::NO_MASQUERADE))
    }

    /// Makes every flow validate itself again at its next packet. The caller holds the lock.
    pub fn raise_epoch(&self) -> Result<(), Error> {
        self.update_state(|state| state.epoch = state.epoch.checked_add(1).unwrap_or(1))
    }

    /// Sets the highest level of log records, 0 for none. The caller holds the lock.
    pub fn set_trace(&self, level: u32) -> Result<(), Error> {
        self.update_state(|state| state.trace = level)
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
    pub(crate) fn update_state(&self, change: impl FnOnce(&mut State)) -> Result<(), Error> {
        let mut map: Array<_, State> = open(&self.pins, map::STATE, Map::Array)?;
        let mut state = map.get(&0, 0).map_err(Error::map(map::STATE))?;
        change(&mut state);
        map.set(0, state, 0).map_err(Error::map(map::STATE))
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

    /// Lists the IPv4 flows.
    pub fn flows4(&self) -> Result<Vec<FlowEntry<Addr4>>, Error> {
        self.flows(map::FLOWS4)
    }

    /// Lists the IPv6 flows.
    pub fn flows6(&self) -> Result<Vec<FlowEntry<Addr6>>, Error> {
        self.flows(map::FLOWS6)
    }

    fn flows<A: Family>(&self, name: &'static str) -> Result<Vec<FlowEntry<A>>, Error>
    where
        Key<A>: Pod,
        Flow<A>: Pod,
    {
        let map: HashMap<_, Key<A>, Flow<A>> = open(&self.pins, name, Map::HashMap)?;
        let mut all = Vec::new();
        for entry in &map {
            match entry {
                Ok(entry) => all.push(entry),
                // Removed between two requests.
                Err(MapError::KeyNotFound) => {}
                Err(error) => return Err(Error::map(name)(error)),
            }
        }
        Ok(all)
    }

    /// Counts the IPv4 flows.
    pub fn count_flows4(&self) -> Result<FlowCount, Error> {
        self.count_flows::<Addr4>(map::FLOWS4)
    }

    /// Counts the IPv6 flows.
    pub fn count_flows6(&self) -> Result<FlowCount, Error> {
        self.count_flows::<Addr6>(map::FLOWS6)
    }

    fn count_flows<A: Family>(&self, name: &'static str) -> Result<FlowCount, Error>
    where
        Key<A>: Pod,
        Flow<A>: Pod,
    {
        let map: HashMap<_, Key<A>, Flow<A>> = open(&self.pins, name, Map::HashMap)?;
        let mut count = FlowCount::default();
        bpf::visit(map.map().fd().as_fd(), |_: Key<A>, flow: Flow<A>| {
            if flow.state & state::BYPASS == 0 {
                count.stack += 1;
            } else {
                count.bypass += 1;
            }
        })
        .map_err(|source| Error::List { name, source })?;
        Ok(count)
    }

    /// Names the pins that these maps were opened from.
    #[must_use]
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    fn trie(&self) -> Result<LpmTrie<MapData, Destination, u32>, Error> {
        open(&self.pins, map::NO_MASQUERADE, Map::LpmTrie)
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
    bpf::entries(map.map().fd().as_fd()).map_err(|source| Error::List { name, source })
}

fn key(network: u32, net: IpNet) -> TrieKey<Destination> {
    let family_bits = match net {
        IpNet::V4(_) => MAPPED_BITS,
        IpNet::V6(_) => 0,
    };
    let bytes = match net.network() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    TrieKey::new(
        NETWORK_BITS + family_bits + u32::from(net.prefix_len()),
        Destination {
            network,
            addr: bytes,
        },
    )
}

fn net(prefix_len: u32, bytes: [u8; 16]) -> Option<IpNet> {
    let addr = IpAddr::from(bytes);
    let canonical = addr.to_canonical();
    let bits = prefix_len.checked_sub(NETWORK_BITS)?;
    let (addr, bits) = match bits.checked_sub(MAPPED_BITS) {
        Some(bits) if canonical.is_ipv4() => (canonical, bits),
        _ => (addr, bits),
    };
    IpNet::new(addr, u8::try_from(bits).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_survives_the_round_trip() {
        for text in [
            "10.0.0.0/8",
            "0.0.0.0/0",
            "192.0.2.1/32",
            "::/0",
            "fd00::/64",
            "2001:db8::1/128",
        ] {
            let expected: IpNet = text.parse().expect("a prefix");
            let key = key(7, expected);
            let destination = key.data();
            assert_eq!(destination.network, 7);
            assert_eq!(
                net(key.prefix_len(), destination.addr),
                Some(expected),
                "{text}"
            );
        }
    }

    #[test]
    fn a_destination_has_the_length_that_the_programs_look_up() {
        let v4: IpNet = "10.0.0.0/8".parse().expect("a prefix");
        let v6: IpNet = "fd00::/8".parse().expect("a prefix");
        assert_eq!(key(1, v4).prefix_len(), 32 + 96 + 8);
        assert_eq!(key(1, v6).prefix_len(), 32 + 8);
    }
}

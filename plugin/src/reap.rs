//! Attachments that a lost DEL has left: their devices went with the container, and what the maps and the
//! folders of leases have of them did not.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use underpass_abi::endpoint::{Attachment as Record, Owner, role};
use underpass_cni::NetConf;
use underpass_dataplane::Maps;
use underpass_ipam::Freed;
use underpass_netlink::{Netlink, link::By};

use crate::{
    error::Error,
    identity::{Identity, network_id},
    step::{end_without, endpoint, forget, lease, port},
};

/// What was taken away.
#[derive(Default)]
pub(crate) struct Reaped {
    /// Attachments, as the maps knew them.
    pub(crate) attachments: Vec<Record>,
    /// Attachments that the maps still know, and whose host ports are taken away.
    pub(crate) ports: Vec<Record>,
    /// Their leases.
    pub(crate) leases: Vec<Freed>,
    /// What could not be taken away, and why.
    pub(crate) errors: Vec<Error>,
}

/// A network, as far as it matters here.
struct Network<'a> {
    conf: &'a NetConf,
    id: u32,
    /// Whether interfaces of it are made by this entry of its list, not by another plugin's.
    makes_interfaces: bool,
    /// Whether this entry has addresses given to them.
    gives_addresses: bool,
    /// Its dataDir, if this process gives its addresses.
    data_dir: Option<PathBuf>,
    /// The networks whose leases are there.
    leases: BTreeSet<u32>,
}

impl<'a> Network<'a> {
    fn of(conf: &'a NetConf) -> Result<Self, Error> {
        let data_dir = lease::data_dir(conf)?;
        let names = data_dir.as_deref().map(lease::networks).transpose()?;
        let names = names.unwrap_or_default();
        Ok(Self {
            conf,
            data_dir,
            id: network_id(&conf.name),
            makes_interfaces: conf.prev_result()?.is_none(),
            gives_addresses: conf.ipam_type()?.is_some(),
            leases: names.iter().map(|name| network_id(name)).collect(),
        })
    }

    /// Whether the dead may be forgotten: nobody finds their leases after that. GC tells no entry what others of its list have made, so what
    /// has addresses is left to the one that had them given.
    fn may_reap(&self, record: &Record) -> bool {
        let is_own = || {
            self.makes_interfaces
                && (self.gives_addresses || endpoint::addresses(record).next().is_none())
        };
        record.role == role::CHAINED
            || self.leases.contains(&record.network)
            || record.network == self.id && is_own()
    }
}

/// Lists the attachments whose devices are none of `devices`.
pub(crate) fn dead(maps: &Maps, devices: &BTreeSet<u32>) -> Result<Vec<(Owner, Record)>, Error> {
    Ok(maps.attachments_where(|record| !devices.contains(&record.ifindex))?)
}

/// Takes away what is left of attachments whose devices are none of `devices`: of the networks of `confs`, and of all whose
/// leases are where one of these has its own, so that the addresses of the dead can be freed. The maps are the only ones who
/// know that they are dead; where nothing is known of their addresses, they stay there for another call. Host ports have nothing to
/// do with addresses: those of all the dead go. Goes on past errors.
pub(crate) fn reap(
    node: &Netlink,
    maps: &mut Maps,
    devices: &BTreeSet<u32>,
    confs: &[&NetConf],
) -> Result<Reaped, Error> {
    let mut reaped = Reaped::default();
    let mut dead = dead(maps, devices)?;
    if dead.is_empty() {
        return Ok(reaped);
    }
    let mut networks = Vec::new();
    for conf in confs {
        // What can't be asked for its leases keeps its own dead, and nobody else's.
        match Network::of(conf) {
            Ok(network) => networks.push(network),
            Err(error) => reaped.errors.push(error),
        }
    }
    let may_reap = |record: &Record| networks.iter().any(|network| network.may_reap(record));
    dead.retain(|(_, record)| {
        (record.port_count > 0 || may_reap(record))
            && is_gone(node, record).unwrap_or_else(|error| {
                reaped.errors.push(error);
                false
            })
    });
    let losers = port::give_up_all(node, maps, &dead).unwrap_or_else(|error| {
        reaped.errors.push(error);
        BTreeSet::new()
    });
    let mut ours: BTreeMap<u32, BTreeMap<Owner, Record>> = BTreeMap::new();
    for (owner, record) in dead {
        if may_reap(&record) {
            let of_network = ours.entry(record.network).or_default();
            of_network.insert(owner, record);
        } else if losers.contains(&owner) {
            reaped.ports.push(record);
        }
    }
    for (id, dead) in ours {
        if let Err(error) = of_network(node, maps, id, &dead, &networks, &mut reaped) {
            reaped.errors.push(error);
        }
    }
    Ok(reaped)
}

/// The list of devices may be older than the attachment: its device was there before it.
fn is_gone(node: &Netlink, record: &Record) -> Result<bool, Error> {
    Ok(node.link(By::Index(record.ifindex))?.is_none())
}

/// Takes away the dead of one network, whose folder of leases is read once for all of them. The leases come first: while the maps know
/// an attachment, nobody can attach the container anew, so a lease is that of the dead.
fn of_network(
    node: &Netlink,
    maps: &mut Maps,
    id: u32,
    dead: &BTreeMap<Owner, Record>,
    networks: &[Network<'_>],
    reaped: &mut Reaped,
) -> Result<(), Error> {
    let is_dead = |network: &str, container: &str, ifname: &str| {
        let identity = Identity {
            network: network.to_owned(),
            container: container.to_owned(),
            ifname: ifname.to_owned(),
        };
        let owner = identity.owner();
        let record = dead.get(&owner);
        record.is_some_and(
            |record| matches!(maps.attachment(owner), Ok(Some(known)) if known == *record),
        )
    };
    let is_of = |network: &str| network_id(network) == id;
    let mut folders = BTreeSet::new();
    for network in networks {
        if network.leases.contains(&id) && folders.insert(&network.data_dir) {
            let freed = lease::free_dead(network.conf, is_of, is_dead)?;
            reaped.leases.extend(freed);
        }
    }
    // Before they are forgotten, by whom alone a later call would know the network; and after that, since others may have left it meanwhile.
    end_without(maps, id, |owner, record| dead.get(owner) == Some(record))?;
    for (owner, record) in dead {
        match forget(node, maps, *owner, record) {
            Ok(()) => reaped.attachments.push(*record),
            Err(error) => reaped.errors.push(error),
        }
    }
    end_without(maps, id, |_, _| false)
}

//! `underpass uninstall`: the way back of `underpass install`, which takes what is ours and nothing else.
//!
//! What would be refused is asked before anything is changed. Then the conflist goes first, so that the runtime sends no new
//! container, and the executables last, as DELs need them. Until programs and leases are gone the conflist is only set aside: it is put back
//! if that can't be done, and who was killed has not forgotten which network it was.

use std::{fs, io, path::Path};

use clap::Args;
use serde_json::{Map, Value};
use underpass_cni::{
    Error as CniError, NetConf,
    net_dir::{self, NetworkFile},
};
use underpass_dataplane::{Maps, Pins};
use underpass_ipam::{data_dir, store::Store};
use underpass_netlink::Netlink;

use super::{
    Failure,
    doctor::networks::{CLUSTER_NETWORK, DELEGATES},
    folders::Folders,
    unload,
};
use crate::{
    conf::Conf,
    install::{
        ALLOCATOR, PLUGIN,
        conflist::{self, Found},
        folder::{Change, Folder},
        turn::Turn,
    },
    left_behind::{beside, left_behind},
    selftest,
    step::lease::is_built_in,
};

pub(super) mod aside;

/// The folder beside those of the networks that has the index of each.
const INDEX: &str = ".underpass";

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    folders: Folders,
    /// Even though containers are attached, others have entries in the conflist, or addresses are leased: all of that is lost
    #[arg(long)]
    force: bool,
}

pub(super) fn run(root: &Path, options: &Options, out: &mut impl io::Write) -> Result<(), Failure> {
    let Options { folders, force } = options;
    let (bin_dir, net_dir) = folders.apart()?;
    let turn = Turn::wait()?;
    let bin = Folder::open_existing(bin_dir, &turn)?;
    let net = Folder::open_existing(net_dir, &turn)?;
    let found = match &net {
        Some(net) => aside::find(net, out)?,
        None => Found::Nothing,
    };
    if let Some(file) = found.network()
        && let Err(error) = selftest::sweep(file, &super::selftest::executable()?, bin_dir)
    {
        tracing::warn!("what a self-test may have left can't be taken away: {error}");
    }
    let allowed = if *force {
        Ok(())
    } else {
        refuse(root, bin.as_ref(), net_dir, &found)
    };
    let stopped = allowed.and_then(|()| stop(root, net.as_ref(), *force, out));
    if let (Err(_), Some(net)) = (&stopped, &net) {
        aside::put_back(net, out)?;
    }
    stopped?;
    leases(&found, *force, out)?;
    if let Some(net) = &net {
        let change = net.remove(conflist::ASIDE)?;
        removed(out, change, &net.path(conflist::FILE))?;
        let others = found.others();
        if !others.is_empty() {
            writeln!(out, "with what others had added: {}", others.join(", "))?;
        }
    }
    if let Some(bin) = &bin {
        for name in bin.links_to(PLUGIN)? {
            removed(out, bin.remove(&name)?, &bin.path(&name))?;
        }
        for name in [ALLOCATOR, PLUGIN] {
            removed(out, bin.remove(name)?, &bin.path(name))?;
        }
    }
    Ok(())
}

/// Asks all that would stop half-way, or leave a container without a plugin for its DEL.
fn refuse(root: &Path, bin: Option<&Folder>, net_dir: &Path, found: &Found) -> Result<(), Failure> {
    let path = net_dir.join(conflist::FILE);
    let others = found.others();
    if !others.is_empty() {
        return Err(Failure::OthersEntries {
            path,
            others: others.join(", "),
        });
    }
    if matches!(found, Found::Single(_)) {
        return Err(Failure::OtherShape(path));
    }
    for conf in confs(found) {
        let pinned = Conf::bpf_root(&conf)?;
        if pinned != root {
            return Err(Failure::OtherPins { path, pinned });
        }
    }
    unused(root)?;
    let links = bin.map(|bin| bin.links_to(PLUGIN)).transpose()?;
    needed(net_dir, &links.unwrap_or_default(), found)
}

/// Refuses where containers are attached.
fn unused(root: &Path) -> Result<(), Failure> {
    let pins = Pins::at(root);
    let mut attached = 0;
    for layout in pins.layouts()? {
        attached += layout.attachments()?;
    }
    // Pins can be wiped while containers live.
    let maps = Maps::open_existing(&pins).unwrap_or_default();
    attached += left_behind(root, maps.as_ref(), |_| true)?.iter().count();
    // Those of another bpfRoot need the executables as well.
    let devices = Netlink::open()?.indices()?;
    attached += beside(root).intersection(&devices).count();
    match attached {
        0 => Ok(()),
        attached => Err(Failure::InUse(attached)),
    }
}

/// Sets the conflist aside and removes programs and maps. A runtime that had read the conflist may have an ADD under way: it is awaited,
/// and what it has attached stays.
fn stop(
    root: &Path,
    net: Option<&Folder>,
    force: bool,
    out: &mut impl io::Write,
) -> Result<(), Failure> {
    if let Some(net) = net {
        net.rename(conflist::FILE, conflist::ASIDE)?;
        if net.has(conflist::ASIDE)? {
            drop(unload::await_calls(root, force, out)?);
        }
    }
    if force {
        return unload::run(root, force, out);
    }
    unused(root)?;
    unload::run(root, force, out)?;
    // One that had just begun loads the programs again.
    unused(root)
}

/// Looks for other networks that need what would be removed: the plugin, the allocator, one of the `links`, or our network. One that can't
/// be read may be one.
fn needed(net_dir: &Path, links: &[String], found: &Found) -> Result<(), Failure> {
    let files = net_dir::files(net_dir)
        .map_err(|error| CniError::io(format!("cannot list {}", net_dir.display()), &error))?;
    for path in files {
        if path.ends_with(conflist::FILE) {
            continue;
        }
        let file = NetworkFile::open_any(path).map_err(Failure::Unreadable)?;
        if let Some(name) = need(&file, links, found) {
            return Err(Failure::StillNamed {
                path: file.path,
                name,
            });
        }
    }
    Ok(())
}

/// Finds what a network needs of what would be removed, in its own words.
fn need(file: &NetworkFile, links: &[String], found: &Found) -> Option<String> {
    let is_plugin =
        |kind: &&str| [PLUGIN, ALLOCATOR].contains(kind) || links.iter().any(|link| link == kind);
    let is_there = !matches!(found, Found::Nothing);
    let network = found.network().map(NetworkFile::name);
    // A path may be one inside of Multus' own container.
    let is_network = |named: &&str| {
        is_there && (Path::new(named).ends_with(conflist::FILE) || network == Some(*named))
    };
    let plugins = file.plugins();
    let kinds = plugins.iter().copied().flat_map(kinds);
    let plugin = kinds.filter_map(Value::as_str).find(is_plugin);
    let mut named = plugins.iter().copied().flat_map(named);
    plugin.or_else(|| named.find(is_network)).map(str::to_owned)
}

/// Lists the networks that an entry of Multus names, which are in files or objects of their own.
fn named(plugin: &Map<String, Value>) -> Vec<&str> {
    let further = plugin.get("defaultNetworks").and_then(Value::as_array);
    let first = plugin.get(CLUSTER_NETWORK).into_iter();
    let named = first.chain(further.into_iter().flatten());
    named
        .filter_map(Value::as_str)
        .filter(|named| !named.is_empty())
        .collect()
}

/// Lists the plugins that an entry has called: its own, its IPAM plugin, and whom it hands containers over to (`delegate` of
/// flannel, `delegates` of Multus, which may be lists of plugins themselves).
fn kinds(plugin: &Map<String, Value>) -> Vec<&Value> {
    let ipam = plugin.get("ipam").and_then(|ipam| ipam.get("type"));
    let several = [DELEGATES, "plugins"]
        .into_iter()
        .filter_map(|key| plugin.get(key)?.as_array())
        .flatten();
    let below = plugin.get("delegate").into_iter().chain(several);
    let below = below.filter_map(Value::as_object).flat_map(kinds);
    let own = [plugin.get("type"), ipam].into_iter().flatten();
    own.chain(below).collect()
}

/// Removes the folders of the network's leases, unless an address is leased: somebody may still need it.
fn leases(found: &Found, force: bool, out: &mut impl io::Write) -> Result<(), Failure> {
    let first = confs(found).into_iter().next();
    // What can't be understood has no leases that could be named.
    let Some(conf) = first.filter(|conf| is_built_in(conf).unwrap_or(false)) else {
        return Ok(());
    };
    let folder = data_dir(&conf)?;
    let store = Store::new(&folder, &conf.name);
    let Some(locked) = store.lock_existing().map_err(CniError::from)? else {
        return Ok(());
    };
    let leased = locked.leased().map_err(CniError::from)?.len();
    if leased > 0 && !force {
        writeln!(
            out,
            "left        {}: {leased} addresses are leased: remove it when nobody needs them any more",
            store.dir().display()
        )?;
        return Ok(());
    }
    let index = folder.join(INDEX);
    for folder in [index.join(&conf.name), store.dir().to_owned()] {
        match fs::remove_dir_all(&folder) {
            Ok(()) => removed(out, Change::Made, &folder)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let what = format!("cannot remove {}", folder.display());
                return Err(CniError::io(what, &error).into());
            }
        }
    }
    // Other networks may have theirs there.
    let _ = fs::remove_dir(index);
    Ok(())
}

/// Lists our entries, if they can be understood.
fn confs(found: &Found) -> Vec<NetConf> {
    let file = found.network();
    file.and_then(|file| file.confs(&[PLUGIN]).ok())
        .unwrap_or_default()
}

fn removed(out: &mut impl io::Write, change: Change, path: &Path) -> io::Result<()> {
    match change {
        Change::Made => writeln!(out, "removed     {}", path.display()),
        Change::None => Ok(()),
    }
}

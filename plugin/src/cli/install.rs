//! `underpass install`: what makes a node of a machine, in the order in which nothing can go wrong for long.
//!
//! The executables come first, then the programs, then a test, and the conflist last: a runtime that sees a conflist gives it
//! containers at once. Each step changes a file as a whole, and nothing where all is as it should be, so whoever is killed
//! in between repeats the command.

use std::{fs, io, num::NonZeroU16, path::Path};

use clap::Args;
use ipnet::IpNet;
use serde_json::{Map, Value};
use underpass_cni::{
    Error as CniError, Version, address,
    net_dir::{self, NetworkFile},
};
use underpass_dataplane::{Error as Dataplane, Maps, Pins, object};
use underpass_ipam::data_dir;
use underpass_netlink::Netlink;

use able::{Able, able};

use super::{
    Failure,
    doctor::networks::{in_place_of_ours, is_multus, is_ours},
    folders::Folders,
    load, selftest,
    uninstall::aside,
    upgrade,
};
use crate::{
    conf::{Conf, MTU_MAX, MTU_MIN},
    error::Error,
    identity::network_id,
    install::{
        ALLOCATOR, PLUGIN,
        conflist::{self, Found},
        folder::{Change, Folder},
        network::{Network, Wish},
        turn::Turn,
    },
    name::Name,
    no_masquerade,
    rehearsal::{covered, rehearse},
    uplink::Uplinks,
};

mod able;

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    folders: Folders,
    /// The network's name
    #[arg(long, default_value = "pods", requires = "ranges")]
    name: String,
    /// Addresses for containers, such as the node's podCIDRs, in their order; they get one of each family. Without any no conflist
    /// is written
    #[arg(long = "range", value_name = "CIDR", value_parser = prefix)]
    ranges: Vec<IpNet>,
    /// Destinations that see the container's own address, such as all nodes' podCIDRs; by default the ranges
    #[arg(long = "cluster-cidr", value_name = "CIDR", value_parser = prefix, requires = "ranges")]
    cluster_cidrs: Vec<IpNet>,
    /// The containers' MTU in bytes; by default the smallest of the uplinks with a default route
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(i64::from(MTU_MIN)..=i64::from(MTU_MAX)), requires = "ranges")]
    mtu: Option<u32>,
    /// The UDP port of the tunnels between the nodes, to which containers may not send though there is no device for it yet
    #[arg(long, value_name = "PORT", requires = "ranges")]
    tunnel_port: Option<NonZeroU16>,
    /// Further keys of our entry in the conflist, as an object of JSON such as '{"bypass": "off"}'
    #[arg(long, value_name = "JSON", value_parser = keys, requires = "ranges")]
    config: Option<Keys>,
    /// The version that the conflist declares, 1.0.0 or 1.1.0. containerd 1.x fails every ADD of 1.1.0; newer runtimes ask
    /// STATUS with it, and can call GC
    #[arg(long, value_name = "VERSION", default_value = "1.0.0", value_parser = version, requires = "ranges")]
    cni_version: Version,
    /// Other plugins that this executable is, to be linked where there is no file of the name
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "loopback,portmap,bandwidth", value_parser = linked)]
    names: Vec<String>,
    /// Have this build's programs take over first, where those of another build are loaded with maps that it does not know
    #[arg(long)]
    upgrade: bool,
    /// Write the conflist without trying the network with two throwaway pods
    #[arg(long, requires = "ranges")]
    no_self_test: bool,
}

/// Keys of our entry in the conflist.
#[derive(Clone, Default)]
struct Keys(Map<String, Value>);

pub(super) fn run(root: &Path, options: Options, out: &mut impl io::Write) -> Result<(), Failure> {
    let network = if options.ranges.is_empty() {
        None
    } else {
        Some(Network::new(Wish {
            name: options.name,
            version: options.cni_version,
            ranges: options.ranges,
            cluster: options.cluster_cidrs,
            mtu: options.mtu,
            tunnel_port: options.tunnel_port,
            bpf_root: root.to_owned(),
            keys: options.config.unwrap_or_default().0,
        })?)
    };
    let (bin_dir, net_dir) = options.folders.apart()?;
    let able = able(root, options.upgrade)?;
    if let Some(network) = &network {
        fits(root, network, able)?;
    }
    let executable = selftest::executable()?;
    let turn = Turn::wait()?;
    let bin = Folder::open(bin_dir, &turn)?;
    if able == Able::AfterUpgrade {
        // From here on the executable that is there serves nobody, so ours has to follow at once.
        bin.try_out(Path::new("/proc/self/exe"))?;
        upgrade::run(root, out)?;
    }
    executables(&executable, &bin, &options.names, out)?;
    programs(root, out)?;
    let Some(network) = network else {
        let net = Folder::open_existing(net_dir, &turn)?;
        let put_back = net.map(|net| aside::put_back(&net, out)).transpose()?;
        if put_back != Some(Change::Made) {
            writeln!(
                out,
                "no conflist is written, as no --range says where containers' addresses come from"
            )?;
        }
        return Ok(());
    };
    let net = Folder::open(net_dir, &turn)?;
    // What the runtime had it keeps, if the new one is refused.
    aside::put_back(&net, out)?;
    let (_, file) = compose(root, &net, &network)?;
    if !options.no_self_test {
        test(&file, &bin.path(PLUGIN), bin_dir, out)?;
    }
    // Others may have written into it during the test.
    let (found, file) = compose(root, &net, &network)?;
    let maps = Maps::open_existing(&Pins::at(root))?;
    write(&net, &found, &file, out)?;
    if let Some(maps) = maps {
        update(&maps, &file, out)?;
    }
    hidden_by(net_dir, out)
}

/// Refuses a network to which every ADD would fail on this node, or that would give containers what an uplink's link has.
fn fits(root: &Path, network: &Network, able: Able) -> Result<(), Failure> {
    let conf = network.conf()?;
    let decoded = Conf::of_network(&conf)?;
    rehearse(&conf, &decoded, &[])?;
    let maps = match able {
        Able::Now => Maps::open_existing(&Pins::at(root))?,
        Able::AfterUpgrade => None,
    };
    let node = Netlink::open()?;
    let uplinks = Uplinks::look(&node, maps.as_ref(), decoded.uplinks.as_deref())?;
    let overlaps = covered(&conf, &uplinks, &node)?;
    match overlaps.first() {
        None => Ok(()),
        Some(overlap) => Err(CniError::config(format!(
            "the ranges cover {overlap}: give containers a range that is on no link of the node; nothing was changed"
        ))
        .into()),
    }
}

/// Reads the conflist, and makes the one that has to be there. Refuses what would cost others theirs.
fn compose(root: &Path, net: &Folder, network: &Network) -> Result<(Found, NetworkFile), Failure> {
    let path = net.path(conflist::FILE);
    let found = Found::read(path.clone(), net.read(conflist::FILE)?.as_deref());
    if matches!(found, Found::Single(_)) {
        return Err(Failure::OtherShape(path));
    }
    let file = NetworkFile {
        document: found.with(network),
        path,
    };
    if let Some(old) = found.network() {
        keeps_leases(root, old, &file)?;
    }
    Ok((found, file))
}

/// Refuses to forget where the addresses of attached containers are leased.
fn keeps_leases(root: &Path, old: &NetworkFile, new: &NetworkFile) -> Result<(), Failure> {
    let ours = |file: &NetworkFile| file.confs(&[PLUGIN]).unwrap_or_default().into_iter().next();
    let (Some(before), Some(after)) = (ours(old), ours(new)) else {
        return Ok(());
    };
    let folder = |conf| data_dir(conf).ok();
    let advice = if before.name != after.name {
        format!("say --name {}, or drain the node first", before.name)
    } else if folder(&before) != folder(&after) {
        "it has an \"ipam.dataDir\" that would change: drain the node first".to_owned()
    } else {
        return Ok(());
    };
    let Some(maps) = Maps::open_existing(&Pins::at(root))? else {
        return Ok(());
    };
    let network = network_id(&before.name);
    let attached = maps.attachments()?.into_iter();
    match attached
        .filter(|(_, record)| record.network == network)
        .count()
    {
        0 => Ok(()),
        _ => Err(Failure::Renamed {
            path: old.path.clone(),
            name: before.name,
            advice,
        }),
    }
}

/// Puts the running executable, and the allocator that stands beside it, into the folder of plugins.
fn executables(
    executable: &Path,
    bin: &Folder,
    names: &[String],
    out: &mut impl io::Write,
) -> Result<(), Failure> {
    // This is the file that runs, even if another one has its name by now.
    let own = read(Path::new("/proc/self/exe"))?;
    say(out, bin.put_executable(PLUGIN, &own)?, &bin.path(PLUGIN))?;
    let allocator = executable.with_file_name(ALLOCATOR);
    match fs::read(&allocator) {
        Ok(content) => say(
            out,
            bin.put_executable(ALLOCATOR, &content)?,
            &bin.path(ALLOCATOR),
        )?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => writeln!(
            out,
            "left out    {ALLOCATOR}: it is not beside {}; only other interface plugins need it",
            executable.display()
        )?,
        Err(error) => return Err(unreadable(&allocator, &error).into()),
    }
    for name in names.iter().filter(|name| !name.is_empty()) {
        match bin.link(name, PLUGIN)? {
            Change::Made => writeln!(out, "linked      {} to {PLUGIN}", bin.path(name).display())?,
            Change::None => writeln!(out, "unchanged   {}", bin.path(name).display())?,
        }
    }
    Ok(())
}

/// Loads the programs. Those of another build go on: only an upgrade puts this one's into their place.
fn programs(root: &Path, out: &mut impl io::Write) -> Result<(), Failure> {
    let is_complete = match load::run(root, None, out) {
        Err(Failure::Plugin(Error::Dataplane(Dataplane::OtherBuild { .. }))) => false,
        outcome => outcome.map(|()| true)?,
    };
    let maps = Maps::open_existing(&Pins::at(root))?;
    if let Some(maps) = maps.as_ref().filter(|_| !is_complete) {
        load::say_left_behind(root, maps, out)?;
    }
    let loaded_by = maps.as_ref().map(Maps::node).transpose()?;
    if loaded_by.is_some_and(|node| node.build != object::build()) {
        writeln!(
            out,
            "another build has loaded the programs, which go on: `underpass upgrade` has this one's take over"
        )?;
    }
    Ok(())
}

/// Tries the network. Where no address is free containers have them all, so the network works.
fn test(
    file: &NetworkFile,
    plugin: &Path,
    bin_dir: &Path,
    out: &mut impl io::Write,
) -> Result<(), Failure> {
    match selftest::test(file, plugin, bin_dir, out) {
        Err(Failure::SelfTest(failure)) if failure.is_for_want_of_addresses() => {
            writeln!(out, "the self-test is left out: {failure}")?;
            Ok(())
        }
        outcome => outcome,
    }
}

fn write(
    net: &Folder,
    found: &Found,
    file: &NetworkFile,
    out: &mut impl io::Write,
) -> Result<(), Failure> {
    if found.is(&file.document) {
        return Ok(say(out, Change::None, &file.path)?);
    }
    if let Found::Unreadable(why) = found {
        writeln!(
            out,
            "{} is replaced, because {why}: a power failure leaves such files",
            file.path.display()
        )?;
    }
    let text = conflist::text(&file.document);
    net.put(conflist::FILE, &text, conflist::MODE)?;
    say(out, Change::Made, &file.path)?;
    let others = found.others();
    if !others.is_empty() {
        writeln!(out, "kept what others added: {}", others.join(", "))?;
    }
    Ok(())
}

/// Has the containers that are there masquerade to what the network says now.
fn update(maps: &Maps, file: &NetworkFile, out: &mut impl io::Write) -> Result<(), Failure> {
    let mut changes = Vec::new();
    for conf in file.confs(&[PLUGIN])? {
        no_masquerade::refresh(maps, &conf.name, &Conf::of_network(&conf)?, &mut changes)?;
    }
    for change in changes {
        writeln!(out, "{change}")?;
    }
    Ok(())
}

/// Says whether containers get something else than this network. Where none gets to it the line begins with words by which the agent of a cluster
/// knows it.
fn hidden_by(net_dir: &Path, out: &mut impl io::Write) -> Result<(), Failure> {
    let networks = net_dir::read(net_dir)
        .map_err(|error| CniError::io(format!("cannot list {}", net_dir.display()), &error))?;
    let files: Vec<_> = networks.iter().map(Result::as_ref).collect();
    if let Some(other) = in_place_of_ours(&files, is_ours) {
        let (by, what, fix) = (other.by(), other.what("this one"), other.fix());
        writeln!(out, "hidden by {by}: {what}; {fix}")?;
        return Ok(());
    }
    let first = networks.iter().flatten().next();
    let is_another = |first: &&NetworkFile| {
        is_ours(first) && !is_multus(first) && !first.path.ends_with(conflist::FILE)
    };
    if let Some(another) = first.filter(is_another) {
        writeln!(
            out,
            "note: runtimes take the first network of the folder, which is {}: remove it if this one is meant",
            another.path.display()
        )?;
    }
    Ok(())
}

fn say(out: &mut impl io::Write, change: Change, path: &Path) -> io::Result<()> {
    let word = match change {
        Change::Made => "installed",
        Change::None => "unchanged",
    };
    writeln!(out, "{word}   {}", path.display())
}

fn read(path: &Path) -> Result<Vec<u8>, CniError> {
    fs::read(path).map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &Path, error: &io::Error) -> CniError {
    CniError::io(format!("cannot read {}", path.display()), error)
}

/// A prefix without host bits.
fn prefix(text: &str) -> Result<IpNet, String> {
    let prefix = address::parse_cidr(text)
        .ok_or_else(|| "it must be a prefix such as 10.22.0.0/24 or fd00:22::/64".to_owned())?;
    if prefix.trunc() == prefix {
        Ok(prefix)
    } else {
        Err(format!("it has host bits: write {}", prefix.trunc()))
    }
}

fn keys(text: &str) -> Result<Keys, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(keys)) => Ok(Keys(keys)),
        Ok(_) => Err("it must be an object, such as {\"bypass\": \"off\"}".to_owned()),
        Err(error) => Err(format!("it is no JSON: {error}")),
    }
}

fn version(text: &str) -> Result<Version, String> {
    [Version::V1_0_0, Version::V1_1_0]
        .into_iter()
        .find(|version| version.as_str() == text)
        .ok_or_else(|| "it must be 1.0.0 or 1.1.0".to_owned())
}

/// The name of a plugin that the executable is by a link.
fn linked(text: &str) -> Result<String, String> {
    match Name::of(text) {
        _ if text.is_empty() => Ok(String::new()),
        Ok(Name::Underpass) => Err("it is a file of its own".to_owned()),
        Ok(_) if text.starts_with(ALLOCATOR) => Err("it is a file of its own".to_owned()),
        Ok(_) => Ok(text.to_owned()),
        Err(_) => Err("it is none of loopback, portmap, bandwidth, ptp, host-local".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_has_no_host_bits() {
        for good in ["10.22.0.0/24", "fd00:22::/64", "0.0.0.0/0"] {
            assert!(prefix(good).is_ok(), "{good}");
        }
        assert!(
            prefix("10.22.0.7/24")
                .expect_err("host bits")
                .contains("10.22.0.0/24")
        );
        for bad in ["10.22.0.0", "10.22.0.0/33", "pods", ""] {
            assert!(prefix(bad).expect_err(bad).contains("prefix"), "{bad}");
        }
    }

    #[test]
    fn only_other_plugins_are_links() {
        for good in ["loopback", "portmap", "bandwidth", "ptp", "host-local"] {
            assert_eq!(linked(good).as_deref(), Ok(good));
        }
        for bad in [
            "underpass",
            "underpass-0.2",
            "underpass-ipam",
            "underpass-ipam/../ptp",
            "bridge",
            "../portmap",
        ] {
            assert!(linked(bad).is_err(), "{bad}");
        }
    }
}

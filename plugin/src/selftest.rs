//! The self-test of a network: two throwaway pods, attached as a runtime attaches them, talk to each other.
//!
//! It decides whether a conflist may be given to the runtime: ADD, traffic in each family, CHECK, DEL, and nothing is left. Only
//! our own entry of the chain is called, as entries of others may need what only a runtime has.
//!
//! The pods are network namespaces without a name. When this process is killed they end, and their devices with them. What
//! else it leaves (leases, entries of maps) the next self-test takes away, as its pods have the same ids.

use std::{
    fs::{self, File},
    io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use serde_json::{Map, Value};
use underpass_cni::{Code, Error as CniError, NetConf, Verb, Version, net_dir::NetworkFile};
use underpass_dataplane::lock::{self, file_of};
use underpass_ipam::{Owner, data_dir, store::Store};
use underpass_netlink::{Netlink, link::By};

use crate::{
    conf::Conf, error::Error, identity::Identity, install::PLUGIN, step::lease::is_built_in,
};

mod call;
mod connection;
mod pod;

use call::Plugin;
use pod::{IFNAME, Pod};

/// Code for pods that are attached and can't talk; the contract leaves 100 and up to plugins.
const CODE_BROKEN: u32 = 100;
/// The ids of the pods.
const PODS: [&str; 2] = ["underpass-selftest-a", "underpass-selftest-b"];

/// Why a self-test ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The network does not work.
    #[error(transparent)]
    Plugin(#[from] Error),
    /// What works could not be said.
    #[error("cannot write the output: {0}")]
    Output(#[from] io::Error),
}

impl From<CniError> for Failure {
    fn from(error: CniError) -> Self {
        Self::Plugin(error.into())
    }
}

impl From<underpass_netlink::Error> for Failure {
    fn from(error: underpass_netlink::Error) -> Self {
        Self::Plugin(error.into())
    }
}

impl Failure {
    /// Tells whether it failed for want of a free address: on a node that is full of containers that says nothing
    /// about the network.
    pub(crate) fn is_for_want_of_addresses(&self) -> bool {
        matches!(self, Self::Plugin(Error::Contract(error)) if error.code == Code::TryAgainLater)
    }
}

/// Tests the network of a conflist by calling `executable`, and says what works. IPAM plugins of others are looked for in
/// `bin_dir`.
pub(crate) fn run(
    file: &NetworkFile,
    executable: &Path,
    bin_dir: &Path,
    out: &mut impl io::Write,
) -> Result<(), Failure> {
    let plugin = Plugin {
        executable: executable.to_owned(),
        bin_dir: bin_dir.to_owned(),
        conf: entry(file)?,
    };
    let _alone = hold(&Conf::bpf_root(&plugin.conf)?)?;
    let mut pods = [Pod::new(PODS[0])?, Pod::new(PODS[1])?];
    forget(&plugin, &pods)?;
    let outcome = attach_and_talk(&plugin, &mut pods, out);
    let detached = pods.iter().map(|pod| plugin.call(Verb::Del, pod).map(drop));
    let detached: Vec<Result<(), CniError>> = detached.collect();
    outcome?;
    detached.into_iter().collect::<Result<(), _>>()?;
    writeln!(out, "ok  DEL of both")?;
    nothing_is_left(&plugin.conf, &pods)?;
    writeln!(out, "ok  no device and no lease is left")?;
    Ok(())
}

/// Takes away what a self-test that was killed has left of the network.
pub(crate) fn sweep(file: &NetworkFile, executable: &Path, bin_dir: &Path) -> Result<(), Failure> {
    let plugin = Plugin {
        executable: executable.to_owned(),
        bin_dir: bin_dir.to_owned(),
        conf: entry(file)?,
    };
    let _alone = hold(&Conf::bpf_root(&plugin.conf)?)?;
    Ok(forget(&plugin, &[Pod::new(PODS[0])?, Pod::new(PODS[1])?])?)
}

fn forget(plugin: &Plugin, pods: &[Pod; 2]) -> Result<(), CniError> {
    for pod in pods {
        plugin
            .call(Verb::Del, pod)
            .map_err(|error| error.context("of a self-test that was killed"))?;
    }
    Ok(())
}

fn attach_and_talk(
    plugin: &Plugin,
    pods: &mut [Pod; 2],
    out: &mut impl io::Write,
) -> Result<(), Failure> {
    for pod in pods.iter_mut() {
        let result = plugin.call(Verb::Add, pod)?;
        pod.attached(&result)?;
        let addresses: Vec<_> = pod.addresses.iter().map(IpAddr::to_string).collect();
        writeln!(
            out,
            "ok  ADD of {}: {}",
            pod.container,
            addresses.join(", ")
        )?;
    }
    let [from, to] = pods;
    let mut pairs = 0;
    for &client in &from.addresses {
        let of_its_family = |server: &&IpAddr| server.is_ipv4() == client.is_ipv4();
        for &server in to.addresses.iter().filter(of_its_family) {
            connection::talk((&from.netns, client), (&to.netns, server))
                .map_err(|error| no_connection(client, server, &error))?;
            let family = if client.is_ipv4() { "IPv4" } else { "IPv6" };
            writeln!(out, "ok  {family}: {client} and {server} talk by TCP")?;
            pairs += 1;
        }
    }
    if pairs == 0 {
        return Err(broken("ADD gave the pods no addresses of the same family")
            .with_details("give the network's ipam ranges of its own")
            .into());
    }
    if plugin.conf.cni_version >= Version::V0_4_0 {
        for pod in [from, to] {
            plugin.call(Verb::Check, pod)?;
        }
        writeln!(out, "ok  CHECK of both")?;
    }
    Ok(())
}

/// Finds our entry, as a runtime sends it.
fn entry(file: &NetworkFile) -> Result<NetConf, CniError> {
    let first = file.plugins().first().and_then(|first| first.get("type"));
    if first.and_then(Value::as_str) != Some(PLUGIN) {
        return Err(CniError::config(format!(
            "{}: its first plugin is not {PLUGIN:?}: only a network whose interfaces {PLUGIN} makes can be tested",
            file.path.display()
        )));
    }
    let mut confs = file.confs(&[PLUGIN])?.into_iter();
    confs
        .next()
        .ok_or_else(|| CniError::config(format!("{}: it has no plugin", file.path.display())))
}

/// Waits until no other self-test runs on the node: its pods would be ours. The calls inherit the lock: one that a killed
/// self-test has begun goes on, and what it makes would be made beside us.
fn hold(root: &Path) -> Result<File, CniError> {
    let path = file_of(root, "selftest");
    let file = lock::hold(&path).map_err(Error::from)?;
    fcntl(&file, FcntlArg::F_SETFD(FdFlag::empty())).map_err(|errno| {
        let what = format!("cannot have the calls inherit the lock {}", path.display());
        CniError::io(what, &io::Error::from(errno))
    })?;
    Ok(file)
}

fn nothing_is_left(conf: &NetConf, pods: &[Pod; 2]) -> Result<(), Failure> {
    let node = Netlink::open()?;
    for pod in pods {
        let device = Identity {
            network: conf.name.clone(),
            container: pod.container.to_owned(),
            ifname: IFNAME.to_owned(),
        }
        .host_name();
        if node.link(By::Name(&device))?.is_some() {
            return Err(broken(format!(
                "the device {device} of {} is still there after its DEL",
                pod.container
            ))
            .into());
        }
        if !is_built_in(conf)? {
            continue;
        }
        let leases = Store::new(&data_dir(conf)?, &conf.name);
        for &address in &pod.addresses {
            let owner = leases.owner(address).map_err(CniError::from)?;
            if owner == Some(Owner::new(pod.container, IFNAME)) {
                return Err(broken(format!(
                    "the lease {} of {} is still there after its DEL",
                    leases.dir().join(address.to_string()).display(),
                    pod.container
                ))
                .into());
            }
        }
    }
    Ok(())
}

fn broken(msg: impl Into<String>) -> CniError {
    CniError::new(Code::Other(CODE_BROKEN), msg)
}

fn no_connection(client: IpAddr, server: IpAddr, error: &io::Error) -> CniError {
    broken(format!(
        "self-test, code {CODE_BROKEN}: {server} does not answer {client} by TCP: {error}"
    ))
    .with_details(
        "most often the node's firewall drops what is forwarded: allow the range's addresses in both directions \
         (`nft list ruleset`, `iptables -vnL FORWARD`); `underpass status` counts what the programs drop",
    )
}

/// The config that a call gets: the network's, and the result of the ADD where there is one.
fn with_previous(conf: &NetConf, result: Option<&Value>) -> Map<String, Value> {
    let mut conf = conf.raw().clone();
    if let Some(result) = result {
        conf.insert("prevResult".to_owned(), result.clone());
    }
    conf
}

/// Chooses the conflist to test in a folder of networks: the first one that begins with our entry.
pub(crate) fn choose(net_dir: &Path) -> Result<NetworkFile, CniError> {
    let files = underpass_cni::net_dir::read(net_dir).map_err(|error| {
        CniError::io(
            format!("cannot list the folder {}", net_dir.display()),
            &error,
        )
        .with_details("run it as root of the node")
    })?;
    let is_ours = |file: &NetworkFile| {
        let first = file.plugins().first().and_then(|first| first.get("type"));
        first.and_then(Value::as_str) == Some(PLUGIN)
    };
    let found = files.into_iter().flatten().find(is_ours);
    found.ok_or_else(|| {
        CniError::config(format!(
            "no network in {} begins with {PLUGIN:?}: name its file by --conflist, or make one by `underpass install`",
            net_dir.display()
        ))
    })
}

/// Reads the conflist to test.
pub(crate) fn read(path: PathBuf) -> Result<NetworkFile, CniError> {
    let text = fs::read(&path)
        .map_err(|error| CniError::io(format!("cannot read {}", path.display()), &error))?;
    NetworkFile::parse(path, &text)
}

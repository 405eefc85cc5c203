//! `underpass gc --orphans`: what lost DELs have left goes, and nothing that is alive, somebody else's, or on its way.

use std::{
    fs::{self, File},
    net::IpAddr,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::bail;
use rstest::rstest;
use serde_json::{Value, json};
use underpass_dataplane::lock::Lock;
use underpass_tests::{
    leak::Traces,
    node::plugin,
    patience,
    prelude::*,
    runtime::{Call, Conf},
};

use crate::net_dir::{self, NET_DIR};

const PORT: u16 = 8080;
const INSIDE: u16 = 80;
const GC: [&str; 4] = ["gc", "--orphans", "--net-dir", NET_DIR];
const NOTHING: &str = "nothing to free\n";
/// Longer than the grace period.
const LONG: Duration = Duration::from_hours(1);
/// Where plugins of other names are.
const PLUGINS: &str = "/run/plugins";

/// A lab whose network is in the folder.
fn lab() -> Result<Lab> {
    let lab = Lab::new()?;
    net_dir::put(&lab.node, "10-lab.conflist", &lab.conf())?;
    Ok(lab)
}

/// The container's namespace ends, and its devices with it.
fn lose(pod: Pod) -> Result<()> {
    pod.netns().delete_link(Pod::IFNAME)?;
    pod.abandon();
    Ok(())
}

fn wipe(node: &Node) -> Result<()> {
    node.netns()
        .run(|| fs::remove_dir_all(node.bpf_root()))
        .context("wipe the bpffs")
}

fn path(node: &Node, network: &str, address: IpAddr) -> PathBuf {
    node.data_dir().join(network).join(address.to_string())
}

/// Makes leases older than any grace period.
fn age(node: &Node, network: &str, addresses: &[IpAddr]) -> Result<()> {
    for &address in addresses {
        let path = path(node, network, address);
        node.netns()
            .run(|| {
                let lease = File::options().write(true).open(&path)?;
                lease.set_modified(SystemTime::now() - LONG)
            })
            .with_context(|| format!("age {}", path.display()))?;
    }
    Ok(())
}

fn are_leased(node: &Node, network: &str, addresses: &[IpAddr]) -> bool {
    let is_leased = |address: &IpAddr| path(node, network, *address).exists();
    node.netns().run(|| addresses.iter().all(is_leased))
}

/// An address of each family from another IPAM plugin, which somebody else's interface plugin asks.
fn foreign(lab: &Lab, plugin: &Path, container: &str, conf: &Conf) -> Result<Vec<IpAddr>> {
    let result = Call::new("ADD")
        .by(plugin)
        .attachment(container, "/var/run/netns/foreign", Pod::IFNAME)
        .conf(
            &conf
                .clone()
                .with("type", "bridge")
                .with("cniVersion", "1.0.0"),
        )
        .run(&lab.node)?
        .result()?;
    let ips = result["ips"].as_array().context("no addresses")?;
    ips.iter()
        .map(|ip| {
            let text = ip["address"].as_str().unwrap_or_default();
            let bare = text.split('/').next().unwrap_or_default();
            Ok(bare.parse()?)
        })
        .collect()
}

/// This program under the name `host-local`, as the plugin of a bridge would call it.
fn own_host_local(lab: &Lab) -> Result<PathBuf> {
    let path = Path::new(PLUGINS).join("host-local");
    lab.node.netns().run(|| {
        fs::create_dir_all(PLUGINS)?;
        symlink(plugin(), &path)
    })?;
    Ok(path)
}

/// The device is gone: attachment, host ports and leases go at once, as by a DEL.
#[rstest]
fn what_a_lost_del_left_goes(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let mapped = lab.conf().with_host_port(PORT, INSIDE);
    let living = lab.pod("living")?;
    lab.pod_with("first", &mapped)?.del()?;
    ensure!(lab.node.underpass(&GC)? == NOTHING);
    let before = Traces::of(&lab.node)?;
    let lost = lab.pod_with("lost", &mapped)?;
    let address = lost.ip(family);
    lose(lost)?;
    let said = lab.node.underpass(&GC)?;
    for line in [
        format!("lease {address} of network lab, of container lost (eth0)"),
        "with host ports (4 entries): its device is gone".to_owned(),
    ] {
        ensure!(said.contains(&line), "{line:?} is missing in {said:?}");
    }
    before.expect_same(&lab.node)?;
    ensure!(lab.node.underpass(&GC)? == NOTHING);
    living.call_with_result("CHECK").run(&lab.node)?.silence()?;
    ping::ping(living.netns(), family.remote())
}

/// Of two networks with folders of their own for leases, each keeps its own.
#[test]
fn leases_go_from_the_folder_of_their_network() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let folder = "/run/cni/others";
    let other = lab
        .conf()
        .with("name", "other")
        .with_ipam("dataDir", folder)
        .with_ipam("ranges", json!([[{ "subnet": "10.77.0.0/24" }]]));
    net_dir::put(&lab.node, "20-other.conflist", &other)?;
    let lost = lab.pod_with("lost", &other)?;
    let lease = Path::new(folder)
        .join("other")
        .join(lost.ip(V4).to_string());
    let is_leased = || lab.node.netns().run(|| lease.exists());
    ensure!(is_leased());
    lose(lost)?;
    lab.node.underpass(&GC)?;
    ensure!(!is_leased());
    Ok(())
}

/// The maps are gone, too: only the lease is left, and it says nothing about who is alive. The device's alias does,
/// or a hash where the names are too long for one.
#[rstest]
fn without_maps_the_devices_say_who_lives(
    #[values(V4, V6)] family: Family,
    #[values(true, false)] is_loaded_again: bool,
    #[values(1, 100)] length: usize,
) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let network = "n".repeat(length);
    let conf = lab.conf().with("name", network.as_str());
    net_dir::put(&lab.node, "10-lab.conflist", &conf)?;
    let living = lab.pod_with(&format!("living{}", "g".repeat(2 * length)), &conf)?;
    let dead = lab.pod_with(&format!("dead{}", "d".repeat(2 * length)), &conf)?;
    let [kept, lost] = [&living, &dead].map(Pod::addresses);
    wipe(&lab.node)?;
    if is_loaded_again {
        lab.node.underpass(&["load"])?;
    }
    age(&lab.node, &network, &kept)?;
    age(&lab.node, &network, &lost)?;
    ensure!(lab.node.underpass(&GC)? == NOTHING, "both are alive");
    lose(dead)?;
    let said = lab.node.underpass(&GC)?;
    for address in &lost {
        let line = format!("lease {address} of network {network}");
        ensure!(said.contains(&line), "{line:?} is missing in {said:?}");
        ensure!(!are_leased(&lab.node, &network, &[*address]), "{address}");
    }
    ensure!(said.lines().count() == 2, "{said}");
    ensure!(are_leased(&lab.node, &network, &kept), "{said}");
    ping::ping(living.netns(), living.ip(family))
}

#[test]
fn young_leases_stay() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let lost = lab.pod("lost")?;
    let addresses = lost.addresses();
    wipe(&lab.node)?;
    lose(lost)?;
    ensure!(lab.node.underpass(&GC)? == NOTHING);
    ensure!(are_leased(&lab.node, "lab", &addresses));
    let said = lab
        .node
        .underpass(&[GC.as_slice(), &["--grace", "0"]].concat())?;
    ensure!(said.lines().count() == 2, "{said}");
    ensure!(!are_leased(&lab.node, "lab", &addresses[..1]));
    Ok(())
}

/// Containers of other interface plugins have leases in the same folder, of this allocator or of the reference. No device here
/// tells that they are alive.
#[rstest]
fn leases_of_others_stay(
    #[values("ours", "reference")] allocator: &str,
    #[values("same folder", "another folder")] place: &str,
    #[values(true, false)] is_wiped: bool,
) -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let dead = lab.pod("dead")?;
    let ours = dead.addresses();
    let reference = Path::new("/usr/lib/cni/host-local");
    let ipam = match allocator {
        "ours" => own_host_local(&lab)?,
        _ if reference.exists() => reference.to_owned(),
        _ => {
            anstream::println!("not here: {} is missing", reference.display());
            return Ok(());
        }
    };
    let conf = match place {
        "same folder" => lab.conf(),
        _ => lab.conf().with("name", "theirs"),
    };
    let theirs = foreign(&lab, &ipam, "foreign", &conf)?;
    ensure!(theirs.len() == 2, "{theirs:?}");
    let note = IpAddr::from([10, 88, 0, 200]);
    lab.node.netns().run(|| {
        let note = path(&lab.node, conf.name(), note);
        fs::write(note, "reserved for the printer")
    })?;
    age(&lab.node, conf.name(), &theirs)?;
    age(&lab.node, conf.name(), &[note])?;
    age(&lab.node, "lab", &ours)?;
    if is_wiped {
        wipe(&lab.node)?;
    }
    lose(dead)?;
    let said = lab.node.underpass(&GC)?;
    ensure!(!are_leased(&lab.node, "lab", &ours[..1]), "{said}");
    ensure!(are_leased(&lab.node, conf.name(), &theirs), "{said}");
    ensure!(are_leased(&lab.node, conf.name(), &[note]), "{said}");
    Ok(())
}

/// Another network namespace with the same mounts has none of the devices, and so knows nothing of who is alive.
#[test]
fn another_namespace_frees_nothing() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let living = lab.pod("living")?;
    let addresses = living.addresses();
    let elsewhere = lab.node.netns().sibling("elsewhere")?;
    let gc = || {
        let mut command = std::process::Command::new(plugin());
        command.env_clear().args(GC);
        elsewhere.output(&mut command, &[])
    };
    age(&lab.node, "lab", &addresses)?;
    let output = gc()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(said.contains("another network namespace"), "{said}");
    wipe(&lab.node)?;
    let output = gc()?;
    ensure!(String::from_utf8_lossy(&output.stdout) == NOTHING);
    ensure!(are_leased(&lab.node, "lab", &addresses));
    ping::ping(living.netns(), living.ip(V4))
}

/// An ADD that waits for long has an old lease and, here, no device that anybody recognizes: all signs of an orphan.
#[test]
fn an_add_under_way_keeps_its_lease() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    lab.pod("first")?.del()?;
    let node = lab.node.netns();
    let lock = node.run(|| Lock::acquire(lab.node.bpf_root()))?;
    let late = thread::scope(|scope| -> Result<Pod> {
        let adding = scope.spawn(|| lab.pod_with("late", &lab.conf().with("device", "veth")));
        let host = device_of(&lab)?;
        node.ip(&[format!("link set dev {host} alias x name hidden")])?;
        let held = node.run(|| leases(&lab))?;
        ensure!(held.len() == 2, "{held:?}");
        age(&lab.node, "lab", &held)?;
        let freeing = scope.spawn(|| lab.node.underpass(&GC));
        thread::sleep(patience::here(Duration::from_millis(500)));
        ensure!(!freeing.is_finished(), "it did not wait for the ADD");
        drop(lock);
        let late = adding.join().expect("no panic")?;
        let said = freeing.join().expect("no panic")?;
        ensure!(said == NOTHING, "{said}");
        Ok(late)
    })?;
    ensure!(are_leased(&lab.node, "lab", &late.addresses()));
    late.del()
}

/// The host's end that an ADD is at.
fn device_of(lab: &Lab) -> Result<String> {
    let deadline = Instant::now() + patience::here(Duration::from_secs(5));
    while Instant::now() < deadline {
        let links = lab.node.netns().ip_json(&["link", "show"])?;
        let mut links = links.as_array().into_iter().flatten();
        let is_ours = |link: &&Value| {
            let alias = link["ifalias"].as_str().unwrap_or_default();
            alias.starts_with("underpass:")
        };
        if let Some(name) = links.find(is_ours).and_then(|link| link["ifname"].as_str()) {
            return Ok(name.to_owned());
        }
        thread::sleep(Duration::from_millis(10));
    }
    bail!("the ADD made no device")
}

fn leases(lab: &Lab) -> Result<Vec<IpAddr>> {
    let folder = lab.node.data_dir().join("lab");
    let mut leases = Vec::new();
    for entry in fs::read_dir(folder)? {
        leases.extend(entry?.file_name().to_string_lossy().parse::<IpAddr>().ok());
    }
    Ok(leases)
}

#[test]
fn it_says_what_it_does_not_do() -> Result<()> {
    needs_root!();
    let lab = lab()?;
    let error = lab.node.underpass_error(&["gc"])?;
    ensure!(error.contains("--orphans"), "{error}");
    let lost = lab.pod("lost")?;
    let addresses = lost.addresses();
    lose(lost)?;
    net_dir::write(&lab.node, "00-broken.conflist", "{")?;
    let error = lab.node.underpass_error(&GC)?;
    ensure!(error.contains("00-broken.conflist"), "{error}");
    ensure!(!are_leased(&lab.node, "lab", &addresses[..1]));
    Ok(())
}

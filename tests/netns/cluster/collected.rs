//! What lost DELs have left: the agent frees it, without a call of the runtime, and nothing that anybody has.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    net::{IpAddr, SocketAddr},
    path::Path,
    time::{Duration, SystemTime},
};

use underpass_tests::{counter::Registry, prelude::*};

use super::{commands::runs, fixture::Cluster, member::Member};

/// Where the leases of the network are.
const LEASES: &str = "/var/lib/cni/networks/pods";
/// Longer than the grace period.
const LONG: Duration = Duration::from_hours(1);
/// The port of the node that leads to a pod.
const HOST: u16 = 8_080;
const INSIDE: u16 = 80;

/// A node whose agent looks for such leases all the time. What else it does nobody hears of: it compares nothing by itself.
fn collecting() -> Result<Cluster> {
    let mut cluster = Cluster::idle(&[0])?;
    let member = &mut cluster.members[0];
    member.interpose("[ \"$1\" != gc ] || echo >> /run/gc-runs")?;
    member.start_agent_with(&["--resync", "3600", "--collect", "1"])?;
    member.is_ready()?;
    Ok(cluster)
}

fn leases(member: &Member) -> Result<BTreeSet<IpAddr>> {
    let names = member.names(LEASES)?;
    Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
}

fn addresses(pods: &[&Pod]) -> BTreeSet<IpAddr> {
    pods.iter().flat_map(|pod| pod.addresses()).collect()
}

/// Makes the leases of a pod older than any grace period.
fn age(member: &Member, addresses: &[IpAddr]) -> Result<()> {
    let old = SystemTime::now() - LONG;
    member.node.netns().run(|| {
        addresses.iter().try_for_each(|address| {
            let path = Path::new(LEASES).join(address.to_string());
            Ok(File::options().write(true).open(path)?.set_modified(old)?)
        })
    })
}

/// The container's network namespace goes, and its devices with it. Nobody calls DEL.
fn lose(member: &Member, pod: Pod) -> Result<()> {
    let device = pod.host_veth().to_owned();
    pod.netns().unlink()?;
    pod.abandon();
    eventually("the device goes with the namespace", || {
        let found = member.node.netns().ifindex(&device);
        ensure!(found.is_err(), "{device} is there");
        Ok(())
    })
}

/// Waits until nothing but these addresses is leased.
fn frees_all_but(member: &Member, kept: &BTreeSet<IpAddr>) -> Result<()> {
    eventually("the leases of the living alone", || {
        let left = leases(member)?;
        ensure!(left == *kept, "{left:?} instead of {kept:?}");
        Ok(())
    })
}

/// The maps still know of it, so no grace is needed.
#[test]
fn a_lost_pod_gives_all_back() -> Result<()> {
    needs_root!();
    let cluster = collecting()?;
    let member = &cluster.members[0];
    let living = member.pod("living")?;
    let conf = member.conf()?.with_host_port(HOST, INSIDE);
    let lost = Pod::add(&member.node, "lost", &conf)?;
    let (kept, gone) = (addresses(&[&living]), addresses(&[&lost]));
    ensure!(leases(member)? == addresses(&[&living, &lost]));
    lose(member, lost)?;
    frees_all_but(member, &kept)?;
    eventually("the log has it", || {
        let log = member.log()?;
        for address in &gone {
            let line = format!("gc: lease {address} of network pods, of container lost (eth0)");
            ensure!(log.contains(&line), "{line:?} is missing in {log}");
        }
        Ok(())
    })?;
    let left = Registry::read(&member.node)?;
    ensure!(
        left.owners.len() == 1 && left.endpoints.len() == 2 && left.ports.is_empty(),
        "{left:?}"
    );
    living
        .call_with_result("CHECK")
        .run(&member.node)?
        .silence()?;
    for family in Family::BOTH {
        ping::ping(living.netns(), member.gateway(family))?;
        let at = SocketAddr::new(member.address(family), HOST);
        tcp::is_refused(&cluster.fabric, at)?;
    }
    living.del()
}

/// Nothing but a lease is left of it, so it is kept for a while, as an ADD may be under way; then it goes. A living container's stays, however
/// old it is.
#[test]
fn an_orphaned_lease_goes_after_a_grace() -> Result<()> {
    needs_root!();
    let cluster = collecting()?;
    let member = &cluster.members[0];
    let [living, old, young] = ["living", "old", "young"].map(|name| member.pod(name));
    let (living, old, young) = (living?, old?, young?);
    let root = member.node.bpf_root();
    member
        .node
        .netns()
        .run(|| fs::remove_dir_all(root))
        .context("wipe the bpffs")?;
    member.node.underpass(&["load"])?;
    age(member, &living.addresses())?;
    age(member, &old.addresses())?;
    let with_young = addresses(&[&living, &young]);
    let without = addresses(&[&living]);
    let late = young.addresses();
    lose(member, young)?;
    lose(member, old)?;
    frees_all_but(member, &with_young)?;
    // It is looked at again and again.
    let before = runs(member, "gc")?;
    eventually("gc runs on", || {
        ensure!(runs(member, "gc")? >= before + 3);
        Ok(())
    })?;
    let left = leases(member)?;
    ensure!(left == with_young, "{left:?} instead of {with_young:?}");
    age(member, &late)?;
    frees_all_but(member, &without)?;
    for family in Family::BOTH {
        ping::ping(living.netns(), member.address(family))?;
    }
    living.del()
}

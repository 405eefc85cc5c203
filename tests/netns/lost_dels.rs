//! A container is gone and its DEL never came: what the maps and the leases have of it goes with the next
//! call that changes anything, of whatever network.

use std::{
    fs::{self, File},
    net::SocketAddr,
    thread,
    time::Duration,
};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    counter::Registry,
    leak::Traces,
    patience,
    prelude::*,
    runtime::{Call, Conf},
};

use crate::net_dir::{self, NET_DIR};

const PORT: u16 = 8080;
const INSIDE: u16 = 80;

/// Another network with folders of its own for leases, beside the lab's.
fn another(lab: &Lab) -> Conf {
    let ranges = json!([[{ "subnet": "10.77.0.0/24" }], [{ "subnet": "fd77::/64" }]]);
    lab.conf()
        .with("name", "another")
        .with_ipam("ranges", ranges)
}

/// The container's namespace ends, and its devices with it.
fn lose(pod: Pod) -> Result<()> {
    pod.netns().delete_link(Pod::IFNAME)?;
    pod.abandon();
    Ok(())
}

fn gc(conf: &Conf, valid: &[&Pod]) -> Call {
    let attachments: Vec<Value> = valid
        .iter()
        .map(|pod| json!({ "containerID": pod.name(), "ifname": Pod::IFNAME }))
        .collect();
    Call::new("GC").conf(&conf.clone().with("cni.dev/valid-attachments", attachments))
}

#[rstest]
fn nothing_of_it_stays(#[values("ADD", "chained ADD", "GC")] verb: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let other = another(&lab);
    let witness = lab.pod_with("witness", &other)?;
    // What is loaded for host ports stays.
    lab.pod_with("first", &lab.conf().with_host_port(PORT, INSIDE))?
        .del()?;
    let before = Traces::of(&lab.node)?;
    let lost = lab.pod_with("lost", &lab.conf().with_host_port(PORT, INSIDE))?;
    lose(lost)?;
    ensure!(Traces::of(&lab.node)? != before);
    match verb {
        "GC" => gc(&other, &[&witness]).run(&lab.node)?.silence()?,
        "ADD" => lab.pod_with("next", &other)?.del()?,
        _ => {
            let chained_conf = other
                .clone()
                .with("ipMasq", false)
                .with("ipam", json!({}))
                .with("prevResult", witness.result().clone())
                .with_host_port(PORT + 1, INSIDE);
            let chained = witness.call("ADD").conf(&chained_conf);
            // It does not know where addresses are kept, and leaves the dead to a call that does.
            chained.run(&lab.node)?.result()?;
            lab.pod_with("next", &other)?.del()?;
            let left = Traces::of(&lab.node)?;
            ensure!(left.leases == before.leases, "{left:#?}");
            ensure!(
                left.registry.endpoints == before.registry.endpoints,
                "{left:#?}"
            );
            return Ok(());
        }
    }
    before.expect_same(&lab.node)?;
    witness.call_with_result("CHECK").run(&lab.node)?.silence()
}

/// Another network has its leases elsewhere: a call of it leaves those of the first to a call that can free them.
#[rstest]
fn another_folder_of_leases_is_no_reason_to_forget(
    #[values("ADD", "GC", "GC behind")] verb: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let other = another(&lab).with_ipam("dataDir", "/run/cni/elsewhere");
    // A later entry of the network's own list, by a runtime that says nothing of what is valid.
    let behind = lab.conf().with("ipMasq", false).with("ipam", json!({}));
    let behind = behind.with("cni.dev/valid-attachments", Value::Null);
    lab.pod("first")?.del()?;
    let before = Traces::of(&lab.node)?;
    lose(lab.pod("lost")?)?;
    match verb {
        "GC" => gc(&other, &[]).run(&lab.node)?.silence()?,
        "GC behind" => Call::new("GC").conf(&behind).run(&lab.node)?.silence()?,
        _ => lab.pod_with("next", &other)?.del()?,
    }
    lab.pod("again")?.del()?;
    before.expect_same(&lab.node)
}

/// Its host port goes back to the living container that had it before, or to the host.
#[rstest]
fn a_port_goes_to_the_living(
    #[values(V4, V6)] family: Family,
    #[values("ADD", "GC", "DEL")] verb: &str,
    #[values("container", "host")] heir: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let mapped = lab.conf().with_host_port(PORT, INSIDE);
    let other = another(&lab);
    let older = match heir {
        "container" => Some(lab.pod_with("older", &mapped)?),
        _ => None,
    };
    let dead = lab.pod_with("dead", &mapped)?;
    let at_node = SocketAddr::new(family.node(), PORT);
    let server = match &older {
        Some(older) => tcp::Server::start(older.netns(), older.at(family, INSIDE))?,
        None => tcp::Server::start(lab.node.netns(), at_node)?,
    };
    // The newest goes orderly; the one before it is dead.
    let newest = (verb == "DEL").then(|| lab.pod_with("newest", &mapped));
    lose(dead)?;
    match newest {
        Some(newest) => newest?.del()?,
        None if verb == "ADD" => lab.pod_with("next", &other)?.del()?,
        None => gc(&other, &[]).run(&lab.node)?.silence()?,
    }
    tcp::visit(lab.world.netns(), at_node)?;
    drop(server);
    Ok(())
}

/// Nobody knows any more where its address was leased: its network was renamed, or removed. Its host port is the host's again all the same.
#[rstest]
fn a_port_goes_without_its_network(
    #[values(V4, V6)] family: Family,
    #[values("ADD", "GC", "gc --orphans", "apply")] by: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let other = another(&lab);
    let former = lab
        .conf()
        .with("name", "former")
        .with_ipam("dataDir", "/run/cni/elsewhere")
        .with_host_port(PORT, INSIDE);
    lose(lab.pod_with("dead", &former)?)?;
    let left = Registry::read(&lab.node)?;
    ensure!(!left.ports.is_empty(), "{left:#?}");
    let at_node = SocketAddr::new(family.node(), PORT);
    let server = tcp::Server::start(lab.node.netns(), at_node)?;
    match by {
        "GC" => gc(&other, &[]).run(&lab.node)?.silence()?,
        "ADD" => lab.pod_with("next", &other)?.del()?,
        "apply" => {
            net_dir::put(&lab.node, "10-another.conflist", &other)?;
            let apply = ["apply", "--net-dir", NET_DIR];
            let said = lab.node.underpass(&apply)?;
            ensure!(
                said.starts_with("host ports (4 entries) of the container at"),
                "{said}"
            );
            ensure!(lab.node.underpass(&apply)? == "nothing to change\n");
        }
        _ => {
            net_dir::put(&lab.node, "10-another.conflist", &other)?;
            let gc = ["gc", "--orphans", "--net-dir", NET_DIR];
            let said = lab.node.underpass(&gc)?;
            ensure!(
                said.starts_with("host ports (4 entries) of the attachment"),
                "{said}"
            );
            ensure!(lab.node.underpass(&gc)? == "nothing to free\n");
        }
    }
    tcp::visit(lab.world.netns(), at_node)?;
    drop(server);
    let now = Registry::read(&lab.node)?;
    ensure!(now.ports.is_empty(), "{now:#?}");
    // Its lease can be freed where it is.
    ensure!(now.owners == left.owners, "{now:#?}");
    Ok(())
}

/// The leases of one network can't be read, and what its dead hold stays. The host ports of all go, and what the dead of another network hold.
#[rstest]
fn a_folder_that_cannot_be_read_keeps_its_own(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let folder = lab.node.data_dir().join("file");
    let conf = lab
        .conf()
        .with("name", "unreadable")
        .with_ipam("dataDir", folder.display().to_string());
    let dead = lab.pod_with("dead", &conf.clone().with_host_port(PORT, INSIDE))?;
    let of_another = lab.pod("another")?;
    let address = of_another.ip(family).to_string();
    let lease = lab.node.data_dir().join("lab").join(&address);
    lose(dead)?;
    lose(of_another)?;
    lab.node.netns().run(|| -> Result<()> {
        fs::rename(&folder, folder.with_extension("away"))?;
        Ok(fs::write(&folder, "no folder")?)
    })?;
    net_dir::put(&lab.node, "10-lab.conflist", &lab.conf())?;
    net_dir::put(&lab.node, "20-unreadable.conflist", &conf)?;
    let gc = ["gc", "--orphans", "--net-dir", NET_DIR];
    let said = lab.node.underpass(&gc);
    let now = Registry::read(&lab.node)?;
    ensure!(now.ports.is_empty(), "{said:?}: {now:#?}");
    ensure!(now.owners.len() == 1, "{said:?}: {now:#?}");
    let is_there = lab.node.netns().run(|| lease.exists());
    ensure!(!is_there, "{said:?}: {} is there", lease.display());
    let error = said.err().context("nothing is said of the folder")?;
    ensure!(format!("{error:#}").contains("file"), "{error:#}");
    Ok(())
}

/// However many are dead: the lease of a container that lives is read as often as for one.
#[rstest]
fn leases_are_read_once_for_all(#[values("ADD", "GC")] verb: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let other = another(&lab);
    let living = lab.pod("living")?;
    let reads = |dead: usize| -> Result<usize> {
        // Any ADD takes away who is dead by then.
        let lost = (0..dead).map(|number| lab.pod(&format!("lost{dead}-{number}")));
        let lost = lost.collect::<Result<Vec<_>>>()?;
        lost.into_iter().try_for_each(lose)?;
        let lease = lab
            .node
            .data_dir()
            .join("lab")
            .join(living.ip(V4).to_string());
        let events = Inotify::init(InitFlags::IN_NONBLOCK)?;
        // Two alike in a row would be told once.
        let flags = AddWatchFlags::IN_OPEN | AddWatchFlags::IN_CLOSE;
        lab.node.netns().run(|| events.add_watch(&lease, flags))?;
        match verb {
            "GC" => gc(&other, &[]).run(&lab.node)?.silence()?,
            _ => lab.pod_with(&format!("next{dead}"), &other)?.del()?,
        }
        let mut count = 0;
        while let Ok(some) = events.read_events() {
            let opened = some.iter().map(|event| event.mask);
            count += opened
                .filter(|mask| mask.contains(AddWatchFlags::IN_OPEN))
                .count();
        }
        Ok(count)
    };
    let (one, many) = (reads(1)?, reads(6)?);
    ensure!(
        one > 0 && many == one,
        "{one} times for one, {many} for six"
    );
    living.call_with_result("CHECK").run(&lab.node)?.silence()
}

/// What a network has beside its attachments goes with the last of them, and not before.
#[rstest]
fn the_network_ends_with_the_last(#[values("ADD", "GC")] verb: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let other = another(&lab);
    lab.pod("first")?.del()?;
    let before = Traces::of(&lab.node)?;
    let nets = json!(["203.0.113.0/24", "2001:db8:77::/48"]);
    let conf = lab.conf().with("nonMasqueradeCIDRs", nets);
    let reap = |name| match verb {
        "GC" => gc(&other, &[]).run(&lab.node)?.silence(),
        _ => lab.pod_with(name, &other)?.del(),
    };
    let living = lab.pod_with("living", &conf)?;
    let lost = (0..3).map(|number| lab.pod_with(&format!("lost{number}"), &conf));
    let lost = lost.collect::<Result<Vec<_>>>()?;
    lost.into_iter().try_for_each(lose)?;
    let full = Registry::read(&lab.node)?.destinations;
    reap("next")?;
    let now = Registry::read(&lab.node)?;
    ensure!(
        now.destinations == full && now.owners.len() == 1,
        "{now:#?}"
    );
    let again = lab.pod_with("again", &conf)?;
    [living, again].into_iter().try_for_each(lose)?;
    reap("last")?;
    before.expect_same(&lab.node)
}

/// The same container comes back at once, with the same id: no call of it was lost on the way but the DEL.
#[rstest]
fn the_same_container_comes_back(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with_host_port(PORT, INSIDE);
    for _ in 0..5 {
        let lost = lab.pod_with("a", &conf)?;
        let netns = lost.netns().clone();
        lose(lost)?;
        let again = Pod::add_to(&lab.node, netns.clone(), &conf)?;
        ping::ping(again.netns(), family.remote())?;
        again.call_with_result("CHECK").run(&lab.node)?.silence()?;
        again.del()?;
        netns.unlink()?;
    }
    Ok(())
}

/// The runtime was killed, and all it had with it. What comes then comes at once, and somebody holds the lock of the leases.
#[test]
fn many_dead_and_many_adds_at_once() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let other = another(&lab);
    lab.pod("first")?.del()?;
    let before = Traces::of(&lab.node)?;
    for number in 0..16 {
        lose(lab.pod(&format!("lost{number}"))?)?;
    }
    let path = lab.node.data_dir().join("lab/lock");
    let lock = lab
        .node
        .netns()
        .run(|| File::open(&path))
        .context("open the lock")?;
    lock.lock()?;
    let pods = thread::scope(|scope| {
        let add = |number| lab.pod_with(&format!("next{number}"), &other);
        let adding = [0, 1, 2, 3].map(|number| scope.spawn(move || add(number)));
        thread::sleep(patience::here(Duration::from_millis(300)));
        drop(lock);
        adding.map(|adding| adding.join().expect("no panic"))
    });
    for pod in pods {
        pod?.del()?;
    }
    before.expect_same(&lab.node)
}

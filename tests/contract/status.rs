//! STATUS: cheap, without side effects, and with a reason.

use std::{
    fs,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use rstest::rstest;
use serde_json::json;
use underpass_tests::{
    leak::Traces,
    prelude::*,
    runtime::{Call, CniError, Conf},
};

use crate::delegated::Witness;

fn refused(lab: &Lab, conf: &Conf) -> Result<CniError> {
    Call::new("STATUS").conf(conf).run(&lab.node)?.error()
}

#[test]
fn it_changes_nothing() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let files = || {
        lab.node.netns().run(|| {
            let mut listed = Vec::new();
            for folder in ["/run", "/run/cni/networks", "/sys/fs/bpf"] {
                for entry in fs::read_dir(folder)? {
                    listed.push(entry?.path());
                }
            }
            listed.sort();
            anyhow::Ok(listed)
        })
    };
    let status = Call::new("STATUS").conf(&lab.conf());
    // Before the first ADD, nothing is loaded, made or locked by it.
    let (before, traces) = (files()?, Traces::of(&lab.node)?);
    status.run(&lab.node)?.silence()?;
    ensure!(files()? == before, "{:?} was {before:?}", files()?);
    traces.expect_same(&lab.node)?;
    // The same with a container.
    let _pod = lab.pod("a")?;
    let (before, traces) = (files()?, Traces::of(&lab.node)?);
    status.run(&lab.node)?.silence()?;
    ensure!(files()? == before, "{:?} was {before:?}", files()?);
    traces.expect_same(&lab.node)
}

#[test]
fn an_exhausted_pool_is_50() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with_ipam(
        "ranges",
        json!([[{ "subnet": "10.88.0.0/24" }], [{ "subnet": "10.89.0.0/30" }]]),
    );
    Call::new("STATUS").conf(&conf).run(&lab.node)?.silence()?;
    let pod = lab.pod_with("a", &conf)?;
    let error = refused(&lab, &conf)?;
    ensure!(
        error.code == 50
            && error
                .msg
                .contains("no IP addresses available in range set: 10.89.0.1-10.89.0.2"),
        "{error}"
    );
    pod.del()?;
    Call::new("STATUS").conf(&conf).run(&lab.node)?.silence()
}

/// An ADD frees what lost DELs have left before it takes an address.
#[rstest]
fn a_pool_full_of_the_dead_is_none(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    // Two can be leased of the one, and many of the other.
    let ranges = match family {
        V4 => {
            json!([[{ "subnet": "10.88.0.0/24", "rangeEnd": "10.88.0.3" }], [{ "subnet": "fd00:88::/64" }]])
        }
        V6 => {
            json!([[{ "subnet": "10.88.0.0/24" }], [{ "subnet": "fd00:88::/64", "rangeEnd": "fd00:88::3" }]])
        }
    };
    let conf = lab.conf().with_ipam("ranges", ranges);
    let status = Call::new("STATUS").conf(&conf);
    let (lives, lost) = (lab.pod_with("lives", &conf)?, lab.pod_with("lost", &conf)?);
    ensure!(refused(&lab, &conf)?.code == 50);
    lost.netns().delete_link(Pod::IFNAME)?;
    let (address, lease) = (lost.ip(family), lab.node.data_dir().join(conf.name()));
    lost.abandon();
    let before = Traces::of(&lab.node)?;
    status.run(&lab.node)?.silence()?;
    before.expect_same(&lab.node)?;
    // An address that somebody else has by now is none of the dead.
    let lease = lease.join(address.to_string());
    let give = |owner: &str| lab.node.netns().run(|| fs::write(&lease, owner));
    give("printer\r\neth0")?;
    ensure!(refused(&lab, &conf)?.code == 50);
    give("lost\r\neth0")?;
    let next = lab.pod_with("next", &conf)?;
    ensure!(next.ip(family) == address, "{}", next.result());
    ensure!(refused(&lab, &conf)?.code == 50);
    lives.call_with_result("CHECK").run(&lab.node)?.silence()
}

#[test]
fn leases_that_cannot_be_written_are_50() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.node.netns().run(|| fs::write("/run/file", ""))?;
    let error = refused(&lab, &lab.conf().with_ipam("dataDir", "/run/file/networks"))?;
    ensure!(
        error.code == 50 && error.to_string().contains("/run/file"),
        "{error}"
    );
    // A file system that cannot be written to, even by root.
    let error = refused(&lab, &lab.conf().with_ipam("dataDir", "/proc/sys/networks"))?;
    ensure!(
        error.code == 50 && error.to_string().contains("/proc/sys"),
        "{error}"
    );
    Ok(())
}

#[test]
fn no_bpffs_is_50_and_says_where() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let error = refused(&lab, &lab.conf().with("bpfRoot", "/run/underpass"))?;
    ensure!(
        error.code == 50
            && error
                .to_string()
                .contains("mount -t bpf bpf /run/underpass"),
        "{error}"
    );
    Ok(())
}

#[test]
fn a_config_that_no_add_can_serve_is_an_error() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let error = refused(&lab, &lab.conf().with("vlan", 5))?;
    ensure!(error.code == 2 && error.msg.contains("vlan"), "{error}");
    let error = refused(
        &lab,
        &lab.conf()
            .with_ipam("ranges", json!([[{ "subnet": "10.0.0.0/31" }]])),
    )?;
    ensure!(
        error.code == 7 && error.msg.contains("too small"),
        "{error}"
    );
    Ok(())
}

#[test]
fn detached_programs_are_named_and_no_error() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf();
    let pod = lab.pod("a")?;
    let node = lab.node.netns();
    node.take_filters_off(pod.host_veth(), "ingress")?;
    let remarks = || -> Result<String> {
        let reply = Call::new("STATUS").conf(&conf).run(&lab.node)?;
        reply.silence()?;
        Ok(reply.stderr)
    };
    let said = remarks()?;
    ensure!(said.contains(pod.host_veth()), "{said}");
    // It is no business of other networks.
    let other = lab.conf().with("name", "othernet");
    let reply = Call::new("STATUS").conf(&other).run(&lab.node)?;
    reply.silence()?;
    ensure!(!reply.stderr.contains(pod.host_veth()), "{}", reply.stderr);
    pod.del()?;
    let said = remarks()?;
    ensure!(!said.contains("not attached"), "{said}");
    // An uplink that lost all of its filters; the next ADD puts it right.
    let _pod = lab.pod("b")?;
    let mut delete = Command::new("tc");
    delete.args(["qdisc", "del", "dev", Node::UPLINK, "clsact"]);
    node.expect(&mut delete, &[])?;
    let said = remarks()?;
    ensure!(said.contains("of eth0"), "{said}");
    let _other = lab.pod("c")?;
    let said = remarks()?;
    ensure!(!said.contains("not attached"), "{said}");
    Ok(())
}

#[test]
fn the_word_of_another_ipam_is_handed_on() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let witness = Witness::new()?;
    let netns = lab.node.netns().sibling("a")?;
    let status = witness.call("STATUS", &netns, &Witness::conf(&lab));
    status.run(&lab.node)?.silence()?;
    witness.fails("STATUS", 50, "the database is away")?;
    let error = status.run(&lab.node)?.error()?;
    ensure!(
        error.code == 50 && error.msg.contains("the database is away"),
        "{error}"
    );
    ensure!(witness.calls()?.len() == 2);
    Ok(())
}

#[test]
fn ours_says_so_too_where_it_stands_alone() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let ipam =
        crate::plugins::Name::new("underpass-ipam", crate::plugins::Program::Ipam).install()?;
    let conf = lab.conf().with_ipam(
        "ranges",
        json!([[{ "subnet": V4.pods(), "rangeStart": "10.88.0.1", "rangeEnd": "10.88.0.1" }]]),
    );
    let error =
        crate::plugins::run(&lab.node, &ipam.path, &Call::new("STATUS").conf(&conf))?.error()?;
    ensure!(
        error.code == 50,
        "no address is left but the gateway's: {error}"
    );
    Ok(())
}

#[test]
fn ranges_that_the_runtime_names_are_not_missed() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let ipam = json!({ "type": "host-local", "dataDir": lab.node.data_dir() });
    let conf = lab.conf().with("ipam", ipam);
    let error = refused(&lab, &conf)?;
    ensure!(error.code == 7, "{error}");
    let conf = conf.with("capabilities", json!({ "ipRanges": true }));
    Call::new("STATUS").conf(&conf).run(&lab.node)?.silence()
}

#[test]
fn what_the_next_add_loads_is_no_error() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    lab.node.underpass(&["unload", "--force"])?;
    let said = |conf: &Conf| -> Result<String> {
        let reply = Call::new("STATUS").conf(conf).run(&lab.node)?;
        reply.silence()?;
        Ok(reply.stderr)
    };
    let here = said(&lab.conf())?;
    ensure!(here.contains(pod.host_veth()), "{here}");
    // They are no business of other networks.
    let there = said(&lab.conf().with("name", "othernet"))?;
    ensure!(!there.contains(pod.host_veth()), "{there}");
    let _another = lab.pod("b")?;
    pod.del()
}

#[test]
fn containers_that_suffer_where_no_add_works_are_51() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = lab.conf().with("bpfRoot", "/run/underpass");
    let error = refused(&lab, &conf)?;
    ensure!(error.code == 50, "{error}");
    let pod = lab.pod("a")?;
    let error = refused(&lab, &conf)?;
    ensure!(
        error.code == 51
            && error.msg.contains("/run/underpass")
            && error.msg.contains(pod.host_veth()),
        "{error}"
    );
    let other = conf.with("name", "othernet");
    let error = refused(&lab, &other)?;
    ensure!(error.code == 50, "{error}");
    Ok(())
}

/// A runtime takes any error of STATUS for a node that can run nothing. None may come while others make containers, be it the first ones
/// of the node.
#[test]
fn beside_a_hundred_adds_it_never_fails() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let conf = lab.conf().with_host_port(8080, 80);
    let is_over = AtomicBool::new(false);
    let asked = thread::scope(|scope| {
        let asking = scope.spawn(|| -> Result<usize> {
            let mut times = 0;
            while !is_over.load(Ordering::Relaxed) {
                Call::new("STATUS")
                    .conf(&conf)
                    .run(&lab.node)?
                    .silence()
                    .with_context(|| format!("after {times}"))?;
                times += 1;
            }
            Ok(times)
        });
        let add = |worker: usize| -> Result<()> {
            for number in 0..25 {
                let conf = if (worker, number) == (0, 0) {
                    conf.clone()
                } else {
                    lab.conf()
                };
                lab.pod_with(&format!("p{worker}-{number}"), &conf)?;
            }
            Ok(())
        };
        let added: Result<Vec<()>> = [0, 1, 2, 3]
            .map(|worker| scope.spawn(move || add(worker)))
            .into_iter()
            .map(|worker| worker.join().expect("no worker panics"))
            .collect();
        is_over.store(true, Ordering::Relaxed);
        let asked = asking.join().expect("who asks does not panic")?;
        added?;
        Ok::<_, anyhow::Error>(asked)
    })?;
    ensure!(asked > 10, "asked {asked} times only");
    Ok(())
}

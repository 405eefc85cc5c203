//! Two calls for one attachment at the same time.

use std::{
    net::SocketAddr,
    sync::{Barrier, mpsc},
    thread,
    time::Duration,
};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    fault::Change,
    leak::Traces,
    patience,
    prelude::*,
    runtime::{Call, Conf},
};

use crate::net_dir::{self, NET_DIR};

/// How long a call may take to come where it is to wait.
const LIMIT: Duration = Duration::from_secs(10);
/// What attaches the first program.
const FIRST_FILTER: (&str, usize) = ("RTM_NEWTFILTER", 0);
/// What sets the host's end up, after the container's end, and how many changes like it come before.
const HOST_END_UP: (&str, usize) = ("RTM_SETLINK", 2);

/// One wins; the other says that it is attached already, and takes nothing away from the winner.
#[rstest]
fn two_adds(#[values("host-local", "none")] ipam: &str) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    // What is loaded for host ports stays.
    lab.pod_with("first", &lab.conf().with_host_port(8080, 80))?
        .del()?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("a")?;
    let mut conf = lab.conf().with_host_port(8080, 80);
    if ipam == "none" {
        conf = lab.conf().with("ipam", json!({}));
    }
    let path = netns.path().display().to_string();
    let call = |verb| Call::new(verb).attachment("a", &path, Pod::IFNAME);
    for round in 0..20 {
        let start = Barrier::new(2);
        let add = || {
            start.wait();
            call("ADD").conf(&conf).run(&lab.node)
        };
        let [one, other] = thread::scope(|scope| {
            [scope.spawn(add), scope.spawn(add)].map(|thread| thread.join().expect("no panic"))
        });
        let (one, other) = (one?, other?);
        let (winner, loser) = match (one.result(), other.result()) {
            (Ok(result), Err(_)) => (result, other),
            (Err(_), Ok(result)) => (result, one),
            (Ok(_), Ok(_)) => anyhow::bail!("round {round}: both were attached"),
            (Err(first), Err(second)) => anyhow::bail!("round {round}: {first:#}; {second:#}"),
        };
        let error = loser.error()?;
        ensure!(error.code == 101, "round {round}: {error}");
        // Whoever had the lease first, or the interface.
        ensure!(error.msg.contains("another ADD"), "round {round}: {error}");
        let remembered = conf.clone().with("prevResult", winner);
        call("CHECK").conf(&remembered).run(&lab.node)?.silence()?;
        call("DEL").conf(&conf).run(&lab.node)?.silence()?;
        before.expect_same(&lab.node)?;
    }
    Ok(())
}

/// A DEL comes when the ADD has its lease, and nothing else yet: who has an address has a lease of it.
#[rstest]
fn a_del_during_an_add(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let ranges = json!([[{ "subnet": family.pods() }]]);
    let conf = lab.conf().with_ipam("ranges", ranges);
    lab.pod_with("first", &conf)?.del()?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let call = |verb| {
        let call = Call::new(verb).attachment("a", &path, Pod::IFNAME);
        call.conf(&conf)
    };
    let mut leased = 0;
    let traced = call("ADD").run_around(&lab.node, "RTM_NEWLINK", || {
        leased = Traces::of(&lab.node)?.leases.len();
        call("DEL").run(&lab.node)?.silence()
    })?;
    ensure!(
        leased > 0,
        "the ADD had no lease yet: {:#?}",
        traced.changes
    );
    let error = traced.reply.error()?;
    ensure!(error.code == 11, "{error}");
    ensure!(error.msg.contains("a DEL of it came"), "{error}");
    before.expect_same(&lab.node)?;
    Pod::add_to(&lab.node, netns, &conf)?.del()?;
    before.expect_same(&lab.node)
}

/// A DEL comes when the ADD has its pair: whatever the kernel says to the next change, the ADD says what has happened.
#[rstest]
fn a_del_during_the_steps_of_an_add(
    #[values(
        ("RTM_SETLINK", 0),
        ("RTM_NEWADDR", 0),
        ("RTM_NEWNEIGH", 0),
        FIRST_FILTER,
        HOST_END_UP
    )]
    (change, after): (&str, usize),
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.pod("first")?.del()?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let conf = lab.conf();
    let call = |verb| Call::new(verb).attachment("a", &path, Pod::IFNAME);
    let mut is_detached = false;
    let traced = call("ADD")
        .conf(&conf)
        .run_around_one(&lab.node, change, after, || {
            is_detached = true;
            call("DEL").conf(&conf).run(&lab.node)?.silence()
        })?;
    ensure!(is_detached, "it did not come so far: {:#?}", traced.changes);
    let error = traced.reply.error()?;
    ensure!(
        error.code == 11 && error.msg.contains("a DEL of it came"),
        "{error}"
    );
    before.expect_same(&lab.node)
}

/// A DEL comes when the ADD has all but its last routes, and another ADD of it, which gets the only address of before: what the first one takes
/// back is not the second's, neither the lease nor the host's end, which has the same name.
#[rstest]
fn an_add_after_a_del_that_gets_the_same_address(
    #[values(V4, V6)] family: Family,
    #[values(FIRST_FILTER, HOST_END_UP)] change: (&str, usize),
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let range = match family {
        V4 => {
            json!({ "subnet": "10.22.0.0/24", "rangeStart": "10.22.0.7", "rangeEnd": "10.22.0.7" })
        }
        V6 => {
            json!({ "subnet": "fd00:22::/64", "rangeStart": "fd00:22::7", "rangeEnd": "fd00:22::7" })
        }
    };
    let conf = lab.conf().with_ipam("ranges", json!([[range]]));
    expect_second(&lab, &conf, change, &[family])
}

/// A DEL comes when the programs know the container, and another ADD of it: what the first one takes back is not the second's.
#[rstest]
fn an_add_after_a_del_during_an_add(
    #[values("host port", "no host port")] ports: &str,
    #[values(FIRST_FILTER, HOST_END_UP)] change: (&str, usize),
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = match ports {
        "host port" => lab.conf().with_host_port(8080, 80),
        _ => lab.conf(),
    };
    expect_second(&lab, &conf, change, &Family::BOTH)
}

/// An ADD takes its host port when the DEL has given up those that there were, and has not forgotten the container yet: whoever served it before serves it again.
#[rstest]
#[case::interface("veth", ("RTM_DELLINK", 0))]
#[case::chained("chained", ("flock(/run/underpass/", 3))]
fn a_port_that_is_taken_during_a_del(
    #[case] interface: &str,
    #[case] forgets: (&str, usize),
) -> Result<()> {
    // Behind the two by which the pins are opened, and that of the entries.
    const TAKES_PORTS: (&str, usize) = ("flock(/run/underpass/", 3);
    needs_root!();
    let lab = Lab::new()?;
    let older = lab.pod_with("older", &lab.conf().with_host_port(8080, 80))?;
    let served = || -> Result<()> {
        for family in Family::BOTH {
            let _server = tcp::Server::start(older.netns(), older.at(family, 80))?;
            tcp::visit(lab.world.netns(), SocketAddr::new(family.node(), 8080))?;
        }
        Ok(())
    };
    served().context("before")?;
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let mut conf = lab.conf();
    let _made = if interface == "chained" {
        let made = Pod::add_to(&lab.node, netns, &conf)?;
        let result = made.result().clone();
        for key in ["ipam", "ipMasq"] {
            conf = conf.with(key, Value::Null);
        }
        conf = conf.with("prevResult", result);
        Some(made)
    } else {
        None
    };
    let conf = conf.with_host_port(8080, 80);
    let call = |verb| {
        let call = Call::new(verb).attachment("a", &path, Pod::IFNAME);
        call.conf(&conf)
    };
    let before = Traces::of(&lab.node)?;
    let (arrive, arrival) = mpsc::channel();
    let (release, released) = mpsc::channel();
    thread::scope(|scope| {
        let adding = scope.spawn(|| {
            call("ADD").run_around_one(&lab.node, TAKES_PORTS.0, TAKES_PORTS.1, move || {
                arrive.send(())?;
                Ok(released.recv_timeout(patience::here(LIMIT))?)
            })
        });
        arrival
            .recv_timeout(patience::here(LIMIT))
            .context("no second lock")?;
        let deleted = call("DEL").run_around_one(&lab.node, forgets.0, forgets.1, move || {
            release.send(())?;
            adding.join().expect("it does not panic").map(drop)
        })?;
        deleted.reply.silence()
    })?;
    served().context("afterwards")?;
    before.expect_same(&lab.node)
}

/// What the stack asks for changes when an ADD has looked at it, and `apply` sees that: the ADD does not set back what it saw.
#[test]
fn rules_that_come_during_an_add_stay() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    lab.firewall.set_liberal(true)?;
    lab.pod("first")?.del()?;
    net_dir::put(&lab.node, "10-lab.conflist", &lab.conf())?;
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let conf = lab.conf();
    let call = |verb| {
        let call = Call::new(verb).attachment("a", &path, Pod::IFNAME);
        call.conf(&conf)
    };
    let takes_lock = |change: &&Change| change.what.starts_with("flock(");
    let traced = call("ADD").trace(&lab.node)?;
    let locks = traced.changes.iter().filter(takes_lock).count();
    call("DEL").run(&lab.node)?.silence()?;
    let in_force = || -> Result<Value> {
        let status: Value = serde_json::from_str(&lab.node.underpass(&["status", "--json"])?)?;
        Ok(status["networkStack"]["inForce"].clone())
    };
    // The last one that it takes is for the rules.
    let traced = call("ADD").run_around_one(&lab.node, "flock(", locks - 1, || {
        lab.firewall.set_liberal(false)?;
        lab.node
            .underpass(&["apply", "--net-dir", NET_DIR])
            .map(drop)
    })?;
    traced.reply.result()?;
    ensure!(in_force()? == true, "{:#?}", traced.changes);
    call("DEL").run(&lab.node)?.silence()
}

/// Has an ADD wait before a change while a DEL and another ADD of the container are made. Fails unless the first one fails, and the second one's container
/// has all that it should.
fn expect_second(
    lab: &Lab,
    conf: &Conf,
    (change, after): (&str, usize),
    families: &[Family],
) -> Result<()> {
    lab.pod_with("first", conf)?.del()?;
    let before = Traces::of(&lab.node)?;
    let netns = lab.node.netns().sibling("a")?;
    let path = netns.path().display().to_string();
    let call = |verb| Call::new(verb).attachment("a", &path, Pod::IFNAME);
    let mut second = None;
    let traced = call("ADD")
        .conf(conf)
        .run_around_one(&lab.node, change, after, || {
            call("DEL").conf(conf).run(&lab.node)?.silence()?;
            second = Some(call("ADD").conf(conf).run(&lab.node)?.result()?);
            Ok(())
        })?;
    traced.reply.error()?;
    let second = second.context("the first ADD did not come so far")?;
    let remembered = conf.clone().with("prevResult", second);
    call("CHECK").conf(&remembered).run(&lab.node)?.silence()?;
    for family in families {
        ping::ping(&netns, family.remote())?;
    }
    call("DEL").conf(conf).run(&lab.node)?.silence()?;
    before.expect_same(&lab.node)
}

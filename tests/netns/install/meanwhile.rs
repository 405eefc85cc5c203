//! What others do while a command is in the middle: another install, a mesh that appends itself to the conflist, a runtime with an ADD under way.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::unix::fs::MetadataExt as _,
    thread::{scope, sleep},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rstest::rstest;
use serde_json::json;
use underpass_cni::net_dir;
use underpass_tests::{patience, prelude::*};

use super::{
    fixture::{ASIDE, Attached, CONFLIST, FILE, Files, Machine, NET},
    held::TURN,
};

/// What each ADD takes for its lease.
const LEASES: &str = "/var/lib/cni/networks/pods/lock";

/// Holds the lock of the leases, at which each ADD stops in the middle.
fn hold(machine: &Machine) -> Result<File> {
    let lock = machine.lab.node.netns().run(|| File::open(LEASES))?;
    lock.lock()?;
    Ok(lock)
}

/// Waits until a process waits for the lock of this file, and returns its id.
pub(super) fn await_waiter(what: &str, held: &File) -> Result<Pid> {
    let file = held.metadata()?;
    let device = file.dev();
    let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
    let id = format!("{major:02x}:{minor:02x}:{}", file.ino());
    let end = Instant::now() + patience::here(Duration::from_mins(1));
    loop {
        let locks = fs::read_to_string("/proc/locks")?;
        let waits = |line: &&str| line.contains("-> ") && line.contains(&id);
        if let Some(line) = locks.lines().find(waits) {
            let process = line.split_whitespace().nth(5).context("a process")?;
            return Ok(Pid::from_raw(process.parse()?));
        }
        ensure!(Instant::now() < end, "{what} does not wait: {locks}");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn two_at_once_wait_for_each_other() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.lab.node.underpass(&["load"])?;
    let mtus = ["1300", "1310", "1320", "1330"];
    scope(|scope| {
        let machine = &machine;
        let started =
            mtus.map(|mtu| scope.spawn(move || machine.install(&Family::BOTH, &["--mtu", mtu])));
        started.into_iter().try_for_each(|one| {
            let said = one.join().ok().context("it panicked")??;
            ensure!(said.contains("ok  DEL of both"), "{said}");
            Ok(())
        })
    })?;
    ensure!(machine.leftovers()?.is_empty());
    machine.pod("a")?.del()
}

/// The second one begins when the first one has ended, and not in the middle of it.
#[test]
fn the_later_of_two_is_the_one_that_counts() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&Family::BOTH, &["--mtu", "1300"])?;
    let lock = hold(&machine)?;
    let turn = machine.lab.node.netns().run(|| File::open(TURN))?;
    scope(|scope| {
        let first = scope.spawn(|| machine.install(&Family::BOTH, &["--mtu", "1310"]));
        await_waiter("the self-test", &lock)?;
        let before = machine.files()?;
        let second = scope.spawn(|| machine.run("uninstall", &[]));
        await_waiter("the uninstall", &turn)?;
        ensure!(machine.files()? == before, "it did not wait");
        drop(lock);
        for one in [first, second] {
            one.join().ok().context("it panicked")??;
        }
        Ok(())
    })?;
    ensure!(machine.files()?.is_empty(), "{:?}", machine.files()?);
    Ok(())
}

#[test]
fn what_others_append_during_the_self_test_is_kept() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&[V4], &[])?;
    let mesh = json!({ "type": "istio-cni", "log_level": "debug" });
    let lock = hold(&machine)?;
    scope(|scope| {
        let install = scope.spawn(|| machine.install(&Family::BOTH, &[]));
        await_waiter("the self-test", &lock)?;
        let mut document = machine.conflist()?.context("a conflist")?;
        let plugins = document["plugins"].as_array_mut().context("a list")?;
        plugins.push(mesh.clone());
        machine.write(CONFLIST, document.to_string().as_bytes())?;
        drop(lock);
        let said = install.join().ok().context("it panicked")??;
        ensure!(said.contains("kept what others added: istio-cni"), "{said}");
        Ok(())
    })?;
    let after = machine.conflist()?.context("a conflist")?;
    ensure!(after["plugins"][1] == mesh, "{after}");
    let ranges = after["plugins"][0]["ipam"]["ranges"].as_array();
    ensure!(ranges.map(Vec::len) == Some(2), "{after}");
    Ok(())
}

/// A runtime has read the conflist, and its ADD is in the middle when the conflist goes: the container gets its network, and the node keeps
/// its own.
#[test]
fn an_add_under_way_is_awaited() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&Family::BOTH, &[])?;
    let before = machine.files()?;
    let lock = hold(&machine)?;
    let pod = scope(|scope| {
        let pod = scope.spawn(|| machine.pod("late"));
        let add = stop(lock)?;
        let uninstall = scope.spawn(|| machine.error("uninstall", &[]));
        await_gone(&machine)?;
        kill(add, Signal::SIGCONT)?;
        let error = uninstall.join().ok().context("it panicked")??;
        ensure!(error.contains("1 container is attached"), "{error}");
        pod.join().ok().context("it panicked")?
    })?;
    let names = |files: &Files| files.keys().cloned().collect::<Vec<_>>();
    ensure!(names(&machine.files()?) == names(&before), "a file is gone");
    let other = machine.pod("other")?;
    for family in Family::BOTH {
        ping::ping(pod.netns(), other.ip(family))?;
    }
    pod.del()?;
    other.del()?;
    machine.run("uninstall", &[])?;
    ensure!(machine.files()?.is_empty(), "{:?}", machine.files()?);
    Ok(())
}

/// What an ADD has opened stays what is loaded until it has ended; then it is in use.
#[test]
fn an_unload_awaits_an_add_under_way() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&Family::BOTH, &[])?;
    let lock = hold(&machine)?;
    let pod = scope(|scope| {
        let pod = scope.spawn(|| machine.pod("late"));
        await_waiter("the ADD", &lock)?;
        let unload = scope.spawn(|| machine.lab.node.underpass_error(&["unload"]));
        sleep(Duration::from_millis(300));
        drop(lock);
        let error = unload.join().ok().context("it panicked")??;
        ensure!(error.contains("1 container is attached"), "{error}");
        pod.join().ok().context("it panicked")?
    })?;
    for family in Family::BOTH {
        ping::ping(pod.netns(), family.remote())?;
    }
    pod.del()
}

/// An ADD that its runtime gives up keeps nobody from leaving.
#[rstest]
fn an_add_that_is_killed_is_awaited_no_more(#[values(false, true)] force: bool) -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&Family::BOTH, &[])?;
    let lock = hold(&machine)?;
    let force: &[&str] = if force { &["--force"] } else { &[] };
    scope(|scope| {
        let pod = scope.spawn(|| machine.pod("given-up").map(drop));
        let add = stop(lock)?;
        let uninstall = scope.spawn(|| machine.run("uninstall", force));
        await_gone(&machine)?;
        kill(add, Signal::SIGKILL)?;
        let outcome = pod.join().ok().context("it panicked")?;
        ensure!(outcome.is_err(), "a killed ADD succeeded");
        let said = uninstall.join().ok().context("it panicked")??;
        ensure!(
            said.starts_with("waiting for calls that are under way"),
            "{said}"
        );
        Ok(())
    })?;
    ensure!(machine.files()?.is_empty(), "{:?}", machine.files()?);
    Ok(())
}

/// An uninstall that is killed while it waits for an ADD, and the container of that ADD.
fn killed_in_the_middle<'a>(machine: &'a Machine, name: &str) -> Result<Attached<'a>> {
    let lock = hold(machine)?;
    scope(|scope| {
        let pod = scope.spawn(|| machine.pod(name));
        let add = stop(lock)?;
        let uninstall = machine.start_uninstall()?;
        await_gone(machine)?;
        drop(uninstall);
        kill(add, Signal::SIGCONT)?;
        pod.join().ok().context("it panicked")?
    })
}

/// Whoever is killed while he waits has not forgotten which network it was.
#[rstest]
#[case::puts_back(&[])]
#[case::writes_another_mtu(&["--range", V4.pods(), "--range", V6.pods(), "--mtu", "1300"])]
fn what_a_killed_uninstall_had_set_aside_an_install(#[case] install: &[&str]) -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    let keys = ["--mtu", "1400", "--config", r#"{"bypass": "off"}"#];
    machine.install(&Family::BOTH, &keys)?;
    // Others write as they like, and it is as they left it.
    let mut text = machine.read(CONFLIST)?.context("a conflist")?;
    text.push(b'\n');
    machine.write(CONFLIST, &text)?;
    let pod = killed_in_the_middle(&machine, "late")?;
    ensure!(machine.names(NET)? == BTreeSet::from([ASIDE.to_owned()]));
    let seen = machine
        .lab
        .node
        .netns()
        .run(|| net_dir::read(NET.as_ref()))?;
    ensure!(seen.is_empty(), "a runtime reads it: {seen:?}");

    let said = machine.run("install", install)?;
    ensure!(said.contains("put back    /run/opt/net.d"), "{said}");
    ensure!(!said.contains("no conflist"), "{said}");
    ensure!(machine.names(NET)? == BTreeSet::from([FILE.to_owned()]));
    if install.is_empty() {
        ensure!(machine.read(CONFLIST)? == Some(text), "{said}");
    } else {
        let now = machine.conflist()?.context("a conflist")?;
        ensure!(now["plugins"][0]["mtu"] == 1300, "{now}");
    }
    let other = machine.pod("other")?;
    for family in Family::BOTH {
        ping::ping(pod.netns(), other.ip(family))?;
    }
    pod.del()?;
    other.del()
}

/// The next uninstall goes on from it, or puts it back where it is refused.
#[test]
fn what_a_killed_uninstall_had_begun_the_next_one_ends() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&Family::BOTH, &[])?;
    let before = machine.read(CONFLIST)?;
    let pod = killed_in_the_middle(&machine, "late")?;
    let error = machine.error("uninstall", &[])?;
    ensure!(error.contains("1 container is attached"), "{error}");
    ensure!(machine.read(CONFLIST)? == before, "it is not put back");
    ensure!(machine.names(NET)? == BTreeSet::from([FILE.to_owned()]));
    pod.del()?;
    killed_in_the_middle(&machine, "later")?.del()?;
    let said = machine.run("uninstall", &[])?;
    ensure!(said.contains("going on with the network of"), "{said}");
    ensure!(machine.files()?.is_empty(), "{:?}", machine.files()?);
    Ok(())
}

/// Whoever writes a new conflist meanwhile knows what he wants.
#[rstest]
fn what_is_written_after_a_killed_uninstall_wins(
    #[values("install", "uninstall")] next: &str,
) -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&Family::BOTH, &[])?;
    let mut document = machine.conflist()?.context("a conflist")?;
    killed_in_the_middle(&machine, "late")?.del()?;
    document["plugins"][0]["mtu"] = 1300.into();
    let text = document.to_string().into_bytes();
    machine.write(CONFLIST, &text)?;
    let said = machine.run(next, &[])?;
    ensure!(
        said.contains("10-underpass.conflist is there again"),
        "{said}"
    );
    if next == "install" {
        ensure!(machine.read(CONFLIST)? == Some(text), "{said}");
        ensure!(machine.names(NET)? == BTreeSet::from([FILE.to_owned()]));
    } else {
        ensure!(machine.files()?.is_empty(), "{:?}", machine.files()?);
    }
    Ok(())
}

/// Stops the ADD that waits for the lock: it has all of the node's maps open, and no lock that anybody waits for.
fn stop(lock: File) -> Result<Pid> {
    let add = await_waiter("the ADD", &lock)?;
    kill(add, Signal::SIGSTOP)?;
    // Until it has stopped it could still take the lock.
    let end = Instant::now() + patience::here(Duration::from_mins(1));
    while !fs::read_to_string(format!("/proc/{add}/stat"))?.contains(") T ") {
        ensure!(Instant::now() < end, "the ADD does not stop");
        sleep(Duration::from_millis(5));
    }
    drop(lock);
    Ok(add)
}

fn await_gone(machine: &Machine) -> Result<()> {
    let end = Instant::now() + patience::here(Duration::from_mins(1));
    while machine.read(CONFLIST)?.is_some() {
        ensure!(Instant::now() < end, "the conflist does not go");
        sleep(Duration::from_millis(5));
    }
    Ok(())
}

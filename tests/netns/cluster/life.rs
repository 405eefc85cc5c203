//! What becomes of a node whose agent is killed, started anew, and given other ranges: a runtime always finds a network that works, or
//! none, and what others wrote into it.

use std::{
    collections::BTreeSet,
    fs,
    net::IpAddr,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread::{scope, sleep},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    another_build,
    node::{cni_path, plugin},
    patience,
    prelude::*,
    runtime::Call,
};

use super::{
    fixture::Cluster,
    member::{BIN, Member, NET},
};

/// Where the leases of the network are.
const LEASES: &str = "/var/lib/cni/networks/pods";

/// What can be seen of a cold start, in the order of its steps.
#[derive(Clone, Copy, Debug)]
enum Step {
    Nothing,
    Device,
    Routes,
    Plugin,
    Allocator,
    Links,
    Programs,
    SelfTest,
    Conflist,
}

impl Step {
    fn is_seen(self, member: &Member) -> Result<bool> {
        let is_there = |path: String| member.node.netns().run(|| Ok(fs::exists(path)?));
        match self {
            Self::Nothing => Ok(true),
            Self::Device => Ok(member.node.netns().ifindex("underpass-vxlan").is_ok()),
            Self::Routes => Ok(!member.routes()?.is_empty()),
            Self::Plugin => is_there(format!("{BIN}/underpass")),
            Self::Allocator => is_there(format!("{BIN}/underpass-ipam")),
            Self::Links => is_there(format!("{BIN}/bandwidth")),
            Self::Programs => is_there(member.node.bpf_root().display().to_string()),
            Self::SelfTest => Ok(!leases(member)?.is_empty()),
            Self::Conflist => Ok(member.conflist()?.is_some()),
        }
    }
}

/// What SIGKILL comes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Killed {
    /// The agent: what it runs goes on, and ends what it has begun.
    Alone,
    /// All that runs in the agent's container.
    WithItsCommands,
}

#[rstest]
fn a_killed_cold_start_goes_on_with_the_next_agent(
    #[values(
        Step::Nothing,
        Step::Device,
        Step::Routes,
        Step::Plugin,
        Step::Allocator,
        Step::Links,
        Step::Programs,
        Step::SelfTest,
        Step::Conflist
    )]
    step: Step,
    #[values(Killed::Alone, Killed::WithItsCommands)] killed: Killed,
) -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::cold(&[0, 0, 1])?;
    let before = devices(&cluster.members[0])?;
    cluster.members[0].start_agent()?;
    let member = &cluster.members[0];
    watched(member, "first", || {
        poll(&format!("{step:?}"), || step.is_seen(member))?;
        member.running()?.kill(killed == Killed::WithItsCommands)
    })?;
    cluster.members[0].stop_agent(Signal::SIGKILL);
    cluster.members[0].start_agent()?;
    let member = &cluster.members[0];
    let adds = watched(member, "second", || {
        cluster.settle_one(member)?;
        member.is_ready()
    })?;
    eprintln!("{adds} containers came while the second agent started");
    // Whoever goes on after the first agent holds the folders until it ends.
    eventually("nothing is left in the middle", || {
        let hidden = hidden(member)?;
        ensure!(hidden.is_empty(), "{hidden:?}");
        let leases = leases(member)?;
        ensure!(leases.is_empty(), "{leases:?}");
        let mut expected = before.clone();
        expected.insert("underpass-vxlan".to_owned());
        let devices = devices(member)?;
        ensure!(devices == expected, "{devices:?}");
        Ok(())
    })?;
    ensure!(sound(member, "last")?, "there is no conflist");
    Ok(())
}

#[test]
fn what_others_appended_survives_all_that_an_agent_does() -> Result<()> {
    needs_root!();
    let mut cluster = Cluster::new(&[0, 0])?;
    cluster.settle()?;
    cluster.members[0].is_ready()?;
    let mesh = json!({"type": "istio-cni", "kubernetes": {"intervals": 5}});
    let tuning = json!({"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}});
    let mut document = cluster.members[0].conflist()?.context("a conflist")?;
    let list = document["plugins"].as_array_mut().context("a list")?;
    list.extend([mesh.clone(), tuning.clone()]);
    let path = format!("{NET}/10-underpass.conflist");
    let netns = cluster.members[0].node.netns().clone();
    netns.run(|| fs::write(&path, document.to_string()))?;
    let expect = |member: &Member, subnets: &[String]| -> Result<()> {
        let found = member.conflist()?.context("a conflist")?;
        let plugins = found["plugins"].as_array().context("a list")?;
        let [ours, others @ ..] = &plugins[..] else {
            anyhow::bail!("no plugin in {found}");
        };
        ensure!(others == [mesh.clone(), tuning.clone()], "{found}");
        let ranges: Vec<Value> = subnets.iter().map(|net| json!([{"subnet": net}])).collect();
        ensure!(ours["ipam"]["ranges"] == Value::from(ranges), "{found}");
        Ok(())
    };

    // A restart.
    cluster.members[0].stop_agent(Signal::SIGKILL);
    cluster.members[0].start_agent()?;
    let member = &cluster.members[0];
    member.is_ready()?;
    expect(member, &member.ranges())?;

    // Another version.
    let build = another_build::make(&member.node)?;
    let bytes = netns.run(|| fs::read(&build))?;
    cluster.members[0].stop_agent(Signal::SIGTERM);
    let build = build.display().to_string();
    cluster.members[0].start_agent_with(&["--resync", "2", "--underpass", &build])?;
    let member = &cluster.members[0];
    member.is_ready()?;
    let installed = netns.run(|| fs::read(format!("{BIN}/underpass")))?;
    ensure!(installed == bytes, "the other build is not installed");
    expect(member, &member.ranges())?;

    // Deleted and registered again, with other ranges.
    cluster.api.delete(&member.name);
    let moved = ["10.244.77.0/24", "fd00:244:77::/64"].map(str::to_owned);
    cluster.api.set(&member.name, &member.addresses(), &moved);
    eventually("the other ranges", || expect(member, &moved))?;
    cluster.api.delete(&member.name);
    cluster.register(member);
    eventually("the ranges of before", || expect(member, &member.ranges()))
}

/// Does something while whatever a runtime could find is looked at, by a witness of this name. Returns how many containers came and went.
fn watched(member: &Member, witness: &str, work: impl FnOnce() -> Result<()>) -> Result<u32> {
    let is_over = AtomicBool::new(false);
    scope(|scope| {
        let watching = scope.spawn(|| {
            let mut adds = 0;
            while !is_over.load(Ordering::Relaxed) {
                adds += u32::from(sound(member, &format!("{witness}{adds}"))?);
            }
            Ok(adds)
        });
        let outcome = work();
        is_over.store(true, Ordering::Relaxed);
        let seen = watching.join().ok().context("the witness panicked")?;
        outcome.and(seen)
    })
}

/// Fails unless a runtime finds whole files, and a network whose ADD works or none: whether there is one.
fn sound(member: &Member, name: &str) -> Result<bool> {
    for (file, origin) in [
        ("underpass", plugin().to_owned()),
        ("underpass-ipam", plugin().with_file_name("underpass-ipam")),
    ] {
        if let Some(executable) = member.read(&format!("{BIN}/{file}"))? {
            ensure!(executable == fs::read(origin)?, "half of {file}");
        }
    }
    let Some(document) = member.conflist()? else {
        return Ok(false);
    };
    let mut conf = document["plugins"][0].clone();
    for key in ["name", "cniVersion"] {
        conf[key] = document[key].clone();
    }
    let netns = member.node.netns().sibling(name)?;
    let call = |verb: &str, conf: &Value| {
        Call::new(verb)
            .by(&Path::new(BIN).join("underpass"))
            .env("CNI_PATH", &cni_path())
            .attachment(
                netns.name(),
                &netns.path().display().to_string(),
                Pod::IFNAME,
            )
            .stdin(conf.to_string().as_bytes())
            .run(&member.node)
    };
    let result = call("ADD", &conf)?.result()?;
    conf["prevResult"] = result;
    call("DEL", &conf)?.silence()?;
    Ok(true)
}

fn leases(member: &Member) -> Result<BTreeSet<String>> {
    let mut names = member.names(LEASES)?;
    names.retain(|name| name.parse::<IpAddr>().is_ok());
    Ok(names)
}

fn hidden(member: &Member) -> Result<BTreeSet<String>> {
    let mut names = member.names(BIN)?;
    names.extend(member.names(NET)?);
    names.retain(|name| name.starts_with('.'));
    Ok(names)
}

fn devices(member: &Member) -> Result<BTreeSet<String>> {
    let list = member.node.netns().ip_json(&["link"])?;
    let list = list.as_array().context("a list")?;
    let names = list.iter().filter_map(|link| link["ifname"].as_str());
    Ok(names.map(str::to_owned).collect())
}

/// Looks so often that no step is over before it is seen.
fn poll(what: &str, is_seen: impl Fn() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + patience::here(Duration::from_mins(1));
    while !is_seen()? {
        ensure!(Instant::now() < end, "{what} never came");
        sleep(Duration::from_millis(1));
    }
    Ok(())
}

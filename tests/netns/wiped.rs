//! The bpffs is wiped, or mounted anew, under containers that run: the pins are gone, and what is attached is not.

use std::{fs, net::SocketAddr};

use rstest::rstest;
use serde_json::Value;
use underpass_tests::{
    another_build,
    counter::Registry,
    leak::Traces,
    node::plugin,
    prelude::*,
    runtime::{Call, Conf},
};

const PORT: u16 = 8080;
const INSIDE: u16 = 80;
/// Where the world serves.
const REMOTE: u16 = 443;

fn wipe(node: &Node) -> Result<()> {
    node.netns()
        .run(|| fs::remove_dir_all(node.bpf_root()))
        .context("wipe the bpffs")
}

fn mapped(lab: &Lab) -> Conf {
    lab.conf().with_host_port(PORT, INSIDE)
}

fn gc(lab: &Lab, valid: &[&Pod]) -> Result<()> {
    let attachments: Vec<Value> = valid
        .iter()
        .map(|pod| serde_json::json!({ "containerID": pod.name(), "ifname": Pod::IFNAME }))
        .collect();
    let conf = lab.conf().with("cni.dev/valid-attachments", attachments);
    Call::new("GC").conf(&conf).run(&lab.node)?.silence()
}

/// Until something is loaded again, everything goes on: what is attached keeps its maps. STATUS, CHECK and the command line say that the
/// containers have to be recreated.
#[rstest]
fn what_runs_goes_on_and_it_is_said(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod_with("a", &mapped(&lab))?;
    let remote = family.remote_at(REMOTE);
    let served = SocketAddr::new(family.node(), PORT);
    let _inside = tcp::Server::start(pod.netns(), pod.at(family, INSIDE))?;
    let _beyond = tcp::Server::start(lab.world.netns(), remote)?;
    let mut connections = [
        tcp::Client::connect(pod.netns(), remote)?,
        tcp::Client::connect(lab.world.netns(), served)?,
    ];
    wipe(&lab.node)?;

    for connection in &mut connections {
        connection.chat(3)?;
    }
    // New ones as well: masqueraded, and by the host port.
    ensure!(tcp::visit(pod.netns(), remote)? == family.node());
    tcp::visit(lab.world.netns(), served)?;

    is_left_behind(&lab, &pod)?;
    let error = pod.call_with_result("CHECK").run(&lab.node)?.error()?;
    ensure!(error.msg.contains("no programs are loaded"), "{error}");
    pod.del()
}

/// Whatever loads again knows nothing of the containers from before, and goes on saying so. New containers, and those of before that
/// are recreated, have everything.
#[rstest]
fn what_is_loaded_again_knows_no_container_of_before(
    #[values(V4, V6)] family: Family,
    #[values("load", "ADD")] how: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let before = lab.pod_with("before", &mapped(&lab))?;
    let idle = lab.pod("idle")?;
    wipe(&lab.node)?;
    let mut new = None;
    if how == "load" {
        let said = lab.node.underpass(&["load"])?;
        for pod in [&before, &idle] {
            ensure!(said.contains(pod.host_veth()), "{said}");
        }
    } else {
        new = Some(lab.pod("new")?);
    }
    for pod in [&before, &idle] {
        is_left_behind(&lab, pod)?;
        let error = pod.call_with_result("CHECK").run(&lab.node)?.error()?;
        ensure!(error.msg.contains("OWNERS"), "{error}");
    }
    // Nobody takes them for dead.
    gc(&lab, &[&before, &idle])?;
    lab.node
        .netns()
        .ip_json(&["link", "show", "dev", before.host_veth()])?;
    // The uplink has the new programs: no masquerade, but the routes are there.
    let remote = family.remote_at(REMOTE);
    let _beyond = tcp::Server::start(lab.world.netns(), remote)?;
    tcp::refuses(before.netns(), remote)?;
    lab.world.route_pods()?;
    ensure!(tcp::visit(before.netns(), remote)? == before.ip(family));

    // Recreated, as the runtime does it: a DEL, and an ADD.
    let netns = before.netns().clone();
    before.del()?;
    let again = Pod::add_to(&lab.node, netns, &mapped(&lab))?;
    again.call_with_result("CHECK").run(&lab.node)?.silence()?;
    let _inside = tcp::Server::start(again.netns(), again.at(family, INSIDE))?;
    ensure!(tcp::visit(again.netns(), remote)? == family.node());
    tcp::visit(lab.world.netns(), SocketAddr::new(family.node(), PORT))?;
    let said = status(&lab)?;
    ensure!(!said.contains(again.host_veth()), "{said}");
    // The other one has still its old programs: the DEL, and GC after a lost one, find it all the same.
    if new.is_some() {
        idle.del()?;
    } else {
        idle.abandon();
        gc(&lab, &[&again])?;
    }
    drop(new);
    again.del()?;
    let traces = Traces::of(&lab.node)?;
    ensure!(traces.leases.is_empty(), "{traces:#?}");
    ensure!(traces.registry == Registry::default(), "{traces:#?}");
    ensure!(
        traces.devices.iter().all(|name| !name.starts_with("veth")),
        "{traces:#?}"
    );
    Ok(())
}

/// As the agent of a cluster runs it, each minute.
const INSTALL: [&str; 6] = [
    "install",
    "--upgrade",
    "--bin-dir",
    "/run/opt/bin",
    "--net-dir",
    "/run/opt/net.d",
];

/// Nobody has asked for new programs, which would take masquerade and host ports from those that run: they are moved first.
#[rstest]
fn an_install_waits_until_those_of_before_are_gone(
    #[values(V4, V6)] family: Family,
    #[values(true, false)] may_upgrade: bool,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let mut install = INSTALL.to_vec();
    install.retain(|argument| may_upgrade || *argument != "--upgrade");
    let before = lab.pod_with("before", &mapped(&lab))?;
    let remote = family.remote_at(REMOTE);
    let served = SocketAddr::new(family.node(), PORT);
    let _inside = tcp::Server::start(before.netns(), before.at(family, INSIDE))?;
    let _beyond = tcp::Server::start(lab.world.netns(), remote)?;
    lab.node.underpass(&install)?;
    wipe(&lab.node)?;
    for _ in 0..2 {
        let said = lab.node.underpass_error(&install)?;
        ensure!(
            said.contains(before.host_veth()) && said.contains("underpass load"),
            "{said}"
        );
        let said = lab.node.underpass(&["apply"])?;
        ensure!(said.starts_with("nothing is loaded"), "{said}");
        ensure!(tcp::visit(before.netns(), remote)? == family.node());
        tcp::visit(lab.world.netns(), served)?;
    }

    let netns = before.netns().clone();
    before.del()?;
    let said = lab.node.underpass(&install)?;
    ensure!(said.contains("all programs are loaded"), "{said}");
    ensure!(!said.contains("left behind"), "{said}");
    let again = Pod::add_to(&lab.node, netns, &mapped(&lab))?;
    ensure!(tcp::visit(again.netns(), remote)? == family.node());
    again.del()
}

/// Whatever has loaded has been asked to: an ADD, or somebody who does not mind. What is left behind is named as long as it is there.
/// They have lost all that they could.
#[test]
fn an_install_does_not_wait_for_those_that_nothing_serves() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let before = lab.pod("before")?;
    lab.node.underpass(&["unload", "--force"])?;
    let said = lab.node.underpass(&INSTALL)?;
    ensure!(said.contains("all programs are loaded"), "{said}");
    let named = format!("left behind: {}", before.host_veth());
    ensure!(said.lines().any(|line| line.starts_with(&named)), "{said}");
    before.del()
}

#[rstest]
fn an_install_names_those_of_before_once_something_is_loaded(
    #[values("load", "ADD")] how: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let before = lab.pod("before")?;
    wipe(&lab.node)?;
    let mut new = None;
    if how == "load" {
        lab.node.underpass(&["load"])?;
    } else {
        new = Some(lab.pod("new")?);
    }
    let named = format!("left behind: {}", before.host_veth());
    // Another build adds no programs to those that an ADD has loaded.
    let build = another_build::make(&lab.node)?;
    for program in [build.as_path(), plugin(), plugin()] {
        let said = lab.node.underpass_of(program, &INSTALL)?;
        ensure!(said.lines().any(|line| line.starts_with(&named)), "{said}");
        ensure!(said.matches("left behind: ").count() == 1, "{said}");
    }
    before.del()?;
    let said = lab.node.underpass(&INSTALL)?;
    ensure!(!said.contains("left behind"), "{said}");
    drop(new);
    Ok(())
}

/// What STATUS says on its standard error.
fn status(lab: &Lab) -> Result<String> {
    let reply = Call::new("STATUS").conf(&lab.conf()).run(&lab.node)?;
    reply.silence()?;
    Ok(reply.stderr)
}

fn is_left_behind(lab: &Lab, pod: &Pod) -> Result<()> {
    let said = status(lab)?;
    ensure!(
        said.contains(pod.host_veth()) && said.contains("recreate"),
        "{said}"
    );
    let said = lab.node.underpass(&["status", "--json"])?;
    let status: Value = serde_json::from_str(&said)?;
    let left = status["leftBehind"].as_array().context("a list")?;
    ensure!(left.contains(&pod.host_veth().into()), "{said}");
    Ok(())
}

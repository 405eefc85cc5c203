//! Whose pins these are: those of another network namespace are left alone while it exists, and made anew
//! when it has ended.

use std::{
    fs,
    process::Command,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rstest::rstest;
use serde_json::Value;
use underpass_abi::ABI;
use underpass_tests::{
    counter::{Registry, pins},
    leak::Traces,
    netns::Netns,
    patience,
    prelude::*,
    runtime::{Call, CniError, Conf},
};

fn call(verb: &str, netns: &Netns, conf: &Conf) -> Call {
    let path = netns.path().display().to_string();
    Call::new(verb)
        .attachment(netns.name(), &path, Pod::IFNAME)
        .conf(conf)
}

fn expect_refusal(error: &CniError, code: u64, lab: &Lab) -> Result<()> {
    let root = lab.node.bpf_root().display().to_string();
    ensure!(error.code == code, "{error}");
    for word in ["bpfRoot", &root, "another network namespace"] {
        ensure!(error.msg.contains(word), "{error} lacks {word:?}");
    }
    Ok(())
}

/// Two nodes see one bpffs, as nodes in containers do that were given the host's.
#[rstest]
fn a_living_node_keeps_its_pins(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    let other = lab.node.beside()?;
    let conf = Conf::new(&other).with("bpfRoot", lab.node.bpf_root().display().to_string());
    let stranger = other.netns().sibling("stranger")?;
    let (before, theirs) = (Traces::of(&lab.node)?, Traces::of(&other)?);

    let error = call("ADD", &stranger, &conf).run(&other)?.error()?;
    expect_refusal(&error, 5, &lab)?;
    let error = Call::new("STATUS").conf(&conf).run(&other)?.error()?;
    expect_refusal(&error, 50, &lab)?;
    let gc = conf
        .clone()
        .with("cni.dev/valid-attachments", Vec::<Value>::new());
    let error = Call::new("GC").conf(&gc).run(&other)?.error()?;
    expect_refusal(&error, 5, &lab)?;
    // What was never attached is detached.
    call("DEL", &stranger, &conf).run(&other)?.silence()?;
    let taken = pod.call("DEL").conf(&conf);
    expect_refusal(&taken.run(&other)?.error()?, 5, &lab)?;
    for command in ["status", "flows", "unload"] {
        let said = other.underpass_error(&[
            "--bpf-root",
            &lab.node.bpf_root().display().to_string(),
            command,
        ])?;
        ensure!(said.contains("another network namespace"), "{said}");
    }

    theirs.expect_same(&other)?;
    before.expect_same(&lab.node)?;
    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    ping::ping(pod.netns(), family.remote())
}

/// A node in a container was started anew: its bpffs is the one of before, its devices are not.
#[rstest]
fn what_a_node_that_is_gone_has_left_is_made_anew(
    #[values(V4, V6)] family: Family,
    #[values("ADD", "unload")] how: &str,
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let gone = Arc::new(lab.node.beside()?);
    let root = gone.bpf_root().display().to_string();
    let dead = Pod::add(&gone, "dead", &Conf::new(&gone).with_host_port(8080, 80))?;
    dead.netns().unlink()?;
    gone.netns().unlink()?;
    dead.abandon();
    drop(gone);

    let conf = lab.conf().with("bpfRoot", root.clone());
    // The kernel takes namespaces away when it has the time.
    let start = Instant::now();
    let status = || Call::new("STATUS").conf(&conf).run(&lab.node)?.silence();
    while let Err(error) = status() {
        ensure!(
            start.elapsed() < patience::here(Duration::from_secs(10)),
            "{error:#}"
        );
        thread::sleep(Duration::from_millis(20));
    }
    if how == "unload" {
        // Nobody of it can be alive.
        let arguments = ["--bpf-root", &root, "unload"];
        let said = lab.node.underpass(&arguments)?;
        ensure!(said.contains(&format!("{root}/v{ABI}")), "{said}");
    }
    let pod = lab.pod_with("a", &conf)?;
    ping::ping(pod.netns(), family.remote())?;
    let said = lab
        .node
        .underpass(&["--bpf-root", &root, "status", "--json"])?;
    let status: Value = serde_json::from_str(&said)?;
    let endpoints = status["endpoints"].as_array().map(Vec::len);
    ensure!(endpoints == Some(2), "{said}");
    ensure!(
        status["hostPorts"].as_array().is_some_and(Vec::is_empty),
        "{said}"
    );
    pod.call_with_result("CHECK").run(&lab.node)?.silence()?;
    pod.del()
}

/// What another version of the plugin has left has another number, and maps that this one can't read.
#[test]
fn unload_takes_away_what_another_version_has_left() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let pod = lab.pod_with("a", &lab.conf().with_host_port(8080, 80))?;
    let node = &lab.node;
    let older = node.bpf_root().join("v3");
    node.netns()
        .run(|| fs::rename(pins(node), &older))
        .context("give the pins another number")?;

    let status: Value = serde_json::from_str(&node.underpass(&["status", "--json"])?)?;
    ensure!(
        status["loaded"] == false && status["otherLayouts"][0] == 3,
        "{status}"
    );
    ensure!(node.underpass(&["status"])?.contains("layout 3"));
    let said = node.underpass_error(&["unload"])?;
    ensure!(said.contains("1 container is attached"), "{said}");
    let said = node.underpass(&["unload", "--force"])?;
    for device in [Node::UPLINK, "lo", pod.host_veth()] {
        ensure!(said.contains(&format!("detached from {device}")), "{said}");
        for direction in ["ingress", "egress"] {
            let mut tc = Command::new("tc");
            tc.args(["filter", "show", "dev", device, direction]);
            let filters = node.netns().expect(&mut tc, &[])?;
            ensure!(!filters.contains("underpass"), "{filters}");
        }
    }
    ensure!(!node.netns().run(|| older.exists()));
    ensure!(Registry::read(node)? == Registry::default());
    pod.call("DEL").run(node)?.silence()
}

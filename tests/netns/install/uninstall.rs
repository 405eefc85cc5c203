//! What `underpass uninstall` takes away and what it leaves, and whom it asks first.

use std::fs;

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{leak::Traces, prelude::*};

use super::fixture::{BIN, CONFLIST, Machine, NET, ranges};

#[test]
fn uninstall_leaves_nothing_of_ours_and_all_of_others() -> Result<()> {
    needs_root!();
    let machine = Machine::unloaded()?;
    machine.make_folders()?;
    for other in [
        "/run/opt/bin/bridge",
        "/run/opt/bin/portmap",
        "/run/opt/net.d/99-other.conflist",
        "/run/opt/net.d/notes.txt",
        "/var/lib/cni/networks/other/10.1.2.3",
    ] {
        machine.write(other, br#"{"plugins": [{"type": "bridge"}]}"#)?;
    }
    machine.link("bridge", "macvlan")?;
    let others = machine.files()?;
    let traces = Traces::of(&machine.lab.node)?;
    machine.install(&Family::BOTH, &[])?;
    let pod = machine.pod("a")?;

    let before = machine.files()?;
    let error = machine.error("uninstall", &[])?;
    ensure!(error.contains("1 container is attached"), "{error}");
    ensure!(machine.files()? == before);

    pod.del()?;
    let said = machine.run("uninstall", &[])?;
    ensure!(machine.files()? == others, "{said}: {:?}", machine.files()?);
    let now = Traces::of(&machine.lab.node)?;
    ensure!(now.devices == traces.devices, "{:?}", now.devices);
    ensure!(now.pins == traces.pins, "{:?}", now.pins);
    // Again: there is nothing to do.
    let said = machine.run("uninstall", &[])?;
    ensure!(!said.contains("removed"), "{said}");
    Ok(())
}

#[rstest]
fn leases_are_left_unless_forced(#[values(false, true)] forced: bool) -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&[V4], &[])?;
    let lease = "/var/lib/cni/networks/pods/10.88.0.9";
    machine.write(lease, b"reserved for the printer")?;
    let force: &[&str] = if forced { &["--force"] } else { &[] };
    let said = machine.run("uninstall", force)?;
    ensure!(said.contains("1 addresses are leased") != forced, "{said}");
    let is_there = machine.lab.node.netns().run(|| fs::exists(lease))?;
    ensure!(is_there != forced, "{said}");
    ensure!(
        machine.names(BIN)?.is_empty() && machine.names(NET)?.is_empty(),
        "{said}"
    );
    Ok(())
}

#[test]
fn a_network_with_containers_keeps_its_name_and_its_leases() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&Family::BOTH, &["--name", "old"])?;
    let pod = machine.pod("a")?;
    let before = machine.read(CONFLIST)?;
    let error = machine.error("install", &ranges(&Family::BOTH))?;
    ensure!(error.contains("say --name old"), "{error}");
    ensure!(machine.read(CONFLIST)? == before, "the conflist changed");
    machine.install(&Family::BOTH, &["--name", "old"])?;
    pod.del()?;
    machine.install(&Family::BOTH, &[])?;
    Ok(())
}

#[test]
fn a_network_of_another_shape_is_somebodys() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.make_folders()?;
    let text = br#"{"cniVersion": "1.0.0", "name": "mine", "type": "bridge"}"#;
    machine.write(CONFLIST, text)?;
    for (verb, arguments) in [("install", ranges(&Family::BOTH)), ("uninstall", vec![])] {
        let error = machine.error(verb, &arguments)?;
        ensure!(error.contains("move it away"), "{verb}: {error}");
        ensure!(
            machine.read(CONFLIST)?.as_deref() == Some(&text[..]),
            "{verb} changed it"
        );
    }
    Ok(())
}

#[test]
fn uninstall_asks_whether_anybody_needs_the_plugin() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&Family::BOTH, &[])?;
    let whole = machine.names(BIN)?;
    let refused = |why: &str| -> Result<()> {
        let error = machine.error("uninstall", &[])?;
        ensure!(error.contains(why), "{why}: {error}");
        ensure!(machine.names(BIN)? == whole, "{why}: a file went");
        ensure!(machine.conflist()?.is_some(), "{why}: the conflist went");
        Ok(())
    };
    // Another network that needs one of our names.
    let other = format!("{NET}/20-other.conflist");
    for plugin in [
        json!({ "type": "bridge", "ipam": { "type": "underpass-ipam" } }),
        json!({ "type": "underpass" }),
        json!({ "type": "portmap" }),
    ] {
        let list = json!({ "name": "other", "plugins": [plugin] });
        machine.write(&other, list.to_string().as_bytes())?;
        refused("20-other.conflist")?;
    }
    // One that needs it, and has lost its last brace.
    machine.write(
        &other,
        br#"{"name": "other", "plugins": [{"type": "bridge", "ipam": {"type": "host-local"}}]"#,
    )?;
    refused("20-other.conflist")?;
    machine.write(
        &other,
        br#"{"name": "other", "plugins": [{"type": "bridge"}]}"#,
    )?;
    // A container that has outlived the pins.
    let pod = machine.pod("a")?;
    refused("1 container is attached")?;
    machine.lab.node.underpass(&["unload", "--force"])?;
    refused("1 container is attached")?;
    drop(pod);
    // Programs that are elsewhere.
    let mut elsewhere = machine.conflist()?.context("a conflist")?;
    elsewhere["plugins"][0]["bpfRoot"] = "/sys/fs/bpf/elsewhere".into();
    machine.write(CONFLIST, elsewhere.to_string().as_bytes())?;
    refused("--bpf-root")
}

/// Multus hands containers on to our network, in whichever of its ways it is told so.
#[rstest]
#[case::our_file(&json!({ "clusterNetwork": "/host/run/opt/net.d/10-underpass.conflist" }), "10-underpass.conflist")]
#[case::our_name(&json!({ "clusterNetwork": "pods" }), "names pods")]
#[case::a_further_one(&json!({ "clusterNetwork": "other", "defaultNetworks": ["some", "pods"] }), "names pods")]
#[case::others(&json!({ "clusterNetwork": "other", "defaultNetworks": ["/etc/cni/multus/net.d"] }), "")]
fn uninstall_asks_whether_multus_needs_the_network(
    #[case] keys: &Value,
    #[case] why: &str,
) -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&[V4], &["--no-self-test"])?;
    let mut multus = keys.clone();
    multus["name"] = json!("m");
    multus["type"] = json!("multus-shim");
    let path = format!("{NET}/00-multus.conf");
    machine.write(&path, multus.to_string().as_bytes())?;
    if !why.is_empty() {
        let before = machine.files()?;
        let error = machine.error("uninstall", &[])?;
        ensure!(error.contains(&path) && error.contains(why), "{error}");
        ensure!(machine.files()? == before, "something went");
        machine.lab.node.netns().run(|| fs::remove_file(&path))?;
    }
    machine.run("uninstall", &[])?;
    ensure!(machine.conflist()?.is_none(), "the conflist is there");
    // Nothing of ours can be needed where nothing is.
    machine.write(&path, multus.to_string().as_bytes())?;
    machine.run("uninstall", &[]).map(drop)
}

/// A file that nobody can read keeps nobody who says so from uninstalling, and ours is no other network.
#[test]
fn an_unreadable_network_yields_to_force() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&Family::BOTH, &["--no-self-test"])?;
    machine.write(&format!("{NET}/20-other.conflist"), b"{")?;
    machine.run("uninstall", &["--force"])?;
    ensure!(machine.names(BIN)?.is_empty());
    machine.install(&Family::BOTH, &["--no-self-test"])?;
    machine.write(CONFLIST, b"{")?;
    let error = machine.error("uninstall", &[])?;
    ensure!(error.contains("20-other.conflist"), "{error}");
    machine
        .lab
        .node
        .netns()
        .run(|| fs::remove_file(format!("{NET}/20-other.conflist")))?;
    machine.run("uninstall", &[]).map(drop)
}

//! `underpass install` and `uninstall`: whatever happens in between, a runtime finds a network that works or none.

mod fixture;
mod held;
mod keys;
mod killed;
mod meanwhile;
mod struck;
mod uninstall;

use std::{collections::BTreeSet, fs};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_abi::map;
use underpass_tests::{another_build, counter, prelude::*};

use fixture::{BIN, CONFLIST, Machine, NET};

const LINKS: [&str; 3] = ["loopback", "portmap", "bandwidth"];

#[rstest]
fn a_runtime_uses_what_was_installed(
    #[values(&[V4][..], &[V6][..], &[V4, V6][..], &[V6, V4][..])] families: &[Family],
) -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    let said = machine.install(families, &[])?;
    for word in ["ok  CHECK of both", "ok  DEL of both", "no lease is left"] {
        ensure!(said.contains(word), "{said}");
    }
    let document = machine.conflist()?.context("a conflist")?;
    ensure!(document["cniVersion"] == "1.0.0", "{document}");
    ensure!(document["name"] == "pods", "{document}");
    let ours = &document["plugins"][0];
    ensure!(
        ours["capabilities"] == json!({ "portMappings": true, "bandwidth": true }),
        "{ours}"
    );
    let ranges: Vec<Value> = families
        .iter()
        .map(|family| json!([{ "subnet": family.pods() }]))
        .collect();
    ensure!(ours["ipam"]["ranges"] == Value::from(ranges), "{ours}");
    let names = machine.names(BIN)?;
    let expected = LINKS.into_iter().chain(["underpass", "underpass-ipam"]);
    ensure!(
        names == expected.map(str::to_owned).collect::<BTreeSet<_>>(),
        "{names:?}"
    );
    ensure!(machine.names(NET)? == BTreeSet::from([fixture::FILE.to_owned()]));

    let pods = [machine.pod("a")?, machine.pod("b")?];
    for &family in families {
        ping::ping(pods[0].netns(), pods[1].ip(family))?;
        ping::ping(pods[0].netns(), family.remote())?;
    }
    Ok(())
}

#[test]
fn the_second_one_writes_nothing() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&Family::BOTH, &[])?;
    let before = machine.files()?;
    let said = machine.install(&Family::BOTH, &[])?;
    ensure!(!said.contains("installed"), "{said}");
    ensure!(
        machine.files()? == before,
        "{before:?}, and then {:?}",
        machine.files()?
    );
    // A node that is full of containers is as healthy as before, and loses none of its addresses.
    let tiny = ["--range", "10.77.0.0/30"];
    let _pod = {
        machine.run("install", &[&["--no-self-test"][..], &tiny].concat())?;
        machine.pod("only")?
    };
    let said = machine.run("install", &tiny)?;
    ensure!(said.contains("the self-test is left out"), "{said}");
    ensure!(said.contains("unchanged   /run/opt/net.d"), "{said}");
    Ok(())
}

#[test]
fn what_others_added_survives() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&[V4], &[])?;
    let mesh =
        json!({ "type": "istio-cni", "log_level": "debug", "kubernetes": { "intervals": 5 } });
    let mut document = machine.conflist()?.context("a conflist")?;
    document["plugins"]
        .as_array_mut()
        .context("a list")?
        .push(mesh.clone());
    document["disableCheck"] = json!(true);
    machine.write(CONFLIST, document.to_string().as_bytes())?;
    // It is laid out otherwise, and says the same.
    let before = machine.files()?;
    machine.install(&[V4], &[])?;
    ensure!(machine.files()? == before);
    let said = machine.install(
        &Family::BOTH,
        &["--mtu", "1400", "--cluster-cidr", "10.0.0.0/8"],
    )?;
    ensure!(said.contains("kept what others added: istio-cni"), "{said}");
    let after = machine.conflist()?.context("a conflist")?;
    ensure!(after["plugins"][1] == mesh, "{after}");
    ensure!(after["disableCheck"] == true, "{after}");
    ensure!(after["plugins"][0]["mtu"] == 1400, "{after}");
    ensure!(
        after["plugins"][0]["nonMasqueradeCIDRs"] == json!(["10.0.0.0/8"]),
        "{after}"
    );
    ensure!(
        after["plugins"][0]["ipam"]["ranges"]
            .as_array()
            .map(Vec::len)
            == Some(2),
        "{after}"
    );

    let before = machine.files()?;
    let error = machine.error("uninstall", &[])?;
    ensure!(
        error.contains("istio-cni") && error.contains("--force"),
        "{error}"
    );
    ensure!(machine.files()? == before);
    let said = machine.run("uninstall", &["--force"])?;
    ensure!(said.contains("istio-cni"), "{said}");
    ensure!(machine.names(NET)?.is_empty() && machine.names(BIN)?.is_empty());
    Ok(())
}

#[rstest]
fn what_a_power_failure_left_is_replaced(
    #[values("", "{\"plugins\": [{", "\0\0\0\0")] left: &str,
) -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.make_folders()?;
    machine.write(CONFLIST, left.as_bytes())?;
    machine.write(&format!("{BIN}/underpass"), b"half")?;
    for name in [
        "/run/opt/bin/.underpass-install.underpass.tmp",
        "/run/opt/net.d/.underpass-install.10-underpass.conflist.tmp",
    ] {
        machine.write(name, b"half")?;
    }
    let said = machine.install(&Family::BOTH, &[])?;
    ensure!(said.contains("is replaced, because it is"), "{said}");
    ensure!(machine.names(NET)?.len() == 1, "{:?}", machine.names(NET)?);
    ensure!(machine.names(BIN)?.len() == 5, "{:?}", machine.names(BIN)?);
    machine.pod("a").map(drop)
}

#[rstest]
#[case::overlap(&["--range", "10.22.0.0/16", "--range", "10.22.1.0/24"], "overlap")]
#[case::host_bits(&["--range", "10.22.0.1/24"], "host bits")]
#[case::no_prefix(&["--range", "10.22.0.0"], "prefix")]
#[case::too_small(&["--range", "10.22.0.0/31"], "/30 or larger")]
#[case::mtu(&["--range", "10.22.0.0/24", "--mtu", "67"], "67")]
#[case::mtu_of_ipv6(&["--range", "fd00:22::/64", "--mtu", "1279"], "1280")]
#[case::mtu_alone(&["--mtu", "1400"], "--range")]
#[case::cluster_alone(&["--cluster-cidr", "10.0.0.0/8"], "--range")]
#[case::name_alone(&["--name", "pods"], "--range")]
#[case::version_alone(&["--cni-version", "1.1.0"], "--range")]
#[case::no_self_test_alone(&["--no-self-test"], "--range")]
#[case::groups(&["--range", "224.0.0.0/24"], "no interface can have it")]
#[case::own_link_v4(&["--range", "192.0.2.0/24"], "192.0.2.2, which the node has on its uplink eth0")]
#[case::own_link_v6(&["--range", "2001:db8:1::/64"], "2001:db8:1::2, which the node has on its uplink eth0")]
#[case::name(&["--range", "10.22.0.0/24", "--name", "a b"], "network name")]
#[case::link(&["--names", "bridge"], "loopback")]
fn bad_input_changes_nothing(#[case] arguments: &[&str], #[case] said: &str) -> Result<()> {
    needs_root!();
    let machine = Machine::unloaded()?;
    let error = machine.error("install", arguments)?;
    ensure!(error.contains(said), "{error}");
    ensure!(machine.files()?.is_empty(), "{:?}", machine.files()?);
    let pins = machine.lab.node.bpf_root().to_owned();
    ensure!(
        !machine.lab.node.netns().run(|| pins.exists()),
        "programs are loaded"
    );
    Ok(())
}

/// Another plugin's tunnel stays on a node that it left, with an address alone out of the range of its pods: their gateway, or another.
#[rstest]
fn a_tunnel_that_was_left_is_in_nobodys_way(
    #[values(V4, V6)] family: Family,
    #[values(1, 2)] host: u8,
) -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    let (range, address) = match family {
        V4 => ("10.22.0.0/24", format!("10.22.0.{host}/32")),
        V6 => ("fd00:22::/64", format!("fd00:22::{host}/128")),
    };
    let netns = machine.lab.node.netns();
    netns.ip(&[
        "link add left type vxlan id 9 dstport 4999".to_owned(),
        format!("address add {address} dev left nodad"),
        "link set left up".to_owned(),
    ])?;
    let said = machine.run("install", &["--range", range])?;
    ensure!(said.contains("installed"), "{said}");
    Ok(())
}

#[test]
fn without_a_range_there_is_no_network() -> Result<()> {
    needs_root!();
    let machine = Machine::unloaded()?;
    let said = machine.run("install", &["--names", "loopback"])?;
    ensure!(said.contains("no conflist is written"), "{said}");
    ensure!(said.contains("all programs are loaded"), "{said}");
    ensure!(machine.names(BIN)?.len() == 3, "{:?}", machine.names(BIN)?);
    let net = machine.lab.node.netns().run(|| fs::exists(NET))?;
    ensure!(!net, "{NET} was made");
    Ok(())
}

/// The firewall drops what is forwarded, so the network does not work: whatever the runtime had it keeps.
#[test]
fn a_network_that_does_not_work_is_not_installed() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    let drop = "table inet strict {\n chain forward { type filter hook forward priority 0; policy drop; }\n}";
    machine.lab.node.netns().nft(drop)?;
    let range = ["--range", V4.pods()];
    let error = machine.error("install", &range)?;
    ensure!(
        error.contains("does not answer") && error.contains("firewall"),
        "{error}"
    );
    ensure!(machine.conflist()?.is_none());
    let said = machine.run("install", &[&range[..], &["--no-self-test"]].concat())?;
    ensure!(
        said.contains("installed   /run/opt/net.d/10-underpass.conflist"),
        "{said}"
    );
    let before = machine.files()?;
    machine.error("install", &["--range", "10.99.0.0/24"])?;
    ensure!(machine.files()? == before);
    Ok(())
}

/// A plugin that runs can be replaced, and what another build has loaded goes on.
#[test]
fn another_build_takes_the_place_of_one_that_runs() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&Family::BOTH, &[])?;
    let pods = [machine.pod("a")?, machine.pod("b")?];
    let node = &machine.lab.node;
    let trace = machine.start(&["trace"])?;
    let build = another_build::make(node)?;
    let before = machine.files()?;
    let said = machine.run_by(&build, "install", &fixture::ranges(&Family::BOTH))?;
    ensure!(
        said.contains("installed   /run/opt/bin/underpass\n"),
        "{said}"
    );
    ensure!(said.contains("unchanged   /run/opt/net.d"), "{said}");
    ensure!(said.contains("underpass upgrade"), "{said}");
    ensure!(machine.files()? != before);
    drop(trace);
    for family in Family::BOTH {
        ping::ping(pods[0].netns(), pods[1].ip(family))?;
    }
    machine.pod("c").map(drop)
}

/// An executable that could not serve the node's containers does not take the place of the one that does.
#[rstest]
#[case::maps_of_another_meaning(&format!("maps/{}", map_file(map::OWNERS)), "maps/OWNERS-9-96", "underpass upgrade")]
#[case::another_layout("", "../v7", "layout 7")]
fn what_it_does_not_know_is_refused(
    #[case] pin: &str,
    #[case] other: &str,
    #[case] said: &str,
) -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.install(&Family::BOTH, &[])?;
    let pod = machine.pod("a")?;
    let node = &machine.lab.node;
    let build = another_build::make(node)?;
    let layout = counter::pins(node);
    let rename = |from: &str, to: &str| {
        let [from, to] = [from, to].map(|name| match name.strip_prefix("../") {
            Some(name) => layout.with_file_name(name),
            None if name.is_empty() => layout.clone(),
            None => layout.join(name),
        });
        node.netns().run(|| fs::rename(from, to))
    };
    let before = machine.files()?;
    rename(pin, other)?;
    let error = machine.error_by(&build, "install", &fixture::ranges(&Family::BOTH))?;
    ensure!(error.contains(said), "{error}");
    ensure!(machine.files()? == before, "{:?}", machine.files()?);
    rename(other, pin)?;
    pod.del()
}

/// The name of the file by which a map is pinned.
fn map_file(name: &str) -> String {
    let found = map::MAPS.iter().find(|map| map.name == name);
    found.map(ToString::to_string).unwrap_or_default()
}

/// In words of its own, where no container gets to ours: by Multus they do, and by another network of ours they get to that.
#[test]
fn the_other_network_of_a_folder_is_named() -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.make_folders()?;
    let other = format!("{NET}/05-other.conflist");
    let hides = |kind: &str| -> Result<String> {
        let text = json!({ "name": "other", "plugins": [{ "type": kind }] });
        machine.write(&other, text.to_string().as_bytes())?;
        machine.install(&[V4], &["--no-self-test"])
    };
    let hidden = format!("hidden by {other}: ");
    let says = |said: &str| said.lines().any(|line| line.starts_with(&hidden));
    let said = hides("bridge")?;
    ensure!(says(&said), "{said}");
    let said = hides("multus")?;
    ensure!(!said.contains(&other), "{said}");
    let said = hides("underpass")?;
    ensure!(!says(&said) && said.contains(&other), "{said}");
    machine.lab.node.netns().run(|| fs::remove_file(&other))?;
    let said = machine.install(&[V4], &["--no-self-test"])?;
    ensure!(!said.contains("05-other"), "{said}");
    Ok(())
}

const BRIDGE: &str = r#"{ "name": "other", "plugins": [{ "type": "bridge" }] }"#;
const MULTUS: &str = r#"{ "name": "m", "type": "multus" }"#;
const NAMES_OTHER: &str = r#"{ "name": "m", "type": "multus", "clusterNetwork": "/host/run/opt/net.d/20-other.conflist" }"#;
const NAMES_OURS: &str = r#"{ "name": "m", "type": "multus-shim", "clusterNetwork": "/host/run/opt/net.d/10-underpass.conflist" }"#;
const HAS_OTHER: &str =
    r#"{ "name": "m", "type": "multus", "delegates": [{ "name": "other", "type": "bridge" }] }"#;
const HAS_OURS: &str =
    r#"{ "name": "m", "type": "multus", "delegates": [{ "name": "pods", "type": "underpass" }] }"#;
const CHAIN: &str =
    r#"{ "name": "other", "plugins": [{ "type": "bridge" }, { "type": "underpass" }] }"#;

/// Which file is to blame where no container gets to the network, and why; nothing where they do.
#[rstest]
#[case::chain(&[("05-other.conflist", CHAIN)], &["05-other.conflist: runtimes take the first", "\"other\""])]
#[case::multus_says_nothing(&[("00-multus.conf", MULTUS), ("05-other.conflist", BRIDGE)], &[])]
#[case::multus_names_it(&[("00-multus.conf", NAMES_OTHER), ("20-other.conflist", BRIDGE)], &["00-multus.conf: Multus in", "20-other.conflist", "clusterNetwork"])]
#[case::multus_names_ours(&[("00-multus.conf", NAMES_OURS), ("05-other.conflist", BRIDGE)], &[])]
#[case::multus_has_it(&[("00-multus.conf", HAS_OTHER)], &["00-multus.conf: Multus in", "\"other\"", "delegates"])]
#[case::multus_has_ours(&[("00-multus.conf", HAS_OURS), ("05-other.conflist", BRIDGE)], &[])]
#[case::broken(&[("05-other.conflist", "{")], &["containerd stops at it", "CRI-O passes over it", "/run/opt/net.d/05-other.conflist: it is no JSON"])]
#[case::broken_behind_ours(&[("20-other.conflist", "{")], &[])]
fn what_hides_the_network_is_said(
    #[case] files: &[(&str, &str)],
    #[case] words: &[&str],
) -> Result<()> {
    needs_root!();
    let machine = Machine::new()?;
    machine.make_folders()?;
    for (name, text) in files {
        machine.write(&format!("{NET}/{name}"), text.as_bytes())?;
    }
    let said = machine.install(&[V4], &["--no-self-test"])?;
    let lines: Vec<_> = said
        .lines()
        .filter(|line| line.starts_with("hidden by ") || line.starts_with("note: "))
        .collect();
    ensure!(lines.len() == usize::from(!words.is_empty()), "{said}");
    for word in words {
        ensure!(lines[0].contains(word), "{word}: {said}");
    }
    Ok(())
}

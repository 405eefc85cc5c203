//! `underpass selftest`: it says whether a network works, and leaves nothing behind.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use rstest::rstest;
use serde_json::{Value, json};
use underpass_tests::{
    leak::Traces,
    netns::die_together,
    node::{REFERENCE, plugin},
    prelude::*,
    runtime::Conf,
};

/// The folder of networks, in the node's own `/run`.
const NET: &str = "/run/net.d";
const FILE: &str = "/run/net.d/10-pods.conflist";

/// Writes a conflist of the network, whose chain goes on with `others`.
fn write(node: &Node, conf: &Conf, others: &[Value]) -> Result<()> {
    let mut entry = conf.json().clone();
    let mut document = json!({ "plugins": [] });
    for key in ["name", "cniVersion"] {
        document[key] = entry[key].take();
        entry.as_object_mut().context("an object")?.remove(key);
    }
    let list = [&[entry][..], others].concat();
    document["plugins"] = Value::from(list);
    put(node, FILE, &document.to_string())
}

fn put(node: &Node, path: &str, text: &str) -> Result<()> {
    node.netns().run(|| {
        fs::create_dir_all(Path::new(path).parent().context("it has a folder")?)?;
        fs::write(path, text).with_context(|| format!("write {path}"))
    })
}

fn one_family(lab: &Lab, family: Family) -> Conf {
    lab.conf()
        .with_ipam("ranges", json!([[{ "subnet": family.pods() }]]))
        .with_ipam("routes", json!([{ "dst": family.everywhere() }]))
}

#[rstest]
fn a_network_that_works(
    #[values(&[V4][..], &[V6][..], &[V4, V6][..])] families: &[Family],
) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let conf = match families {
        &[family] => one_family(&lab, family),
        _ => lab.conf(),
    };
    // Only a runtime has what others in the chain need.
    write(&lab.node, &conf, &[json!({ "type": "no-such-plugin" })])?;
    let _pod = lab.pod_with("a", &conf)?;
    let before = Traces::of(&lab.node)?;
    for _ in 0..2 {
        let said = lab.node.underpass(&["selftest", "--net-dir", NET])?;
        for family in Family::BOTH {
            let line = format!(
                "ok  IP{}: ",
                match family {
                    V4 => "v4",
                    V6 => "v6",
                }
            );
            ensure!(said.contains(&line) == families.contains(&family), "{said}");
        }
        for word in [
            FILE,
            "underpass-selftest-a",
            "ok  CHECK of both",
            "ok  DEL of both",
            "no lease is left",
        ] {
            ensure!(said.contains(word), "{said} lacks {word:?}");
        }
        before.expect_same(&lab.node)?;
    }
    Ok(())
}

#[test]
fn old_versions_of_the_contract_are_tested_as_far_as_they_go() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    write(&lab.node, &lab.conf().with("cniVersion", "0.3.1"), &[])?;
    let said = lab.node.underpass(&["selftest", "--conflist", FILE])?;
    ensure!(
        !said.contains("CHECK") && said.contains("ok  DEL of both"),
        "{said}"
    );
    Ok(())
}

#[rstest]
fn a_firewall_between_the_pods_is_found(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    write(&lab.node, &one_family(&lab, family), &[])?;
    // What the first ADD loads stays.
    lab.node.underpass(&["selftest", "--net-dir", NET])?;
    let before = Traces::of(&lab.node)?;
    let drop = "table inet strict {\n chain forward { type filter hook forward priority 0; policy drop; }\n}";
    lab.node.netns().nft(drop)?;
    let error = lab.node.underpass_error(&["selftest", "--net-dir", NET])?;
    for word in ["code 100", "does not answer", "firewall"] {
        ensure!(error.contains(word), "{error} lacks {word:?}");
    }
    before.expect_same(&lab.node)
}

#[test]
fn the_plugins_own_error_is_told_with_its_code() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let _pod = lab.pod("a")?;
    let before = Traces::of(&lab.node)?;
    let wrong = lab.conf().with("mtu", 7);
    write(&lab.node, &wrong, &[])?;
    let error = lab.node.underpass_error(&["selftest", "--net-dir", NET])?;
    ensure!(
        error.contains("ADD of underpass-selftest-a failed with code 7"),
        "{error}"
    );
    ensure!(error.contains("mtu"), "{error}");
    // One address is free, of two.
    let tiny = lab
        .conf()
        .with("name", "tiny")
        .with_ipam("ranges", json!([[{ "subnet": "10.77.0.0/30" }]]));
    write(&lab.node, &tiny, &[])?;
    let error = lab.node.underpass_error(&["selftest", "--net-dir", NET])?;
    ensure!(
        error.contains("ADD of underpass-selftest-b failed with code 11"),
        "{error}"
    );
    before.expect_same(&lab.node)
}

#[test]
fn what_can_not_be_tested_is_said() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let error = lab.node.underpass_error(&["selftest", "--net-dir", NET])?;
    ensure!(
        error.contains("no network in /run/net.d") && error.contains("underpass install"),
        "{error}"
    );
    put(
        &lab.node,
        FILE,
        r#"{"name": "x", "plugins": [{"type": "bridge"}, {"type": "underpass"}]}"#,
    )?;
    let error = lab
        .node
        .underpass_error(&["selftest", "--conflist", FILE])?;
    ensure!(error.contains("its first plugin is not"), "{error}");
    put(&lab.node, FILE, "")?;
    let error = lab
        .node
        .underpass_error(&["selftest", "--conflist", FILE])?;
    ensure!(error.contains(FILE), "{error}");
    Ok(())
}

/// Whatever a killed one leaves, the next one takes away; devices are gone at once.
#[test]
fn a_killed_one_leaves_nothing_for_long() -> Result<()> {
    const STEP: u64 = 2;
    const LAST: u64 = 80;
    needs_root!();
    let lab = Lab::new()?;
    write(&lab.node, &lab.conf(), &[])?;
    lab.node.underpass(&["selftest", "--net-dir", NET])?;
    let before = Traces::of(&lab.node)?;
    let mut killed = 0;
    for delay in (0..LAST).step_by(usize::try_from(STEP)?) {
        let mut command = Command::new(plugin());
        command.env_clear().args(["selftest", "--net-dir", NET]);
        let after = Duration::from_millis(delay);
        killed += u32::from(lab.node.netns().kill_after(&mut command, &[], after)?);
    }
    ensure!(killed > 3, "{killed} were killed");
    lab.node.underpass(&["selftest", "--net-dir", NET])?;
    before.expect_same(&lab.node)
}

/// An ADD that a killed one has begun goes on. The next self-test waits for its end, and takes away what it made.
#[test]
fn the_add_of_a_killed_one_is_waited_for() -> Result<()> {
    const BIN: &str = "/run/bin";
    needs_root!();
    let lab = Lab::new()?;
    // The first ADD of this IPAM plugin takes some time.
    let slow = format!(
        r#"#!/bin/sh
cd {BIN}
if [ "$CNI_COMMAND" = ADD ] && mkdir begun 2>/dev/null; then
    sleep 2
    {REFERENCE}/host-local
    touch ended
    exit 0
fi
exec {REFERENCE}/host-local
"#
    );
    let node = lab.node.netns();
    let script = format!("{BIN}/slow");
    put(&lab.node, &script, &slow)?;
    node.run(|| fs::set_permissions(&script, fs::Permissions::from_mode(0o755)))?;
    // What the first ADD loads stays.
    let _pod = lab.pod("a")?;
    let before = Traces::of(&lab.node)?;
    // That one knows no later version.
    let conf = lab.conf().with("cniVersion", "1.0.0");
    write(&lab.node, &conf.with_ipam("type", "slow"), &[])?;
    let arguments = ["selftest", "--net-dir", NET, "--bin-dir", BIN];
    let wait_for = |name: &str| {
        eventually("the slow ADD", || {
            let file = Path::new(BIN).join(name);
            ensure!(file.exists(), "there is no {}", file.display());
            Ok(())
        })
    };
    node.run(|| {
        let mut command = Command::new(plugin());
        command.args(arguments).stdout(Stdio::null());
        let mut first = die_together(&mut command).spawn()?;
        let begun = wait_for("begun");
        first.kill()?;
        first.wait()?;
        begun
    })?;
    lab.node.underpass(&arguments)?;
    node.run(|| wait_for("ended"))?;
    before.expect_same(&lab.node)
}

#[rstest]
fn who_answers_in_the_place_of_a_pod_is_found(#[values(V4, V6)] family: Family) -> Result<()> {
    needs_root!();
    // The firewall of labs counts the reset of the connection that nobody knows.
    let lab = Lab::open()?;
    write(&lab.node, &one_family(&lab, family), &[])?;
    let node = lab.node.netns();
    node.nft(
        "add table inet proxy
         add chain inet proxy c { type nat hook prerouting priority dstnat; }
         add rule inet proxy c meta l4proto tcp redirect to :9999",
    )?;
    let any = std::net::SocketAddr::new(family.any(), 9999);
    let _proxy = tcp::Server::start(node, any)?;
    let error = lab.node.underpass_error(&["selftest", "--net-dir", NET])?;
    ensure!(
        error.contains("in its place") || error.contains("timed out"),
        "{error}"
    );
    Ok(())
}

//! `underpass report`: one file that `tar` reads, with all that is asked for in a bug report, and no secret.

use std::{env::consts::ARCH, fs, process::Command};

use serde_json::{Value, json};
use underpass_tests::prelude::*;

const OUTPUT: &str = "/run/report.tar";
const NET_DIR: &str = "/run/net.d";
const SECRET: &str = "s3cret";

/// What is in a file of the report.
fn read(lab: &Lab, name: &str) -> Result<String> {
    let path = format!("underpass-report/{name}");
    let mut tar = Command::new("tar");
    tar.args(["-xOf", OUTPUT, &path]);
    lab.node.netns().expect(&mut tar, &[])
}

fn list(lab: &Lab) -> Result<String> {
    let mut tar = Command::new("tar");
    lab.node.netns().expect(tar.args(["-tvf", OUTPUT]), &[])
}

fn report(lab: &Lab) -> Result<String> {
    let arguments = ["report", "--output", OUTPUT, "--net-dir", NET_DIR];
    lab.node.underpass(&arguments)
}

/// A network of ours that works, with a secret beside each key whose value is an object.
fn careless(lab: &Lab) -> Value {
    let ranges = Family::BOTH.map(|family| json!([{ "subnet": family.pods(), "key": SECRET }]));
    let routes = Family::BOTH.map(|family| json!({ "dst": family.everywhere(), "note": SECRET }));
    let conf = lab
        .conf()
        .with_ipam("ranges", ranges)
        .with_ipam("routes", routes)
        .with("dns", json!({ "nameservers": ["192.0.2.53"], "x": SECRET }))
        .with("capabilities", json!({ "portMappings": true, "x": SECRET }))
        .with("uplinks", json!(["eth*"]));
    conf.json().clone()
}

#[test]
fn everything_is_in_it_and_no_secret() -> Result<()> {
    needs_root!();
    let lab = Lab::new()?;
    let pod = lab.pod("a")?;
    ping::ping(pod.netns(), V4.remote())?;
    let document = json!({
        "cniVersion": "1.0.0",
        "name": "lab",
        "plugins": [lab.conf().json(), careless(&lab), { "type": "other", "password": SECRET }],
    });
    lab.node.netns().run(|| -> Result<()> {
        fs::create_dir_all(NET_DIR)?;
        fs::write(format!("{NET_DIR}/10-lab.conflist"), document.to_string())?;
        Ok(fs::write(format!("{NET_DIR}/20-broken.conf"), SECRET)?)
    })?;
    let said = report(&lab)?;
    ensure!(said.contains(OUTPUT), "{said}");

    let json = |name: &str| -> Result<Value> { Ok(serde_json::from_str(&read(&lab, name)?)?) };
    ensure!(json("status.json")?["loaded"] == true);
    let flows = json("flows.json")?;
    ensure!(
        flows.to_string().contains(&pod.ip(V4).to_string()),
        "{flows:#}"
    );
    ensure!(json("doctor.json")?["findings"].is_array());
    let network = json("network.json")?;
    let devices = network.as_array().context("a list of devices")?;
    let named = |name: &str| devices.iter().find(|device| device["name"] == name);
    let uplink = named(Node::UPLINK).context("the uplink")?;
    for family in Family::BOTH {
        let text = uplink.to_string();
        ensure!(text.contains(&family.node().to_string()), "{uplink:#}");
        ensure!(text.contains(&family.gateway().to_string()), "{uplink:#}");
    }
    ensure!(named(pod.host_veth()).is_some(), "{network:#}");
    let lab_network = json("networks/10-lab.conflist")?;
    ensure!(
        lab_network["plugins"][0] == *lab.conf().json(),
        "{lab_network:#}"
    );
    let careless = &lab_network["plugins"][1];
    for (key, shown) in [
        ("/ipam/routes/0/dst", json!(V4.everywhere())),
        ("/dns/nameservers", json!(["192.0.2.53"])),
        ("/capabilities/portMappings", json!(true)),
        ("/uplinks", json!(["eth*"])),
    ] {
        ensure!(careless.pointer(key) == Some(&shown), "{key}: {careless:#}");
    }
    ensure!(read(&lab, "networks/1.missing.txt")?.contains("20-broken.conf"));
    ensure!(read(&lab, "nft.txt")?.contains("table inet lab"));
    let version = read(&lab, "version.txt")?;
    ensure!(
        version.starts_with("underpass ") && version.contains(ARCH),
        "{version}"
    );
    ensure!(read(&lab, "sysctls.txt")?.contains("net.ipv4.ip_forward = 1\n"));
    ensure!(read(&lab, "README.txt")?.contains("status.json"));

    let listed = list(&lab)?;
    ensure!(
        listed.lines().all(|line| line.starts_with("-rw-------")),
        "{listed}"
    );
    let whole = lab.node.netns().run(|| fs::read(OUTPUT))?;
    let leaks = whole
        .windows(SECRET.len())
        .any(|bytes| bytes == SECRET.as_bytes());
    ensure!(!leaks, "the report has the secret");
    // What is there stays.
    let arguments = ["report", "--output", OUTPUT];
    let said = lab.node.underpass_error(&arguments)?;
    ensure!(said.contains("name another file with --output"), "{said}");
    ensure!(lab.node.netns().run(|| fs::read(OUTPUT))? == whole);
    Ok(())
}

/// A node on which nothing works is the one that reports are about.
#[test]
fn a_broken_node_has_a_report() -> Result<()> {
    needs_root!();
    let lab = Lab::unloaded()?;
    let arguments = [
        "--bpf-root",
        "/run/no-bpffs",
        "report",
        "--output",
        OUTPUT,
        "--net-dir",
        "/nowhere",
    ];
    lab.node.underpass(&arguments)?;
    ensure!(read(&lab, "doctor.json")?.contains("no-bpffs"));
    ensure!(read(&lab, "flows.missing.txt")?.contains("no programs are loaded"));
    ensure!(read(&lab, "networks.missing.txt")?.contains("/nowhere"));
    Ok(())
}

//! The first ADD of a guest, under the eyes of a tracer; and what the plugin says of the kernel.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::process;
use crate::vm::record::Record;
use crate::vm::verifier;

const NETNS: &str = "measured";
const CONFIG: &str = r#"{
    "cniVersion": "1.1.0", "name": "measured", "type": "underpass", "ipMasq": true,
    "ipam": {
        "type": "host-local", "dataDir": "/run/measured",
        "ranges": [[{ "subnet": "10.88.0.0/24" }], [{ "subnet": "fd00:88::/64" }]],
        "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }]
    }
}"#;

/// Attaches a pod, so that every program is loaded, and takes everything away again.
pub(super) fn measure(plugin: &Path) -> anyhow::Result<Vec<Record>> {
    fs::create_dir_all("/run/measured").context("cannot create the folder of leases")?;
    process::run(Command::new("ip").args(["netns", "add", NETNS]))?;
    let (answer, mut add) = call(plugin, "ADD")?;
    let (code, programs) = verifier::trace(&mut add)?;
    let mut records: Vec<Record> = programs.into_iter().map(Record::Program).collect();
    if code != 0 {
        let message = fs::read_to_string(answer).unwrap_or_default();
        let message = message.trim().to_owned();
        records.push(Record::NoAttachment { message });
    }
    records.extend(features(plugin)?);
    if code == 0 {
        process::run(&mut call(plugin, "DEL")?.1)?;
    }
    process::run(Command::new(plugin).args(["unload", "--force"]))?;
    process::run(Command::new("ip").args(["netns", "del", NETNS]))?;
    Ok(records)
}

/// A call of the plugin, and the file that its answer goes to.
fn call(plugin: &Path, verb: &str) -> anyhow::Result<(&'static str, Command)> {
    const FILES: (&str, &str) = ("/run/measured.conf", "/run/measured.answer");
    fs::write(FILES.0, CONFIG).context("cannot write a network configuration")?;
    let mut command = Command::new(plugin);
    command
        .env("CNI_COMMAND", verb)
        .env("CNI_CONTAINERID", NETNS)
        .env("CNI_NETNS", format!("/run/netns/{NETNS}"))
        .env("CNI_IFNAME", "eth0")
        .env("CNI_PATH", "/usr/lib/cni")
        .stdin(fs::File::open(FILES.0).context("cannot read a network configuration")?)
        .stdout(fs::File::create(FILES.1).context("cannot create a file for the answer")?)
        .stderr(Stdio::inherit());
    Ok((FILES.1, command))
}

fn features(plugin: &Path) -> anyhow::Result<Vec<Record>> {
    let output = Command::new(plugin)
        .args(["status", "--json"])
        .output()
        .context("cannot ask the plugin for its status")?;
    if !output.status.success() {
        bail!(
            "`underpass status` failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    let status: Value =
        serde_json::from_slice(&output.stdout).context("`underpass status --json` is no JSON")?;
    let features = status["features"]
        .as_array()
        .context("`underpass status --json` lists no features")?;
    let text = |feature: &Value, key: &str| feature[key].as_str().unwrap_or_default().to_owned();
    Ok(features
        .iter()
        .map(|feature| Record::Feature {
            name: text(feature, "name"),
            present: feature["present"] == true,
            reason: text(feature, "reason"),
            purpose: text(feature, "purpose"),
        })
        .collect())
}

//! All programs of the plugin, loaded under the eyes of a tracer; and what the plugin says of the kernel.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::process;
use crate::vm::record::Record;
use crate::vm::verifier;

/// Where the plugin says why it does not load them.
const COMPLAINT: &str = "/run/load.stderr";

/// Loads every program, and removes them again.
pub(super) fn measure(plugin: &Path) -> anyhow::Result<Vec<Record>> {
    let complaint = File::create(COMPLAINT).context("cannot create a file for errors")?;
    let (code, programs) = verifier::trace(Command::new(plugin).arg("load").stderr(complaint))?;
    let mut records: Vec<Record> = programs.into_iter().map(Record::Program).collect();
    if code != 0 {
        let message = fs::read_to_string(COMPLAINT).unwrap_or_default();
        let message = message.trim().to_owned();
        records.push(Record::NotLoaded { message });
    }
    records.extend(features(plugin)?);
    process::run(Command::new(plugin).arg("unload"))?;
    Ok(records)
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

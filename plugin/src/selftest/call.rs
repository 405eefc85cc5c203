//! A call of the plugin as a runtime makes it: a process, the environment, and the config on its standard input.

use std::{
    io::Write as _,
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use serde_json::Value;
use underpass_cni::{Code, Error, NetConf, Verb};

use super::{
    pod::{IFNAME, Pod},
    with_previous,
};
use crate::install::PLUGIN;

/// The plugin that is tested, and the network that it is called for.
pub(super) struct Plugin {
    /// The file that is executed.
    pub(super) executable: PathBuf,
    /// Where it looks for an IPAM plugin of another.
    pub(super) bin_dir: PathBuf,
    /// The network.
    pub(super) conf: NetConf,
}

impl Plugin {
    /// Makes a call for a pod: what it printed, where it succeeded.
    pub(super) fn call(&self, verb: Verb, pod: &Pod) -> Result<Vec<u8>, Error> {
        let what = format!("{verb} of {}", pod.container);
        let conf = with_previous(&self.conf, pod.result.as_ref());
        let mut command = Command::new(&self.executable);
        command
            // The plugin is what its name says, whatever the file is called.
            .arg0(PLUGIN)
            .env("CNI_COMMAND", verb.as_str())
            .env("CNI_CONTAINERID", pod.container)
            .env("CNI_NETNS", pod.path()?)
            .env("CNI_IFNAME", IFNAME)
            .env("CNI_PATH", &self.bin_dir)
            .env_remove("CNI_ARGS")
            .env_remove("CNI_NETNS_OVERRIDE")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let not_run = |error| {
            Error::io(
                format!(
                    "self-test: cannot execute {} for {what}",
                    self.executable.display()
                ),
                &error,
            )
            .with_details(
                "is its file system mounted noexec, or is it a build for another machine?",
            )
        };
        let mut child = command.spawn().map_err(not_run)?;
        if let Some(mut stdin) = child.stdin.take() {
            // A plugin may answer without reading all; its status tells what that means.
            let _ = stdin.write_all(Value::Object(conf).to_string().as_bytes());
        }
        let output = child.wait_with_output().map_err(not_run)?;
        if output.status.success() {
            Ok(output.stdout)
        } else {
            Err(refusal(&what, &output))
        }
    }
}

/// Gives the error that the plugin answered with.
fn refusal(what: &str, output: &Output) -> Error {
    let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let text = |key: &str| {
        let text = document.get(key).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    };
    let number = document.get("code").and_then(Value::as_u64);
    let Some(number) = number.and_then(|number| u32::try_from(number).ok()) else {
        return Error::internal(format!(
            "self-test: {what} failed ({}) without a word",
            output.status
        ))
        .with_details("the plugin's log is above");
    };
    Error::new(
        Code::from_number(number),
        format!(
            "self-test: {what} failed with code {number}: {}",
            text("msg")
        ),
    )
    .with_details(text("details"))
}

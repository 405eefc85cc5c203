//! Running another plugin, for IPAM, with the environment and the whole config that the runtime
//! gave.

use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::env::Verb;
use crate::error::{Code, Error};
use crate::go_json;
use crate::result::CniResult;
use crate::version::Version;

/// An executable that is being replaced cannot be started for a moment.
const BUSY_RETRIES: usize = 5;
const BUSY_PAUSE: Duration = Duration::from_secs(1);

/// What a delegate is run with.
///
/// The process's own environment is handed on, with `CNI_COMMAND` set to the verb; the delegate's
/// stderr is forwarded.
#[derive(Clone, Debug, PartialEq)]
pub struct Delegation {
    /// Folders to search, in order: `CNI_PATH`.
    pub path: Vec<PathBuf>,
    /// The config as it came on stdin.
    pub stdin: Vec<u8>,
    /// The config's version.
    pub version: Version,
}

impl Delegation {
    /// Runs ADD. If it fails, DEL is run before the failure is returned: an ADD may fail half-way.
    pub fn add(&self, plugin: &str) -> Result<CniResult, Error> {
        let outcome = self.run(plugin, Verb::Add).and_then(|stdout| {
            let document: Value = serde_json::from_slice(&stdout).map_err(|error| {
                Error::decode(format!(
                    "plugin {plugin:?} printed a result that is not JSON: {error}"
                ))
            })?;
            CniResult::from_value(&document, self.version)
                .map_err(|error| error.context(format!("result of plugin {plugin:?}")))
        });
        if outcome.is_err() && self.find(plugin).is_ok() {
            // The first failure is the one to report; this is best effort.
            let _ = self.del(plugin);
        }
        outcome
    }

    /// Runs DEL.
    pub fn del(&self, plugin: &str) -> Result<(), Error> {
        self.run(plugin, Verb::Del).map(drop)
    }

    /// Runs CHECK.
    pub fn check(&self, plugin: &str) -> Result<(), Error> {
        self.run(plugin, Verb::Check).map(drop)
    }

    /// Runs GC.
    pub fn gc(&self, plugin: &str) -> Result<(), Error> {
        self.run(plugin, Verb::Gc).map(drop)
    }

    /// Runs STATUS.
    pub fn status(&self, plugin: &str) -> Result<(), Error> {
        self.run(plugin, Verb::Status).map(drop)
    }

    /// The executable: the first file of that name in the path that may be executed.
    fn find(&self, plugin: &str) -> Result<PathBuf, Error> {
        if plugin.is_empty() || plugin.contains('/') {
            return Err(Error::config(format!("invalid plugin name: {plugin:?}")));
        }
        let executable = |file: &PathBuf| {
            file.metadata()
                .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        };
        self.path.iter().map(|folder| folder.join(plugin)).find(executable).ok_or_else(|| {
            let folders: Vec<_> = self.path.iter().map(|folder| folder.display().to_string()).collect();
            Error::internal(format!(
                "failed to find plugin {plugin:?} in path [{}]: install it there, or correct CNI_PATH",
                folders.join(" ")
            ))
        })
    }

    fn run(&self, plugin: &str, verb: Verb) -> Result<Vec<u8>, Error> {
        let executable = self.find(plugin)?;
        let mut command = Command::new(&executable);
        command.env("CNI_COMMAND", verb.as_str());
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let output = self
            .output(&mut command)
            .map_err(|error| Error::io(executable.display(), &error))?;
        // Logs of the delegate; where they end is not worth failing for.
        let _ = io::stderr().write_all(&output.stderr);
        if output.status.success() {
            Ok(output.stdout)
        } else {
            Err(failure(plugin, &output))
        }
    }

    fn output(&self, command: &mut Command) -> io::Result<Output> {
        let mut retries = 0;
        let mut child = loop {
            match command.spawn() {
                Err(error)
                    if error.kind() == io::ErrorKind::ExecutableFileBusy
                        && retries < BUSY_RETRIES =>
                {
                    retries += 1;
                    thread::sleep(BUSY_PAUSE);
                }
                outcome => break outcome?,
            }
        };
        let stdin = child.stdin.take();
        // Written beside the reading: a delegate that answers before it has read everything must
        // not block both.
        thread::scope(|scope| {
            scope.spawn(|| {
                // A delegate may exit without reading; its status tells what that means.
                stdin.map(|mut stdin| stdin.write_all(&self.stdin))
            });
            child.wait_with_output()
        })
    }
}

/// The failure that a delegate reported, or the best that can be said when it reported none.
fn failure(plugin: &str, output: &Output) -> Error {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Reported {
        code: u32,
        msg: String,
        details: String,
    }
    if output.stdout.trim_ascii().is_empty() {
        let stderr = String::from_utf8_lossy(output.stderr.trim_ascii()).into_owned();
        let said = if stderr.is_empty() {
            "no error message".to_owned()
        } else {
            stderr
        };
        return Error::internal(format!(
            "plugin {plugin:?} failed ({}): {said}",
            output.status
        ));
    }
    let reported = serde_json::from_slice::<Value>(&output.stdout)
        .map_err(|error| error.to_string())
        .and_then(|document| {
            go_json::from_value::<Reported>(&document).map_err(|error| error.to_string())
        });
    match reported {
        Ok(Reported { code, msg, details }) => Error {
            code: Code::from_number(code),
            msg,
            details,
        },
        Err(error) => Error::internal(format!(
            "plugin {plugin:?} failed ({}), and its message {:?} could not be decoded: {error}",
            output.status,
            String::from_utf8_lossy(&output.stdout)
        )),
    }
}

#[cfg(test)]
mod tests;

//! Running another plugin, for IPAM, with the environment and the whole config that the runtime
//! gave.

use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
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

/// So many characters of what a delegate printed are quoted in a message: the beginning of what should be a
/// document, the end of what should be a log.
const QUOTED: usize = 200;

/// What to do about a delegate that does not say what went wrong.
const ASK: &str = "look into its own log, install it anew, or ask those who make it";

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
            if stdout.trim_ascii().is_empty() {
                return Err(Error::decode(format!(
                    "plugin {plugin:?} succeeded, but printed no result: is it an IPAM plugin?"
                )));
            }
            let document: Value = serde_json::from_slice(&stdout).map_err(|error| {
                Error::decode(format!(
                    "plugin {plugin:?} printed a result that is not JSON: {error}"
                ))
                .with_details(format!("it begins with {:?}", beginning(&stdout)))
            })?;
            CniResult::from_value(&document, self.version)
                .map_err(|error| error.context(format!("result of plugin {plugin:?}")))
        });
        if outcome.is_err() && find(plugin, &self.path).is_ok() {
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

    /// Runs STATUS. A plugin that is not there, or can't be started, could not serve an ADD either: code 50.
    pub fn status(&self, plugin: &str) -> Result<(), Error> {
        let executable = find(plugin, &self.path).map_err(|error| match error.code {
            Code::Internal => Error {
                code: Code::NotAvailable,
                ..error
            },
            _ => error,
        })?;
        let output = self
            .start(&executable, Verb::Status)
            .map_err(|error| Error {
                code: Code::NotAvailable,
                ..error
            })?;
        outcome(plugin, output).map(drop)
    }

    fn run(&self, plugin: &str, verb: Verb) -> Result<Vec<u8>, Error> {
        outcome(plugin, self.start(&find(plugin, &self.path)?, verb)?)
    }

    fn start(&self, executable: &Path, verb: Verb) -> Result<Output, Error> {
        let mut command = Command::new(executable);
        command.env("CNI_COMMAND", verb.as_str());
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let output = self.output(&mut command).map_err(|error| {
            let what = format!("cannot start the plugin {}", executable.display());
            Error::io(what, &error).with_details(not_started(&error))
        })?;
        // Logs of the delegate; where they end is not worth failing for.
        let _ = io::stderr().write_all(&output.stderr);
        Ok(output)
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
            let write = || {
                // A delegate may exit without reading; its status tells what that means.
                stdin.map(|mut stdin| stdin.write_all(&self.stdin))
            };
            if let Err(error) = thread::Builder::new().spawn_scoped(scope, write) {
                // It has read nothing, so it has done nothing.
                let _ = child.kill();
                let _ = child.wait();
                return Err(error);
            }
            child.wait_with_output()
        })
    }
}

/// Finds the executable: the first file of that name in the folders that may be executed.
pub fn find(plugin: &str, folders: &[PathBuf]) -> Result<PathBuf, Error> {
    if plugin.is_empty() || plugin.contains('/') {
        return Err(Error::config(format!("invalid plugin name: {plugin:?}"))
            .with_details("ipam.type must be the name of a file in CNI_PATH, without a slash"));
    }
    let executable = |file: &PathBuf| {
        file.metadata()
            .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    let mut files = folders.iter().map(|folder| folder.join(plugin));
    files.find(executable).ok_or_else(|| {
        let folders: Vec<_> = folders
            .iter()
            .map(|folder| folder.display().to_string())
            .collect();
        Error::internal(format!(
            "failed to find plugin {plugin:?} in path [{}]: install it there, or correct CNI_PATH",
            folders.join(" ")
        ))
    })
}

/// What to do about a file that is there, may be executed, and can't be, or for whose input there is no thread.
fn not_started(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => {
            "the file is there, but not the interpreter or loader that it names: install that, or a static build of the plugin"
        }
        io::ErrorKind::WouldBlock => {
            "raise the limit of processes of the runtime (RLIMIT_NPROC, pids.max of its cgroup)"
        }
        _ => "install a build of the plugin for this machine",
    }
}

fn outcome(plugin: &str, output: Output) -> Result<Vec<u8>, Error> {
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(failure(plugin, &output))
    }
}

fn beginning(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(4 * QUOTED)]);
    text.chars().take(QUOTED).collect()
}

fn end(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(4 * QUOTED)..]).into_owned();
    match text.char_indices().rev().nth(QUOTED - 1) {
        Some((at, _)) if at > 0 => format!("...{}", &text[at..]),
        _ => text,
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
    let status = output.status;
    if output.stdout.trim_ascii().is_empty() {
        let said = end(output.stderr.trim_ascii());
        return if said.is_empty() {
            Error::internal(format!(
                "plugin {plugin:?} failed ({status}): no error message"
            ))
            .with_details(ASK)
        } else {
            Error::internal(format!("plugin {plugin:?} failed ({status}): {said}"))
        };
    }
    let reported = serde_json::from_slice::<Value>(&output.stdout)
        .map_err(|error| error.to_string())
        .and_then(|document| {
            go_json::from_value::<Reported>(&document).map_err(|error| error.to_string())
        });
    match reported {
        Ok(Reported { code, msg, details }) if code == 0 || msg.is_empty() => {
            let said = if msg.is_empty() { "no message" } else { &msg };
            let error = Error::internal(format!(
                "plugin {plugin:?} failed ({status}), code {code}: {said}"
            ));
            Error {
                // 0 stands for success.
                code: if code == 0 { error.code } else { Code::from_number(code) },
                details: if details.is_empty() { ASK.to_owned() } else { details },
                ..error
            }
        }
        Ok(Reported { code, msg, details }) => Error {
            code: Code::from_number(code),
            msg,
            details,
        },
        Err(error) => Error::internal(format!(
            "plugin {plugin:?} failed ({status}), and its message {:?} could not be decoded: {error}",
            beginning(&output.stdout)
        ))
        .with_details(ASK),
    }
}

#[cfg(test)]
mod tests;

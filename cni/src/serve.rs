//! From the environment and stdin to one call of a [`Plugin`], and back to stdout.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::panic::PanicHookInfo;
use std::path::PathBuf;
use std::process::ExitCode;

use serde::Serialize;

use crate::config::{Document, NetConf};
use crate::delegate::Delegation;
use crate::env::{Attachment, AttachmentVerb, Call, Invocation, NetworkVerb, Verb};
use crate::error::Error;
use crate::result::CniResult;
use crate::version::Version;

mod netns;

/// Who answers.
#[derive(Clone, Copy, Debug)]
pub struct About<'a> {
    /// The plugin's name.
    pub name: &'a str,
    /// The plugin's own version.
    pub version: &'a str,
    /// The versions of the specification that it speaks, oldest first; usually [`Version::ALL`].
    pub supported: &'a [Version],
}

/// What ADD, DEL and CHECK are called with.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The network config.
    pub conf: NetConf,
    /// Which container, where.
    pub attachment: Attachment,
    /// Runs another plugin on the same request.
    pub delegation: Delegation,
}

/// What GC and STATUS are called with.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkRequest {
    /// The network config.
    pub conf: NetConf,
    /// Runs another plugin on the same request.
    pub delegation: Delegation,
}

/// A CNI plugin.
///
/// Before any method is called, names and versions are checked, and for ADD and DEL that the
/// container's netns is not the plugin's own. A method must not write to stdout.
pub trait Plugin {
    /// Attaches the container, or changes nothing.
    fn add(&self, request: &Request) -> Result<CniResult, Error>;

    /// Takes back an ADD that made `result`, which the runtime will never hear of: what this ADD made, and nothing of plugins
    /// before it in a chain.
    fn undo(&self, request: &Request, result: &CniResult) -> Result<(), Error> {
        let _ = result;
        self.del(request)
    }

    /// Detaches the container. Succeeds if it is not attached; works without netns and without
    /// `prevResult`.
    fn del(&self, request: &Request) -> Result<(), Error>;

    /// Verifies that the attachment is what `prevResult` says.
    fn check(&self, request: &Request) -> Result<(), Error>;

    /// Removes what belongs to attachments of this network that are not valid any more.
    fn gc(&self, request: &NetworkRequest) -> Result<(), Error>;

    /// Says whether an ADD could be served; code 50 or 51 if not.
    fn status(&self, request: &NetworkRequest) -> Result<(), Error>;
}

/// What a call leaves for the process to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The one document, or nothing.
    pub stdout: String,
    /// Text for a person.
    pub stderr: String,
    /// Whether the exit status is 0.
    pub success: bool,
}

/// Answers the runtime that started this process; the value to return from `main`.
///
/// Installs a panic hook: a panic is answered with an error document as well, also where panics
/// abort.
pub fn serve(about: &About<'_>, plugin: &impl Plugin) -> ExitCode {
    std::panic::set_hook(Box::new(answer_panic));
    let mut made = None;
    let lookup = |name: &str| std::env::var_os(name);
    let outcome = attempt(about, plugin, lookup, io::stdin(), &mut made);
    // A closed stderr is no reason to fail.
    let _ = io::stderr().write_all(outcome.stderr.as_bytes());
    let written = io::stdout()
        .write_all(outcome.stdout.as_bytes())
        .and_then(|()| io::stdout().flush());
    match (written, made) {
        (Ok(()), _) if outcome.success => return ExitCode::SUCCESS,
        (Err(error), Some(made)) => made.undo(plugin, &error),
        _ => {}
    }
    ExitCode::FAILURE
}

/// An ADD that succeeded, until the runtime knows.
struct Made {
    request: Request,
    result: CniResult,
}

impl Made {
    /// Takes it back, as its result could not be written. There is nobody to tell but who reads stderr.
    fn undo(self, plugin: &impl Plugin, error: &io::Error) {
        let undone = match plugin.undo(&self.request, &self.result) {
            Ok(()) => "what the ADD made is taken back".to_owned(),
            Err(error) => {
                format!("and the ADD could not be taken back, DEL the container: {error}")
            }
        };
        let text = format!("cannot write the result to stdout: {error}: {undone}\n");
        let _ = io::stderr().write_all(text.as_bytes());
    }
}

/// Answers whoever started this process with an error, whatever the verb; the value to return from `main` of a
/// program that is no plugin under the name that it was called by.
///
/// Nothing is read: `VERSION` is answered so, too, and the document has the latest version. A person, who sets no
/// `CNI_COMMAND`, gets a line of text.
#[must_use]
pub fn refuse(error: &Error) -> ExitCode {
    let (mut stdout, mut stderr) = (io::stdout(), io::stderr());
    // Whatever cannot be written, the exit status says the same.
    let _ = match Invocation::parse(|name| std::env::var_os(name)) {
        Ok(Invocation::Nobody) => stderr.write_all(format!("{error}\n").as_bytes()),
        _ => stdout.write_all(error.to_json(Version::LATEST).as_bytes()),
    };
    let _ = stdout.flush();
    ExitCode::FAILURE
}

/// [`serve()`] without a process: the environment comes from `lookup`, the config from `stdin`.
pub fn answer(
    about: &About<'_>,
    plugin: &impl Plugin,
    lookup: impl Fn(&str) -> Option<OsString>,
    stdin: impl Read,
) -> Outcome {
    attempt(about, plugin, lookup, stdin, &mut None)
}

/// Does what [`answer`] does, and notes an ADD that succeeded.
fn attempt(
    about: &About<'_>,
    plugin: &impl Plugin,
    lookup: impl Fn(&str) -> Option<OsString>,
    stdin: impl Read,
    made: &mut Option<Made>,
) -> Outcome {
    let mut version = Version::LATEST;
    match dispatch(about, plugin, lookup, stdin, &mut version, made) {
        Ok(outcome) => outcome,
        Err(error) => {
            let short = error.shortened();
            Outcome {
                stdout: short.as_ref().unwrap_or(&error).to_json(version),
                stderr: short.map_or_else(String::new, |_| format!("{error}\n")),
                success: false,
            }
        }
    }
}

fn dispatch(
    about: &About<'_>,
    plugin: &impl Plugin,
    lookup: impl Fn(&str) -> Option<OsString>,
    mut stdin: impl Read,
    version: &mut Version,
    made: &mut Option<Made>,
) -> Result<Outcome, Error> {
    let call = match Invocation::parse(lookup)? {
        Invocation::Nobody => return Ok(introduction(about)),
        // A runtime may leave stdin open and wait: it must not be read.
        Invocation::Version => return Ok(versions(about)),
        Invocation::Call(call) => call,
    };
    // One read for nearly every config.
    let mut document = Vec::with_capacity(8192);
    stdin.read_to_end(&mut document).map_err(|error| {
        Error::io("error reading from stdin", &error)
            .with_details("the runtime has to send the config there")
    })?;
    let config = Document::parse(&document)?;
    *version = config.version().unwrap_or(Version::LATEST);
    let delegation = |conf: &NetConf, path: &[PathBuf]| Delegation {
        path: path.to_vec(),
        stdin: document.clone(),
        version: conf.cni_version,
    };
    let stdout = match call {
        Call::Attachment(verb, attachment, netns_override) => {
            let conf = config.negotiate(verb.into(), about.supported)?;
            // A DEL cleans what it can, whatever became of the path; a CHECK finds out.
            if verb == AttachmentVerb::Add {
                netns::refuse_own(attachment.netns.as_deref(), netns_override)?;
            }
            let request = Request {
                delegation: delegation(&conf, &attachment.path),
                conf,
                attachment,
            };
            match verb {
                AttachmentVerb::Add => {
                    let (stdout, result) = add(plugin, &request)?;
                    *made = Some(Made { request, result });
                    stdout
                }
                AttachmentVerb::Del => plugin.del(&request).map(|()| String::new())?,
                AttachmentVerb::Check => plugin.check(&request).map(|()| String::new())?,
            }
        }
        Call::Network(verb, path) => {
            let conf = config.negotiate(verb.into(), about.supported)?;
            let request = NetworkRequest {
                delegation: delegation(&conf, &path),
                conf,
            };
            match verb {
                NetworkVerb::Gc => plugin.gc(&request)?,
                NetworkVerb::Status => plugin.status(&request)?,
            }
            String::new()
        }
        Call::Unknown(command) => {
            let known = Verb::ALL.map(Verb::as_str).join(", ");
            return Err(
                Error::environment(format!("unknown CNI_COMMAND: {command}"))
                    .with_details(format!("it must be one of {known}")),
            );
        }
    };
    Ok(Outcome {
        stdout,
        stderr: String::new(),
        success: true,
    })
}

/// A result that the config's version cannot express is a failed ADD, and undone.
fn add(plugin: &impl Plugin, request: &Request) -> Result<(String, CniResult), Error> {
    let result = plugin.add(request)?;
    match result.to_json(request.conf.cni_version) {
        Ok(text) => Ok((text, result)),
        Err(error) => {
            // The first failure is the one to report.
            let _ = plugin.undo(request, &result);
            Err(error)
        }
    }
}

/// For a person who runs the plugin by hand: two lines on stderr.
fn introduction(about: &About<'_>) -> Outcome {
    let supported: Vec<_> = about
        .supported
        .iter()
        .map(|version| version.as_str())
        .collect();
    Outcome {
        stdout: String::new(),
        stderr: format!(
            "CNI {} plugin {}\nCNI protocol versions supported: {}\n",
            about.name,
            about.version,
            supported.join(", ")
        ),
        success: true,
    }
}

fn versions(about: &About<'_>) -> Outcome {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Versions<'a> {
        cni_version: Version,
        supported_versions: &'a [Version],
    }
    let document = Versions {
        cni_version: Version::LATEST,
        supported_versions: about.supported,
    };
    let mut stdout = serde_json::json!(document).to_string();
    stdout.push('\n');
    Outcome {
        stdout,
        stderr: String::new(),
        success: true,
    }
}

/// Prints the error document and exits, because an abort would come before any code that could.
fn answer_panic(info: &PanicHookInfo<'_>) {
    let payload = info.payload();
    let message = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    let error = Error::internal(format!(
        "the plugin panicked: {message}: this is a bug, please report it"
    ))
    .with_details(place);
    let _ = io::stderr().write_all(format!("{error}\n").as_bytes());
    let shown = error.shortened().unwrap_or(error);
    let _ = io::stdout().write_all(shown.to_json(Version::LATEST).as_bytes());
    let _ = io::stdout().flush();
    std::process::exit(1);
}

#[cfg(test)]
mod tests;

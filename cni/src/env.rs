//! The environment: which verb needs which variable, and what a variable may hold.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::PathBuf;

use crate::error::Error;
use crate::version::Version;

pub(crate) mod name;

/// What the runtime asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// Attach a container to the network.
    Add,
    /// Detach it; best effort, repeatable.
    Del,
    /// Verify an attachment.
    Check,
    /// Remove what belongs to attachments that are gone.
    Gc,
    /// Say whether an ADD could be served.
    Status,
    /// Say which versions are spoken.
    Version,
}

impl Verb {
    /// Every verb.
    pub const ALL: [Self; 6] = [
        Self::Add,
        Self::Del,
        Self::Check,
        Self::Gc,
        Self::Status,
        Self::Version,
    ];

    /// The text in `CNI_COMMAND`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Version => "VERSION",
        }
    }

    /// The config version that a verb needs, where it needs one.
    #[must_use]
    pub fn since(self) -> Option<Version> {
        match self {
            Self::Add | Self::Del | Self::Version => None,
            Self::Check => Some(Version::V0_4_0),
            Self::Gc | Self::Status => Some(Version::V1_1_0),
        }
    }

    fn from_text(text: &OsStr) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|verb| OsStr::new(verb.as_str()) == text)
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One row of the contract.
struct Variable {
    name: &'static str,
    /// The verbs that cannot do without it. Only for these is the value looked at.
    required: &'static [Verb],
    validate: fn(&str) -> Result<(), Error>,
}

const COMMAND: &str = "CNI_COMMAND";
const CONTAINER_ID: &str = "CNI_CONTAINERID";
const NETNS: &str = "CNI_NETNS";
const IFNAME: &str = "CNI_IFNAME";
const ARGS: &str = "CNI_ARGS";
const PATH: &str = "CNI_PATH";
const NETNS_OVERRIDE: &str = "CNI_NETNS_OVERRIDE";

/// Verb x variable, in the order in which missing ones are reported.
const CONTRACT: [Variable; 5] = [
    Variable {
        name: CONTAINER_ID,
        required: &[Verb::Add, Verb::Del, Verb::Check],
        validate: name::container_id,
    },
    Variable {
        name: NETNS,
        required: &[Verb::Add, Verb::Check],
        validate: anything,
    },
    Variable {
        name: IFNAME,
        required: &[Verb::Add, Verb::Del, Verb::Check],
        validate: name::interface,
    },
    Variable {
        name: ARGS,
        required: &[],
        validate: anything,
    },
    Variable {
        name: PATH,
        required: &[Verb::Add, Verb::Del, Verb::Check, Verb::Gc, Verb::Status],
        validate: anything,
    },
];

#[expect(
    clippy::unnecessary_wraps,
    reason = "the signature of every entry of the table"
)]
fn anything(_: &str) -> Result<(), Error> {
    Ok(())
}

/// Which container is attached, where, and under which name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// `CNI_CONTAINERID`, validated.
    pub container_id: String,
    /// `CNI_IFNAME`, validated: 1 to 15 bytes.
    pub ifname: String,
    /// `CNI_NETNS` as given; absent only on DEL.
    pub netns: Option<PathBuf>,
    /// `CNI_ARGS` as given; see [`crate::args::CniArgs`].
    pub args: String,
    /// `CNI_PATH`, split at colons.
    pub path: Vec<PathBuf>,
}

/// What the environment asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Invocation {
    /// `CNI_COMMAND` is not set: a person, not a runtime.
    Nobody,
    /// `VERSION`: nothing else is looked at, stdin included.
    Version,
    /// A call with a config on stdin.
    Call(Call),
}

/// A call with a config on stdin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// `ADD`, `DEL` or `CHECK`.
    Attachment(AttachmentVerb, Attachment, NetnsOverride),
    /// `GC` or `STATUS`, with `CNI_PATH`.
    Network(NetworkVerb, Vec<PathBuf>),
    /// A command nobody specified; the config is judged first, as the reference does.
    Unknown(String),
}

/// A verb about one container's attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named as in `Verb`")]
pub enum AttachmentVerb {
    Add,
    Del,
    Check,
}

/// A verb about a network as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named as in `Verb`")]
pub enum NetworkVerb {
    Gc,
    Status,
}

/// `CNI_NETNS_OVERRIDE`: whether the plugin's own netns is an acceptable target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetnsOverride {
    /// The default: attaching the plugin's own netns is an error.
    Refuse,
    /// The caller insists.
    Accept,
}

impl Invocation {
    /// Reads the environment through `lookup`. An empty value counts as missing.
    ///
    /// A value that is present but wrong is reported at once, alone; otherwise all that is missing
    /// is reported together. Both are code 4.
    pub fn parse(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, Error> {
        let get = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let text = |name: &str| {
            get(name)
                .map(|value| value.to_string_lossy().into_owned())
                .unwrap_or_default()
        };
        let Some(command) = get(COMMAND) else {
            return Ok(Self::Nobody);
        };
        let Some(verb) = Verb::from_text(&command) else {
            return Ok(Self::Call(Call::Unknown(
                command.to_string_lossy().into_owned(),
            )));
        };
        let mut missing = Vec::new();
        for variable in CONTRACT
            .iter()
            .filter(|variable| variable.required.contains(&verb))
        {
            match get(variable.name) {
                None => missing.push(variable.name),
                Some(value) => (variable.validate)(&value.to_string_lossy())?,
            }
        }
        if !missing.is_empty() {
            let list = missing.join(",");
            return Err(
                Error::environment(format!("required env variables [{list}] missing"))
                    .with_details(format!("the caller has to set them for {verb}")),
            );
        }
        let path = || {
            get(PATH)
                .map(|value| std::env::split_paths(&value).collect())
                .unwrap_or_default()
        };
        let attachment = |verb| {
            let netns_override = text(NETNS_OVERRIDE);
            Self::Call(Call::Attachment(
                verb,
                Attachment {
                    container_id: text(CONTAINER_ID),
                    ifname: text(IFNAME),
                    netns: get(NETNS).map(PathBuf::from),
                    args: text(ARGS),
                    path: path(),
                },
                if netns_override == "1" || netns_override.eq_ignore_ascii_case("true") {
                    NetnsOverride::Accept
                } else {
                    NetnsOverride::Refuse
                },
            ))
        };
        Ok(match verb {
            Verb::Add => attachment(AttachmentVerb::Add),
            Verb::Del => attachment(AttachmentVerb::Del),
            Verb::Check => attachment(AttachmentVerb::Check),
            Verb::Gc => Self::Call(Call::Network(NetworkVerb::Gc, path())),
            Verb::Status => Self::Call(Call::Network(NetworkVerb::Status, path())),
            Verb::Version => Self::Version,
        })
    }
}

impl From<AttachmentVerb> for Verb {
    fn from(verb: AttachmentVerb) -> Self {
        match verb {
            AttachmentVerb::Add => Self::Add,
            AttachmentVerb::Del => Self::Del,
            AttachmentVerb::Check => Self::Check,
        }
    }
}

impl From<NetworkVerb> for Verb {
    fn from(verb: NetworkVerb) -> Self {
        match verb {
            NetworkVerb::Gc => Self::Gc,
            NetworkVerb::Status => Self::Status,
        }
    }
}

#[cfg(test)]
mod tests;

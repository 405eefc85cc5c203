//! What a plugin answers when it fails.

use std::fmt;
use std::io;

use serde::Serialize;

use crate::version::Version;

/// The number that tells a runtime what kind of failure it sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// 1: the config's version is not spoken here, or does not have the verb.
    IncompatibleVersion,
    /// 2: a field or a value that this plugin does not offer; the message names both.
    UnsupportedField,
    /// 3: the container is unknown; the runtime need not call DEL.
    UnknownContainer,
    /// 4: an environment variable is missing or wrong.
    InvalidEnvironment,
    /// 5: reading or writing failed.
    Io,
    /// 6: a document could not be decoded.
    Decode,
    /// 7: the network config is decodable but makes no sense.
    InvalidConfig,
    /// 8: the network namespace cannot be the one that is meant.
    InvalidNetns,
    /// 11: the same call may succeed later.
    TryAgainLater,
    /// 50: STATUS: an ADD cannot be served now.
    NotAvailable,
    /// 51: STATUS: an ADD cannot be served, and existing containers may suffer.
    LimitedConnectivity,
    /// 999: anything else, as the reference library numbers it.
    Internal,
    /// Any other number: 100 and up belong to plugins; a delegate may send anything.
    Other(u32),
}

impl Code {
    const NAMED: [Self; 12] = [
        Self::IncompatibleVersion,
        Self::UnsupportedField,
        Self::UnknownContainer,
        Self::InvalidEnvironment,
        Self::Io,
        Self::Decode,
        Self::InvalidConfig,
        Self::InvalidNetns,
        Self::TryAgainLater,
        Self::NotAvailable,
        Self::LimitedConnectivity,
        Self::Internal,
    ];

    /// The number on the wire.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::IncompatibleVersion => 1,
            Self::UnsupportedField => 2,
            Self::UnknownContainer => 3,
            Self::InvalidEnvironment => 4,
            Self::Io => 5,
            Self::Decode => 6,
            Self::InvalidConfig => 7,
            Self::InvalidNetns => 8,
            Self::TryAgainLater => 11,
            Self::NotAvailable => 50,
            Self::LimitedConnectivity => 51,
            Self::Internal => 999,
            Self::Other(number) => number,
        }
    }

    /// The code with this number.
    #[must_use]
    pub fn from_number(number: u32) -> Self {
        Self::NAMED
            .into_iter()
            .find(|code| code.number() == number)
            .unwrap_or(Self::Other(number))
    }
}

/// So many bytes of `msg` and `details` together are shown to a runtime, which puts them into an event, a log
/// and maybe a label. What is longer is on stderr as a whole.
pub const LENGTH_MAX: usize = 1024;

/// A failure as the runtime gets to see it.
///
/// `msg` says what happened, to what, and what to do; `details` holds what would distract there.
/// Runtimes show the two joined by `"; "`, and so does [`fmt::Display`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The kind of failure.
    pub code: Code,
    /// One sentence.
    pub msg: String,
    /// More about it; may be empty.
    pub details: String,
}

impl Error {
    /// A failure of this kind, without details.
    pub fn new(code: Code, msg: impl Into<String>) -> Self {
        Self {
            code,
            msg: msg.into(),
            details: String::new(),
        }
    }

    /// Adds (replaces) the details.
    #[must_use]
    pub fn with_details(mut self, details: impl Into<String>) -> Self {
        self.details = details.into();
        self
    }

    /// Puts `what` in front of the message: `what: msg`. The code stays.
    #[must_use]
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        self.msg = format!("{what}: {}", self.msg);
        self
    }

    /// Code 2, in the form that the specification asks for: it names key and value.
    pub fn unsupported(key: &str, value: impl fmt::Display) -> Self {
        Self::new(
            Code::UnsupportedField,
            format!(
                "unsupported field in network configuration: key {key:?}, value {value}: remove it"
            ),
        )
    }

    /// Code 4.
    pub fn environment(msg: impl Into<String>) -> Self {
        Self::new(Code::InvalidEnvironment, msg)
    }

    /// Code 5: `what: source`.
    pub fn io(what: impl fmt::Display, source: &io::Error) -> Self {
        Self::new(Code::Io, format!("{what}: {source}"))
    }

    /// Code 6.
    pub fn decode(msg: impl Into<String>) -> Self {
        Self::new(Code::Decode, msg)
    }

    /// Code 7.
    pub fn config(msg: impl Into<String>) -> Self {
        Self::new(Code::InvalidConfig, msg)
    }

    /// Code 11.
    pub fn try_again(msg: impl Into<String>) -> Self {
        Self::new(Code::TryAgainLater, msg)
    }

    /// Code 50, for STATUS.
    pub fn not_available(msg: impl Into<String>) -> Self {
        Self::new(Code::NotAvailable, msg)
    }

    /// Code 51, for STATUS.
    pub fn limited_connectivity(msg: impl Into<String>) -> Self {
        Self::new(Code::LimitedConnectivity, msg)
    }

    /// Code 999.
    pub fn internal(msg: impl Into<String>) -> Self {
        Self::new(Code::Internal, msg)
    }

    /// The error with the middle of its texts left out, if it is too long for a runtime's events: at most
    /// [`LENGTH_MAX`] bytes. `None` if it is short enough.
    #[must_use]
    pub fn shortened(&self) -> Option<Self> {
        if self.msg.len() + self.details.len() <= LENGTH_MAX {
            return None;
        }
        let room = if self.details.is_empty() {
            LENGTH_MAX
        } else {
            LENGTH_MAX / 4 * 3
        };
        let msg = without_middle(&self.msg, room);
        let details = without_middle(&self.details, LENGTH_MAX - msg.len());
        Some(Self {
            code: self.code,
            msg,
            details,
        })
    }

    /// The document for stdout: keys as the specification has them, four spaces deep, no newline at
    /// the end.
    #[must_use]
    pub fn to_json(&self, version: Version) -> String {
        crate::result::pretty(&WireError {
            cni_version: version,
            code: self.code.number(),
            msg: &self.msg,
            details: &self.details,
        })
    }
}

/// Leaves out the middle of a text: it begins with what happened, and ends with what to do, or with the last
/// lines of a log.
fn without_middle(text: &str, room: usize) -> String {
    const GAP: &str = " [... all of it is on stderr ...] ";
    if text.len() <= room {
        return text.to_owned();
    }
    let half = room.saturating_sub(GAP.len()) / 2;
    let head = text.floor_char_boundary(half);
    let tail = text.ceil_char_boundary(text.len() - half);
    format!("{}{GAP}{}", &text[..head], &text[tail..])
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.msg)?;
        if !self.details.is_empty() {
            write!(f, "; {}", self.details)?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

#[derive(Serialize)]
struct WireError<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: Version,
    code: u32,
    msg: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    details: &'a str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_codes_agree() {
        for code in Code::NAMED {
            assert_eq!(Code::from_number(code.number()), code);
        }
        assert_eq!(Code::from_number(123), Code::Other(123));
    }

    #[test]
    fn what_is_too_long_for_an_event_keeps_its_beginning_and_its_end() {
        let short = Error::config("x".repeat(LENGTH_MAX - 2)).with_details("yz");
        assert_eq!(short.shortened(), None);
        let log = format!(
            "program p: refused: {}the last line",
            "verbose\n".repeat(10_000)
        );
        for details in [String::new(), "d".repeat(5_000)] {
            let whole = Error::internal(log.clone()).with_details(details.clone());
            let short = whole.shortened().expect("too long");
            assert!(short.msg.len() + short.details.len() <= LENGTH_MAX);
            assert!(short.msg.starts_with("program p: refused:"), "{short}");
            assert!(short.msg.ends_with("the last line"), "{short}");
            assert_eq!(short.details.is_empty(), details.is_empty());
            assert_eq!(short.code, Code::Internal);
        }
        let wide = Error::config("\u{e9}".repeat(LENGTH_MAX));
        let short = wide.shortened().expect("too long");
        assert!(short.msg.len() <= LENGTH_MAX);
    }

    #[test]
    fn details_are_left_out_when_empty() {
        let error = Error::config("missing network name");
        assert_eq!(
            error.to_json(Version::V1_1_0),
            "{\n    \"cniVersion\": \"1.1.0\",\n    \"code\": 7,\n    \"msg\": \"missing network name\"\n}"
        );
        assert_eq!(
            error.with_details("x").to_string(),
            "missing network name; x"
        );
    }
}

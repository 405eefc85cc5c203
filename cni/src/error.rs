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

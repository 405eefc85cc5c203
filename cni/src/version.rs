//! Versions of the specification, and which verb needs which.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::env::Verb;
use crate::error::{Code, Error};

/// A released version of the specification, ordered by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// 0.1.0: `ip4` and `ip6` results; also what a config without `cniVersion` means.
    V0_1_0,
    /// 0.2.0: adds VERSION.
    V0_2_0,
    /// 0.3.0: adds plugin chains, lists of interfaces and addresses.
    V0_3_0,
    /// 0.3.1: an erratum of 0.3.0.
    V0_3_1,
    /// 0.4.0: adds CHECK, and `prevResult` on DEL.
    V0_4_0,
    /// 1.0.0: addresses lose their `version`.
    V1_0_0,
    /// 1.1.0: adds GC, STATUS and route attributes.
    V1_1_0,
}

impl Version {
    /// Every version, oldest first.
    pub const ALL: [Self; 7] = [
        Self::V0_1_0,
        Self::V0_2_0,
        Self::V0_3_0,
        Self::V0_3_1,
        Self::V0_4_0,
        Self::V1_0_0,
        Self::V1_1_0,
    ];

    /// The newest version this crate speaks.
    pub const LATEST: Self = Self::V1_1_0;

    /// The text that stands in `cniVersion`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V0_1_0 => "0.1.0",
            Self::V0_2_0 => "0.2.0",
            Self::V0_3_0 => "0.3.0",
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    /// The version with exactly this text; the empty text is 0.1.0.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self::V0_1_0);
        }
        Self::ALL
            .into_iter()
            .find(|version| version.as_str() == text)
    }

    fn triple(self) -> Triple {
        match self {
            Self::V0_1_0 => [0, 1, 0],
            Self::V0_2_0 => [0, 2, 0],
            Self::V0_3_0 => [0, 3, 0],
            Self::V0_3_1 => [0, 3, 1],
            Self::V0_4_0 => [0, 4, 0],
            Self::V1_0_0 => [1, 0, 0],
            Self::V1_1_0 => [1, 1, 0],
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// Major, minor, micro.
type Triple = [u32; 3];

/// Reads up to three dotted numbers; parts that are left out are zero, and no text at all is 0.1.0.
fn parse(text: &str) -> Result<Triple, Error> {
    if text.is_empty() {
        return Ok(Version::V0_1_0.triple());
    }
    let invalid = || {
        Error::new(
            Code::Decode,
            format!("invalid version {text:?}: cniVersion must be one such as \"1.1.0\""),
        )
    };
    let mut triple = [0; 3];
    for (index, part) in text.split('.').enumerate() {
        *triple.get_mut(index).ok_or_else(invalid)? = part.parse().map_err(|_| invalid())?;
    }
    Ok(triple)
}

/// Decides in which version to answer: the config's `declared` one, if the verb exists there and
/// the plugin speaks it.
pub(crate) fn negotiate(
    verb: Verb,
    declared: &str,
    supported: &[Version],
) -> Result<Version, Error> {
    if let Some(since) = verb.since() {
        let config = parse(declared)?;
        if config < since.triple() {
            return Err(Error::new(
                Code::IncompatibleVersion,
                format!("config version does not allow {verb}"),
            )
            .with_details(format!(
                "{verb} came with {since}: set cniVersion to that or a later one",
            )));
        }
        if supported.iter().all(|version| version.triple() < config) {
            return Err(Error::new(
                Code::IncompatibleVersion,
                format!("plugin version does not allow {verb}"),
            ));
        }
    }
    Version::from_text(declared)
        .filter(|version| supported.contains(version))
        .ok_or_else(|| {
            let declared = if declared.is_empty() {
                Version::V0_1_0.as_str()
            } else {
                declared
            };
            let list: Vec<_> = supported
                .iter()
                .map(|version| format!("{:?}", version.as_str()))
                .collect();
            Error::new(Code::IncompatibleVersion, "incompatible CNI versions").with_details(
                format!(
                    "config is {declared:?}, plugin supports [{}]",
                    list.join(" ")
                ),
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_up_to_three_numbers() {
        assert_eq!(parse("").ok(), Some([0, 1, 0]));
        assert_eq!(parse("1").ok(), Some([1, 0, 0]));
        assert_eq!(parse("1.2").ok(), Some([1, 2, 0]));
        for bad in ["1.2.3.4", "a", "1..0", "-1.0.0", "1.0.0 "] {
            assert_eq!(parse(bad).expect_err(bad).code, Code::Decode);
        }
    }

    #[test]
    fn each_verb_has_its_first_version() {
        let all = Version::ALL;
        let refusal = |verb, declared| negotiate(verb, declared, &all).expect_err("too old").msg;
        assert_eq!(
            refusal(Verb::Check, "0.3.1"),
            "config version does not allow CHECK"
        );
        assert_eq!(
            refusal(Verb::Gc, "1.0.0"),
            "config version does not allow GC"
        );
        assert_eq!(
            refusal(Verb::Status, ""),
            "config version does not allow STATUS"
        );
        assert_eq!(
            refusal(Verb::Check, "2.0.0"),
            "plugin version does not allow CHECK"
        );
        assert_eq!(negotiate(Verb::Add, "", &all).ok(), Some(Version::V0_1_0));
        assert_eq!(
            negotiate(Verb::Check, "0.4.0", &all).ok(),
            Some(Version::V0_4_0)
        );
    }

    #[test]
    fn a_version_nobody_released_is_refused_by_its_text() {
        let error = negotiate(Verb::Add, "99.9.9", &[Version::V0_4_0, Version::V1_0_0])
            .expect_err("unknown");
        assert_eq!(error.code, Code::IncompatibleVersion);
        assert_eq!(error.msg, "incompatible CNI versions");
        assert_eq!(
            error.details,
            r#"config is "99.9.9", plugin supports ["0.4.0" "1.0.0"]"#
        );
        assert!(
            negotiate(Verb::Add, "1.0", &Version::ALL).is_err(),
            "equal by number is not equal by text"
        );
    }
}

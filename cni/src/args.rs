//! `CNI_ARGS`: `KEY=value` pairs between semicolons.

use crate::error::Error;

const IGNORE_UNKNOWN: &str = "IgnoreUnknown";

/// The pairs of `CNI_ARGS`, in their order. Keys are case-sensitive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CniArgs {
    pairs: Vec<(String, String)>,
    ignore_unknown: bool,
}

impl CniArgs {
    /// Reads the variable's value. Each pair holds exactly one `=`; code 4 otherwise.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut args = Self::default();
        if text.is_empty() {
            return Ok(args);
        }
        for pair in text.split(';') {
            let (key, value) = pair
                .split_once('=')
                .filter(|(_, value)| !value.contains('='))
                .ok_or_else(|| {
                    Error::environment(format!("ARGS: invalid pair {pair:?}")).with_details(
                        "CNI_ARGS has to be pairs KEY=value with a semicolon between two, and none at the end",
                    )
                })?;
            if key == IGNORE_UNKNOWN {
                args.ignore_unknown = switch(value).ok_or_else(|| {
                    Error::environment(format!("ARGS: error parsing value of pair {pair:?}"))
                        .with_details("in CNI_ARGS it must be 1, true, 0 or false")
                })?;
            }
            args.pairs.push((key.to_owned(), value.to_owned()));
        }
        Ok(args)
    }

    /// Refuses keys that are not in `known`, unless the caller said `IgnoreUnknown`.
    pub fn require_known(&self, known: &[&str]) -> Result<(), Error> {
        let unknown: Vec<_> = self
            .pairs
            .iter()
            .filter(|(key, _)| key != IGNORE_UNKNOWN && !known.contains(&key.as_str()))
            .map(|(key, value)| format!("{:?}", format!("{key}={value}")))
            .collect();
        if unknown.is_empty() || self.ignore_unknown {
            return Ok(());
        }
        let list = unknown.join(" ");
        Err(
            Error::environment(format!("ARGS: unknown args [{list}]")).with_details(format!(
                "take them out of CNI_ARGS, or add {IGNORE_UNKNOWN}=1; known here are {}",
                known.join(", ")
            )),
        )
    }

    /// The value of `key`; the last one, if it is given twice.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.pairs
            .iter()
            .rev()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.as_str())
    }
}

fn switch(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" => Some(true),
        "0" | "false" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_text_is_misread(text in "[A-Za-z=;1 ]{0,40}") {
            let well_formed = text.is_empty() || text.split(';').all(|pair| pair.matches('=').count() == 1);
            match CniArgs::parse(&text) {
                Ok(args) => {
                    prop_assert!(well_formed);
                    let again: Vec<_> = args.pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
                    prop_assert_eq!(again.join(";"), text);
                }
                Err(error) => prop_assert!(!well_formed || error.msg.contains("IgnoreUnknown")),
            }
        }
    }

    fn judge(text: &str) -> Result<(), String> {
        CniArgs::parse(text)
            .and_then(|args| args.require_known(&["IP"]))
            .map_err(|error| error.msg)
    }

    #[test]
    fn the_reference_table() {
        assert_eq!(judge(""), Ok(()));
        assert_eq!(judge("IP=10.0.0.1"), Ok(()));
        assert_eq!(judge("IP="), Ok(()));
        assert_eq!(judge("IP=1;"), Err("ARGS: invalid pair \"\"".into()));
        assert_eq!(judge("A=b=c"), Err("ARGS: invalid pair \"A=b=c\"".into()));
        assert_eq!(
            judge("ip=1;B=2"),
            Err("ARGS: unknown args [\"ip=1\" \"B=2\"]".into())
        );
        assert_eq!(judge("B=2;IgnoreUnknown=True"), Ok(()));
        assert_eq!(judge("IgnoreUnknown=1;B=2"), Ok(()));
        assert_eq!(
            judge("IgnoreUnknown=0;B=2"),
            Err("ARGS: unknown args [\"B=2\"]".into())
        );
        assert_eq!(
            judge("IgnoreUnknown=yes"),
            Err("ARGS: error parsing value of pair \"IgnoreUnknown=yes\"".into())
        );
    }

    #[test]
    fn the_last_value_counts() {
        let args = CniArgs::parse("IP=a;IP=b").expect("two pairs");
        assert_eq!(args.get("IP"), Some("b"));
        assert_eq!(args.get("MAC"), None);
    }
}

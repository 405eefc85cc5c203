//! JSON as runtimes write it for plugins in Go.
//!
//! Keys of a struct match in any case (an exact match wins), null is the default value, unknown
//! keys are ignored. A value of the wrong type is an error that names the key, by its path, and the
//! value.
//!
//! Works with any `#[derive(Deserialize)]` struct. Mark it `#[serde(default)]`, as every key may be
//! missing, and do not use `#[serde(flatten)]`: a flattened struct hides the names of its keys.

use serde::Deserialize;
use serde_json::{Map, Value};

mod decoder;

pub use decoder::DecodeError;

/// Decodes `value` into a `T`.
pub fn from_value<'de, T: Deserialize<'de>>(value: &'de Value) -> Result<T, DecodeError> {
    T::deserialize(decoder::Decoder::new(value))
}

/// Decodes the keys of `map` into a `T`.
pub fn from_map<'de, T: Deserialize<'de>>(map: &'de Map<String, Value>) -> Result<T, DecodeError> {
    T::deserialize(decoder::Fields::new(map))
}

/// The value under `key`, in any case; an exact match wins. Null counts as missing.
#[must_use]
pub fn get<'a>(map: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    map.get(key)
        .or_else(|| {
            map.iter()
                .rev()
                .find(|(name, _)| name.eq_ignore_ascii_case(key))
                .map(|(_, value)| value)
        })
        .filter(|value| !value.is_null())
}

#[cfg(test)]
mod tests;

//! The serde deserializer behind [`super::from_value`].

use std::fmt;

use serde::Deserializer;
use serde::de::value::{BorrowedStrDeserializer, MapDeserializer, StrDeserializer};
use serde::de::{
    DeserializeSeed, Error as _, Expected, IntoDeserializer, MapAccess, SeqAccess, Unexpected,
    Visitor,
};
use serde_json::{Map, Value};

/// More of a wrong value than this many characters helps nobody.
const SHOWN: usize = 120;

/// A value of the wrong type or out of range, with the path of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeError {
    path: String,
    value: Option<String>,
    reason: String,
}

impl DecodeError {
    /// The key that holds the value, like `ipam.ranges[0][1].subnet`; empty for the document
    /// itself.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Refuses a value. `what` says what would be taken in its place, as it follows "it must be".
    pub(crate) fn expected(what: impl fmt::Display) -> Self {
        Self {
            path: String::new(),
            value: None,
            reason: format!("it must be {what}"),
        }
    }

    /// Puts `key` in front of the path: the document is the value of that key.
    #[must_use]
    pub fn under(mut self, key: &str, value: &Value) -> Self {
        if self.value.is_none() {
            let text = value.to_string();
            self.value = Some(match text.char_indices().nth(SHOWN) {
                Some((end, _)) => format!("{}...", &text[..end]),
                None => text,
            });
        }
        if !self.path.is_empty() && !self.path.starts_with('[') {
            self.path.insert(0, '.');
        }
        self.path.insert_str(0, key);
        self
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.value, self.path.as_str()) {
            (Some(value), path) => write!(f, "key {path:?} cannot be {value}: {}", self.reason),
            (None, "") => f.write_str(&self.reason),
            (None, path) => write!(f, "key {path:?}: {}", self.reason),
        }
    }
}

impl std::error::Error for DecodeError {}

/// The words of serde speak of Rust's types, which are none of JSON: these speak of the config.
impl serde::de::Error for DecodeError {
    fn custom<T: fmt::Display>(reason: T) -> Self {
        Self {
            path: String::new(),
            value: None,
            reason: reason.to_string(),
        }
    }

    fn invalid_type(_: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::expected(expected)
    }

    fn invalid_value(_: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::expected(expected)
    }

    fn unknown_variant(_: &str, known: &'static [&'static str]) -> Self {
        let known: Vec<_> = known.iter().map(|name| format!("{name:?}")).collect();
        Self::expected(known.join(" or "))
    }

    fn missing_field(field: &'static str) -> Self {
        Self::custom(format!("it needs a key {field:?}"))
    }
}

/// Decodes one value.
pub(super) struct Decoder<'de> {
    value: &'de Value,
}

impl<'de> Decoder<'de> {
    pub(super) fn new(value: &'de Value) -> Self {
        Self { value }
    }
}

/// Null is zero. Forwards to `deserialize_any` unless the value is null, or of another kind than `$fits`, which is
/// called `$what` in the error.
macro_rules! zero_for_null {
    ($($method:ident => $visit:ident($zero:expr), $fits:pat, $what:expr;)+) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
            match self.value {
                Value::Null => visitor.$visit($zero),
                $fits => self.deserialize_any(visitor),
                _ => Err(DecodeError::expected($what)),
            }
        }
    )+};
}

/// Null is zero. Anything else has to be a whole number that fits the type.
macro_rules! whole_numbers {
    ($($method:ident => $visit:ident($type:ty);)+) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
            let number = match self.value {
                Value::Null => Some(0),
                Value::Number(number) => {
                    let unsigned = number.as_u64().and_then(|number| <$type>::try_from(number).ok());
                    let signed = || number.as_i64().and_then(|number| <$type>::try_from(number).ok());
                    unsigned.or_else(signed)
                }
                _ => None,
            };
            visitor.$visit(number.ok_or_else(|| whole_number(<$type>::MIN, <$type>::MAX))?)
        }
    )+};
}

/// Asks for a whole number within these bounds. Those of 64 bits are not told: keys that take such numbers have
/// narrower ones, which are checked and told elsewhere.
fn whole_number(min: impl Into<i128>, max: impl Into<i128>) -> DecodeError {
    let (min, max) = (min.into(), max.into());
    match (min, u32::try_from(max)) {
        (min, Ok(max)) => DecodeError::expected(format_args!("a whole number from {min} to {max}")),
        (0, Err(_)) => DecodeError::expected("a whole number, and not below zero"),
        (_, Err(_)) => DecodeError::expected("a whole number"),
    }
}

impl<'de> Deserializer<'de> for Decoder<'de> {
    type Error = DecodeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
                (Some(value), _, _) => visitor.visit_u64(value),
                (None, Some(value), _) => visitor.visit_i64(value),
                (None, None, Some(value)) => visitor.visit_f64(value),
                (None, None, None) => Err(DecodeError::invalid_type(
                    Unexpected::Other("number"),
                    &visitor,
                )),
            },
            Value::String(text) => visitor.visit_borrowed_str(text),
            Value::Array(values) => visitor.visit_seq(Elements {
                values: values.iter(),
                index: 0,
            }),
            Value::Object(map) => visitor.visit_map(Entries {
                entries: map.iter(),
                value: None,
            }),
        }
    }

    zero_for_null! {
        deserialize_bool => visit_bool(false), Value::Bool(_), "true or false";
        deserialize_f32 => visit_f32(0.0), Value::Number(_), "a number";
        deserialize_f64 => visit_f64(0.0), Value::Number(_), "a number";
        deserialize_str => visit_borrowed_str(""), Value::String(_), "a text in quotes";
        deserialize_string => visit_borrowed_str(""), Value::String(_), "a text in quotes";
        deserialize_seq => visit_seq(Elements { values: [].iter(), index: 0 }), Value::Array(_), "a list";
        deserialize_map => visit_map(MapDeserializer::<_, DecodeError>::new(
            std::iter::empty::<(&'de str, &'de str)>()
        )), Value::Object(_), "an object";
    }

    whole_numbers! {
        deserialize_i8 => visit_i8(i8); deserialize_i16 => visit_i16(i16);
        deserialize_i32 => visit_i32(i32); deserialize_i64 => visit_i64(i64);
        deserialize_u8 => visit_u8(u8); deserialize_u16 => visit_u16(u16);
        deserialize_u32 => visit_u32(u32); deserialize_u64 => visit_u64(u64);
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        if self.value.is_null() {
            visitor.visit_none()
        } else {
            visitor.visit_some(self)
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        match self.value {
            Value::Object(map) => Fields::new(map).deserialize_struct(name, fields, visitor),
            Value::Null => visitor.visit_map(MatchedFields {
                entries: Vec::new().into_iter(),
                value: None,
            }),
            // Not as a list either, which serde would accept.
            _ => Err(DecodeError::expected("an object")),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        match self.value {
            Value::String(name) => {
                visitor.visit_enum(BorrowedStrDeserializer::<DecodeError>::new(name))
            }
            // Not by its number either, which serde would accept.
            _ => Err(DecodeError::unknown_variant("", names)),
        }
    }

    serde::forward_to_deserialize_any! {
        i128 u128 char bytes byte_buf unit unit_struct tuple tuple_struct identifier ignored_any
    }
}

/// Decodes the keys of an object.
pub(super) struct Fields<'de> {
    map: &'de Map<String, Value>,
}

impl<'de> Fields<'de> {
    pub(super) fn new(map: &'de Map<String, Value>) -> Self {
        Self { map }
    }
}

impl<'de> Deserializer<'de> for Fields<'de> {
    type Error = DecodeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        visitor.visit_map(Entries {
            entries: self.map.iter(),
            value: None,
        })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        let entries: Vec<_> = fields
            .iter()
            .filter_map(|field| super::get(self.map, field).map(|value| (*field, value)))
            .collect();
        visitor.visit_map(MatchedFields {
            entries: entries.into_iter(),
            value: None,
        })
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

struct Elements<'de> {
    values: std::slice::Iter<'de, Value>,
    index: usize,
}

impl<'de> SeqAccess<'de> for Elements<'de> {
    type Error = DecodeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, DecodeError> {
        let Some(value) = self.values.next() else {
            return Ok(None);
        };
        let segment = format!("[{}]", self.index);
        self.index += 1;
        seed.deserialize(Decoder { value })
            .map(Some)
            .map_err(|error| error.under(&segment, value))
    }
}

/// The entries of a free-form object, null ones included.
struct Entries<'de> {
    entries: serde_json::map::Iter<'de>,
    value: Option<(&'de str, &'de Value)>,
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = DecodeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, DecodeError> {
        let Some((key, value)) = self.entries.next() else {
            return Ok(None);
        };
        self.value = Some((key, value));
        seed.deserialize(BorrowedStrDeserializer::new(key))
            .map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(
        &mut self,
        seed: V,
    ) -> Result<V::Value, DecodeError> {
        decode_entry(self.value.take(), seed)
    }
}

/// The entries of a struct, under the names that its fields have in Rust's eyes.
struct MatchedFields<'de> {
    entries: std::vec::IntoIter<(&'static str, &'de Value)>,
    value: Option<(&'static str, &'de Value)>,
}

impl<'de> MapAccess<'de> for MatchedFields<'de> {
    type Error = DecodeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, DecodeError> {
        let Some((key, value)) = self.entries.next() else {
            return Ok(None);
        };
        self.value = Some((key, value));
        let key: StrDeserializer<'_, DecodeError> = key.into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(
        &mut self,
        seed: V,
    ) -> Result<V::Value, DecodeError> {
        decode_entry(self.value.take(), seed)
    }
}

fn decode_entry<'de, V: DeserializeSeed<'de>>(
    entry: Option<(&str, &'de Value)>,
    seed: V,
) -> Result<V::Value, DecodeError> {
    let (key, value) =
        entry.ok_or_else(|| DecodeError::custom("a value was asked for before its key"))?;
    seed.deserialize(Decoder { value })
        .map_err(|error| error.under(key, value))
}

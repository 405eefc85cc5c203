//! The serde deserializer behind [`super::from_value`].

use std::fmt;

use serde::Deserializer;
use serde::de::value::{BorrowedStrDeserializer, MapDeserializer, StrDeserializer};
use serde::de::{
    DeserializeSeed, EnumAccess, Error as _, IntoDeserializer, MapAccess, SeqAccess, Unexpected,
    VariantAccess, Visitor,
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

    /// Puts `key` in front of the path: the document is the value of that key.
    #[must_use]
    pub fn under(self, key: &str) -> Self {
        self.at(key, None)
    }

    fn at(mut self, segment: &str, value: Option<&Value>) -> Self {
        if let (None, Some(value)) = (&self.value, value) {
            let text = value.to_string();
            self.value = Some(match text.char_indices().nth(SHOWN) {
                Some((end, _)) => format!("{}...", &text[..end]),
                None => text,
            });
        }
        if !self.path.is_empty() && !self.path.starts_with('[') {
            self.path.insert(0, '.');
        }
        self.path.insert_str(0, segment);
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

impl serde::de::Error for DecodeError {
    fn custom<T: fmt::Display>(reason: T) -> Self {
        Self {
            path: String::new(),
            value: None,
            reason: reason.to_string(),
        }
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

/// Null is zero: forwards to `deserialize_any` unless the value is null.
macro_rules! zero_for_null {
    ($($method:ident => $visit:ident($zero:expr)),+ $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
            if self.value.is_null() { visitor.$visit($zero) } else { self.deserialize_any(visitor) }
        }
    )+};
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
        deserialize_bool => visit_bool(false),
        deserialize_i8 => visit_i8(0), deserialize_i16 => visit_i16(0),
        deserialize_i32 => visit_i32(0), deserialize_i64 => visit_i64(0),
        deserialize_u8 => visit_u8(0), deserialize_u16 => visit_u16(0),
        deserialize_u32 => visit_u32(0), deserialize_u64 => visit_u64(0),
        deserialize_f32 => visit_f32(0.0), deserialize_f64 => visit_f64(0.0),
        deserialize_str => visit_borrowed_str(""), deserialize_string => visit_borrowed_str(""),
        deserialize_seq => visit_seq(Elements { values: [].iter(), index: 0 }),
        deserialize_map => visit_map(MapDeserializer::<_, DecodeError>::new(
            std::iter::empty::<(&'de str, &'de str)>()
        )),
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
            // A struct is never written as a list, which serde would accept.
            Value::Array(_) => Err(DecodeError::invalid_type(Unexpected::Seq, &"an object")),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        visitor.visit_enum(Variant(self))
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
            .map_err(|error| error.at(&segment, Some(value)))
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
        .map_err(|error| error.at(key, Some(value)))
}

/// An enum is written as the text of a unit variant.
struct Variant<'de>(Decoder<'de>);

impl<'de> EnumAccess<'de> for Variant<'de> {
    type Error = DecodeError;
    type Variant = UnitOnly;

    fn variant_seed<V: DeserializeSeed<'de>>(
        self,
        seed: V,
    ) -> Result<(V::Value, UnitOnly), DecodeError> {
        Ok((seed.deserialize(self.0)?, UnitOnly))
    }
}

struct UnitOnly;

impl<'de> VariantAccess<'de> for UnitOnly {
    type Error = DecodeError;

    fn unit_variant(self) -> Result<(), DecodeError> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, _: T) -> Result<T::Value, DecodeError> {
        Err(DecodeError::invalid_type(
            Unexpected::UnitVariant,
            &"a variant with a value",
        ))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, DecodeError> {
        Err(DecodeError::invalid_type(Unexpected::UnitVariant, &visitor))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        Err(DecodeError::invalid_type(Unexpected::UnitVariant, &visitor))
    }
}

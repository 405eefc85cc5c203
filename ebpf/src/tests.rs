//! Random packets, built and judged by an independent implementation (etherparse), go through parsing, translation and checksums.

mod bytes;
mod datagram;
mod error;
mod family;
mod garbage;
mod parse;
mod translate;
mod tuple;

pub(crate) use bytes::crc32c;

/// The same properties for both families: in each body, `I` is the family.
macro_rules! for_both_families {
    ($(#[test] fn $name:ident($($arg:pat in $strategy:expr),+ $(,)?) $body:block)+) => {
        mod v4_tests {
            use super::*;
            type I = crate::ip::V4;
            proptest! { $(#[test] fn $name($($arg in $strategy),+) $body)+ }
        }
        mod v6_tests {
            use super::*;
            type I = crate::ip::V6;
            proptest! { $(#[test] fn $name($($arg in $strategy),+) $body)+ }
        }
    };
}
use for_both_families;

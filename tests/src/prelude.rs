//! What nearly every test begins with.

pub use anyhow::{Context as _, Result, ensure};
pub use underpass_abi::counter::Counter;

pub use crate::{
    Family::{self, V4, V6},
    Lab, Node, Pod,
    counter::Meter,
    needs_root,
    patience::eventually,
    traffic::{ping, tcp, udp},
};

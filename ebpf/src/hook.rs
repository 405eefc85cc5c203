//! The programs, one per position: the order of stages there.

pub mod from_host;
pub mod from_pod;
pub mod from_wire;
pub mod from_wire_xdp;
pub mod to_pod;
pub mod to_wire;

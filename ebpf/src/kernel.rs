//! What the kernel gives to programs: packets, maps, helpers. Nearly all `unsafe` is here.

pub mod container;
pub mod crc32c;
pub mod global;
pub mod host_ports;
pub mod linear;
pub mod maps;
pub mod memory;
pub mod net;
pub mod route;
pub mod skb;
pub mod socket;
pub mod verdict;
pub mod work_area;
pub mod xdp;

/// Length of an Ethernet header, in bytes.
pub const ETHERNET: u32 = 14;

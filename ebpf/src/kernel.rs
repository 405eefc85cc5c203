//! What the kernel gives to programs: packets, maps, helpers. Nearly all `unsafe` is here.

pub mod crc32c;
pub mod global;
pub mod linear;
pub mod maps;
pub mod memory;
pub mod net;
pub mod route;
pub mod skb;
pub mod verdict;
pub mod xdp;

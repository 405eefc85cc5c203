//! The part of the packet's path that needs no kernel: parsing, translation and checksums.
//!
//! Everything here is generic over [`Packet`](packet::Packet), so that the same code runs in the programs on an `skb` and in tests on bytes.
#![no_std]
#![forbid(unsafe_code)]

pub mod checksum;
pub mod crc32c;
pub mod error;
pub mod fingerprint;
pub mod ip;
pub mod l4;
pub mod packet;
pub mod translate;

#[cfg(test)]
extern crate std;
#[cfg(test)]
mod tests;

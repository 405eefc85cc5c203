//! Who computes checksums and cuts to segments: the sender's stack, or (as ordinarily) nobody before the wire.

use std::io;

use anyhow::{Context as _, Result};

use crate::{ioctl::on_device, netns::Netns};

/// `SIOCETHTOOL`.
const REQUEST: libc::Ioctl = 0x8946;
/// `ETHTOOL_SGRO`.
const SET_GRO: u32 = 0x2c;
/// `ETHTOOL_SRXCSUM`, `ETHTOOL_STXCSUM`, `ETHTOOL_STSO`, `ETHTOOL_SGSO`.
const COMMANDS: [u32; 5] = [0x15, 0x17, 0x1f, 0x24, SET_GRO];

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// Takes all of it off an interface: packets leave it whole, with checksums that the stack computed, and are checked on arrival.
pub fn take_off(netns: &Netns, interface: &str) -> Result<()> {
    netns
        .run(|| {
            COMMANDS
                .into_iter()
                .try_for_each(|command| switch(interface, command, 0))
        })
        .with_context(|| format!("take offloads off {interface} in {}", netns.name()))
}

/// Joins what arrives at an interface to larger packets (GRO), as a network card does.
pub fn switch_gro_on(netns: &Netns, interface: &str) -> Result<()> {
    netns
        .run(|| switch(interface, SET_GRO, 1))
        .with_context(|| format!("switch GRO of {interface} on in {}", netns.name()))
}

fn switch(interface: &str, command: u32, data: u32) -> io::Result<()> {
    let mut value = Value { command, data };
    on_device(interface, REQUEST, |arguments| {
        arguments.ifr_ifru.ifru_data = (&raw mut value).cast();
    })
}

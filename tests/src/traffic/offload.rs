//! Who computes checksums and cuts to segments: the sender's stack, or (as ordinarily) nobody before the wire.

use std::{io, os::fd::AsRawFd as _};

use anyhow::{Context as _, Result};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::netns::Netns;

/// `SIOCETHTOOL`.
const REQUEST: libc::c_ulong = 0x8946;
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
    let socket = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    let mut value = Value { command, data };
    // SAFETY: all bytes zero is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the request names a value of the kind that its command reads, and both outlive the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), REQUEST, &raw mut request) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

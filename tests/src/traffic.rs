//! Traffic with checked content, by TCP, UDP, SCTP and ICMP echo: whoever answers says which source address it saw.

pub mod content;
pub mod offload;
pub mod option;
pub mod ping;
pub mod raw;
pub mod sctp;
pub mod tcp;
pub mod udp;

use std::{net::SocketAddr, time::Duration};

use anyhow::Result;

use crate::{netns::Netns, patience};

/// How long anything may wait for a packet that should come; [`patience::here`] makes it more on slow machines.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// How long a test waits to believe that a packet does not come: on slow machines as well far longer than any packet takes.
pub const SILENCE: Duration = Duration::from_millis(400);

/// Servers by TCP and UDP at an address.
pub fn serve(netns: &Netns, at: SocketAddr) -> Result<(tcp::Server, udp::Server)> {
    Ok((
        tcp::Server::start(netns, at)?,
        udp::Server::start(netns, at)?,
    ))
}

fn patience() -> Duration {
    patience::here(PATIENCE)
}

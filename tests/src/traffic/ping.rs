//! ICMP echo by ping sockets: the kernel chooses the identifier, checks the checksum and sorts the replies.

use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

use super::{
    SILENCE,
    option::{self, Setting},
    patience,
};
use crate::netns::Netns;

/// Bytes of an echo message before its payload.
const HEADER: usize = 8;

/// A series of echo requests with one identifier: one flow.
#[derive(Debug)]
pub struct Ping {
    socket: UdpSocket,
    to: IpAddr,
    sequence: u16,
}

impl Ping {
    /// A series from a namespace to an address.
    pub fn new(netns: &Netns, to: IpAddr) -> Result<Self> {
        let (family, protocol) = match to {
            IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp),
            IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6),
        };
        let socket = netns
            .run(|| {
                let fd = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, protocol)?;
                let socket = UdpSocket::from(fd);
                // Connecting fails at once where there is no route, and shows ICMP errors at the next call.
                socket.connect(SocketAddr::new(to, 0))?;
                io::Result::Ok(socket)
            })
            .with_context(|| format!("open a ping socket in {} to {to}", netns.name()))?;
        Ok(Self {
            socket,
            to,
            sequence: 0,
        })
    }

    /// One request with `len` bytes of payload, and its reply: the time between them.
    pub fn echo(&mut self, len: usize) -> Result<Duration> {
        let answered = self.converse(len, patience());
        answered.with_context(|| {
            format!(
                "ping {} with {len} bytes, request {}",
                self.to, self.sequence
            )
        })
    }

    /// Some requests in a row.
    pub fn series(&mut self, times: usize) -> Result<()> {
        for _ in 0..times {
            self.echo(56)?;
        }
        Ok(())
    }

    /// Fails if a reply comes.
    pub fn hears_nothing(&mut self) -> Result<()> {
        match self.converse(56, SILENCE) {
            Err(_) => Ok(()),
            Ok(_) => bail!("a ping of {} must not be answered, but it was", self.to),
        }
    }

    /// Sets options of its socket.
    pub fn set(&self, options: &[Setting]) -> Result<()> {
        option::set(&self.socket, options)
    }

    /// Limits how many routers the requests may pass.
    pub fn set_hop_limit(&self, hops: u8) -> Result<()> {
        use nix::sys::socket::{setsockopt, sockopt};
        let hops = i32::from(hops);
        match self.to {
            IpAddr::V4(_) => setsockopt(&self.socket, sockopt::Ipv4Ttl, &hops)?,
            IpAddr::V6(_) => setsockopt(&self.socket, sockopt::Ipv6Ttl, &hops)?,
        }
        Ok(())
    }

    fn converse(&mut self, len: usize, patience: Duration) -> io::Result<Duration> {
        self.sequence = self.sequence.wrapping_add(1);
        let kind = match self.to {
            IpAddr::V4(_) => 8,
            IpAddr::V6(_) => 128,
        };
        let mut request = vec![0; HEADER + len];
        request[0] = kind;
        request[6..HEADER].copy_from_slice(&self.sequence.to_be_bytes());
        for (at, byte) in request[HEADER..].iter_mut().enumerate() {
            *byte = at.to_le_bytes()[0];
        }
        let start = Instant::now();
        self.socket.send(&request)?;
        let mut reply = vec![0; HEADER + len + 1];
        loop {
            let left = patience.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.socket.set_read_timeout(Some(left))?;
            let got = self.socket.recv(&mut reply)?;
            let payload_matches =
                got == request.len() && reply[6..got] == request[6..] && reply[0] != kind;
            if payload_matches {
                return Ok(start.elapsed());
            }
        }
    }
}

/// Pings an address a few times.
pub fn ping(netns: &Netns, to: IpAddr) -> Result<()> {
    Ping::new(netns, to)?.series(3)
}

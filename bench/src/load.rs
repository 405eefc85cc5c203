//! Traffic between two network namespaces, from one thread on its own core to one on another.

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use nix::{
    sys::socket::{setsockopt, sockopt::ReceiveTimeout},
    sys::time::{TimeVal, TimeValLike as _},
};
use serde::Serialize;
use underpass_tests::netns::Netns;

use crate::{join, others};

mod connections;
mod packets;
mod requests;
mod stream;

/// How long an end waits for the other before it gives up.
const SILENCE: Duration = Duration::from_secs(3);

/// A window in which nothing at all arrives says that a core was taken away, and is measured again.
const ATTEMPTS: usize = 3;

/// The server's port, and the host port that leads to it.
pub(crate) const PORT: u16 = 5001;

/// A kind of traffic.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, ValueEnum)]
pub(crate) enum Load {
    /// One connection, as many bytes as it carries.
    #[serde(rename = "TCP_STREAM")]
    Stream,
    /// One connection, one byte there and one byte back.
    #[serde(rename = "TCP_RR")]
    Requests,
    /// The same on 8 connections at once.
    #[serde(rename = "TCP_RR_8")]
    Requests8,
    /// The same on 64.
    #[serde(rename = "TCP_RR_64")]
    Requests64,
    /// A connection for each byte there and back; the server closes first.
    #[serde(rename = "TCP_CRR")]
    Connections,
    /// The same by 8 clients at once.
    #[serde(rename = "TCP_CRR_8")]
    Connections8,
    /// The same by 64.
    #[serde(rename = "TCP_CRR_64")]
    Connections64,
    /// One flow of datagrams of 64 bytes, one system call for each; what arrives counts.
    #[serde(rename = "UDP_64")]
    Packets,
    /// The same with 32 flows in turn and packets of mixed sizes.
    #[serde(rename = "UDP_MIX")]
    Mix,
}

impl Load {
    /// All, in the order of tables.
    pub(crate) const ALL: [Self; 9] = [
        Self::Stream,
        Self::Requests,
        Self::Requests8,
        Self::Requests64,
        Self::Connections,
        Self::Connections8,
        Self::Connections64,
        Self::Packets,
        Self::Mix,
    ];

    /// Those of one client.
    pub(crate) const SINGLE: [Self; 5] = [
        Self::Stream,
        Self::Requests,
        Self::Connections,
        Self::Packets,
        Self::Mix,
    ];

    /// Its name in tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Stream => "TCP_STREAM",
            Self::Requests => "TCP_RR",
            Self::Requests8 => "TCP_RR x 8",
            Self::Requests64 => "TCP_RR x 64",
            Self::Connections => "TCP_CRR",
            Self::Connections8 => "TCP_CRR x 8",
            Self::Connections64 => "TCP_CRR x 64",
            Self::Packets => "UDP 64 B",
            Self::Mix => "UDP mix",
        }
    }

    /// What it is counted in, as printed.
    pub(crate) const fn unit(self) -> &'static str {
        match self {
            Self::Stream => "Gb/s",
            Self::Packets | Self::Mix => "kpps",
            _ => "k/s",
        }
    }

    /// How many of the JSON's bits, transactions or packets per second make one unit.
    pub(crate) const fn scale(self) -> f64 {
        match self {
            Self::Stream => 1e9,
            _ => 1e3,
        }
    }

    /// What processor time is told for, as printed: a megabyte, or one transaction, connection or packet.
    pub(crate) const fn piece(self) -> &'static str {
        match self {
            Self::Stream => "us/MB",
            _ => "us",
        }
    }

    /// How many bits, transactions or packets that is.
    const fn pieces(self) -> f64 {
        match self {
            Self::Stream => 8e6,
            _ => 1.0,
        }
    }

    /// Sends for a while from a client to a server.
    pub(crate) fn measure(self, ends: &Ends<'_>, timing: Timing) -> Result<Sample> {
        for _ in 0..ATTEMPTS {
            let (counted, worked) = thread::scope(|scope| {
                let worked = scope.spawn(|| worked_in(timing));
                let counted = self.count(ends, timing);
                (counted, join(worked))
            });
            let counted = counted?;
            if counted > 0.0 {
                return Ok(Sample {
                    rate: counted / timing.window.as_secs_f64(),
                    cpu_us: worked? * 1e6 / (counted / self.pieces()),
                });
            }
        }
        bail!(
            "nothing got through in {ATTEMPTS} times {:?}: the path is broken, or the machine does too much else",
            timing.window
        )
    }

    /// Bits, transactions or packets in the window.
    fn count(self, ends: &Ends<'_>, timing: Timing) -> Result<f64> {
        match self {
            Self::Stream => stream::measure(ends, timing),
            Self::Requests => requests::measure(ends, timing, 1),
            Self::Requests8 => requests::measure(ends, timing, 8),
            Self::Requests64 => requests::measure(ends, timing, 64),
            Self::Connections => connections::measure(ends, timing, 1),
            Self::Connections8 => connections::measure(ends, timing, 8),
            Self::Connections64 => connections::measure(ends, timing, 64),
            Self::Packets => packets::measure(ends, timing, &packets::SMALL),
            Self::Mix => packets::measure(ends, timing, &packets::MIX),
        }
    }
}

/// What one window of a load gave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// Bits, transactions or packets per second.
    pub(crate) rate: f64,
    /// Processor time of the whole machine for each [piece](Load::piece), in microseconds.
    pub(crate) cpu_us: f64,
}

/// Processor time of the whole machine in a window that begins now, in seconds. The kernel tells it in hundredths.
fn worked_in(timing: Timing) -> Result<f64> {
    thread::sleep(timing.warm_up);
    let before = others::worked()?;
    thread::sleep(timing.window);
    Ok(others::worked()? - before)
}

/// Where traffic starts, and where it goes.
#[derive(Clone, Copy)]
pub(crate) struct Ends<'a> {
    pub(crate) client: &'a Netns,
    pub(crate) server: &'a Netns,
    /// The address that the client talks to.
    pub(crate) target: IpAddr,
    /// The server's own address: another one where a host port is between.
    pub(crate) own: IpAddr,
}

impl Ends<'_> {
    fn target(&self) -> SocketAddr {
        SocketAddr::new(self.target, PORT)
    }

    fn own(&self) -> SocketAddr {
        SocketAddr::new(self.own, PORT)
    }

    fn listen(&self) -> Result<TcpListener> {
        let own = self.own();
        let listener = self
            .server
            .run(|| TcpListener::bind(own))
            .with_context(|| format!("listen at {own}"))?;
        let seconds = i64::try_from(SILENCE.as_secs()).unwrap_or(i64::MAX);
        setsockopt(&listener, ReceiveTimeout, &TimeVal::seconds(seconds))
            .context("limit the wait for a connection")?;
        Ok(listener)
    }

    /// Both ends of a new connection, the client's first.
    fn connection(&self) -> Result<(TcpStream, TcpStream)> {
        let mut one = self.connections(1)?;
        one.pop().context("a connection")
    }

    /// Both ends of so many.
    fn connections(&self, many: usize) -> Result<Vec<(TcpStream, TcpStream)>> {
        let listener = self.listen()?;
        (0..many).map(|_| self.connect_to(&listener)).collect()
    }

    fn connect_to(&self, listener: &TcpListener) -> Result<(TcpStream, TcpStream)> {
        let target = self.target();
        let client = self
            .client
            .run(|| TcpStream::connect_timeout(&target, SILENCE))
            .with_context(|| format!("connect to {target}"))?;
        let (server, _) = listener
            .accept()
            .with_context(|| format!("accept a connection at {target}"))?;
        for end in [&client, &server] {
            end.set_nodelay(true)
                .and_then(|()| end.set_read_timeout(Some(SILENCE)))
                .and_then(|()| end.set_write_timeout(Some(SILENCE)))
                .context("set up a connection")?;
        }
        Ok((client, server))
    }
}

/// How long to send before counting, and how long to count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    pub(crate) warm_up: Duration,
    pub(crate) window: Duration,
}

impl Timing {
    fn begin(self) -> Window {
        let start = Instant::now() + self.warm_up;
        Window {
            start,
            end: start + self.window,
        }
    }
}

/// The time in which things count.
#[derive(Clone, Copy)]
struct Window {
    start: Instant,
    end: Instant,
}

impl Window {
    /// What a thing is worth that happened just now, or `None` after the end.
    fn count(self, worth: u64) -> Option<u64> {
        let now = Instant::now();
        if now >= self.end {
            return None;
        }
        Some(if now >= self.start { worth } else { 0 })
    }

    fn is_over(self) -> bool {
        Instant::now() >= self.end
    }
}

/// Whether the other end closed first, which is how measurements end.
fn closed(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
    )
}

/// A count as a number to calculate with; counts stay far below the 2^53 from which on that loses anything.
#[expect(clippy::cast_precision_loss, reason = "no measurement counts to 2^53")]
const fn number(count: u64) -> f64 {
    count as f64
}

//! Small datagrams, as many as go through; the receiver counts.

use std::{
    io::ErrorKind,
    net::{SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use underpass_tests::Family;

use super::{Ends, Timing, number};
use crate::{
    cpu::{self, End},
    join,
};

/// Bytes of payload.
const PAYLOAD: usize = 64;

/// Bytes that may wait for the receiver: a moment without its core must not look like a slow path.
const BUFFER: usize = 32 * 1024 * 1024;

/// How long a greeting is waited for.
const PATIENCE: Option<Duration> = Some(Duration::from_millis(200));

/// Datagrams sent between two looks at the clock.
const BATCH: usize = 16;

/// How many flows, and bytes of payload of one datagram after the other.
pub(super) struct Pattern {
    flows: usize,
    payloads: &'static [usize],
}

/// One flow of small datagrams.
pub(super) const SMALL: Pattern = Pattern {
    flows: 1,
    payloads: &[PAYLOAD],
};

/// Many flows, and sizes as the mix of the Internet is often imitated: seven small ones, four of 576 bytes with their headers, a full one.
/// What fits IPv4 with 576 and 1500 bytes is a little more than what fits IPv6; one size for both keeps them comparable.
pub(super) const MIX: Pattern = Pattern {
    flows: 32,
    payloads: &[
        PAYLOAD, 528, PAYLOAD, 528, PAYLOAD, PAYLOAD, 528, PAYLOAD, PAYLOAD, 528, PAYLOAD, 1452,
    ],
};

/// The largest payload of a pattern.
const LARGEST: usize = 1452;

/// Datagrams that arrived.
pub(super) fn measure(ends: &Ends<'_>, timing: Timing, pattern: &Pattern) -> Result<f64> {
    let (first, server) = introduce(ends)?;
    let mut clients = vec![first];
    for _ in 1..pattern.flows {
        clients.push(greet(ends, &server)?);
    }
    let window = timing.begin();
    let packets = thread::scope(|scope| {
        let sender = scope.spawn(|| {
            cpu::pin(End::Client)?;
            let payload = [0; LARGEST];
            let mut flows = clients.iter().cycle();
            let mut sizes = pattern.payloads.iter().cycle();
            while !window.is_over() {
                for (client, &size) in flows.by_ref().zip(sizes.by_ref()).take(BATCH) {
                    client.send(&payload[..size]).context("send a datagram")?;
                }
            }
            anyhow::Ok(())
        });
        let receiver = scope.spawn(|| {
            cpu::pin(End::Server)?;
            server
                .set_nonblocking(true)
                .context("set up the receiver")?;
            let mut payload = [0; LARGEST];
            let mut packets = 0;
            // It looks instead of sleeping, so that the sender's core never spends time on waking it up.
            loop {
                let arrived = match server.recv(&mut payload) {
                    Ok(_) => 1,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
                    Err(error) => return Err(error).context("receive a datagram"),
                };
                match window.count(arrived) {
                    Some(counted) => packets += counted,
                    None => return anyhow::Ok(packets),
                }
            }
        });
        let packets = join(receiver);
        join(sender)?;
        packets
    })?;
    Ok(number(packets))
}

/// Two sockets that have heard of each other: neighbours are resolved, and the flow has seen an answer as most have.
pub(crate) fn introduce(ends: &Ends<'_>) -> Result<(UdpSocket, UdpSocket)> {
    let own = ends.own();
    let server = ends
        .server
        .run(|| UdpSocket::bind(own))
        .with_context(|| format!("receive datagrams at {own}"))?;
    setsockopt(&server, RcvBufForce, &BUFFER).context("enlarge the receiver's buffer")?;
    server
        .set_read_timeout(PATIENCE)
        .context("set up the receiver")?;
    let client = greet(ends, &server)?;
    Ok((client, server))
}

/// One more client that a server has answered.
fn greet(ends: &Ends<'_>, server: &UdpSocket) -> Result<UdpSocket> {
    let target = ends.target();
    let any = SocketAddr::new(Family::of(ends.target).any(), 0);
    let client = ends
        .client
        .run(|| UdpSocket::bind(any))
        .context("make a sender")?;
    client
        .connect(target)
        .with_context(|| format!("find the way to {target}"))?;
    client
        .set_read_timeout(PATIENCE)
        .context("set up a sender")?;
    let mut greeting = [0; PAYLOAD];
    for _ in 0..20 {
        // The first ones may be lost while neighbours are being resolved.
        client.send(&greeting).context("send a greeting")?;
        let Ok((length, from)) = server.recv_from(&mut greeting) else {
            continue;
        };
        server
            .send_to(&greeting[..length], from)
            .context("answer a greeting")?;
        if client.recv(&mut greeting).is_ok() {
            return Ok(client);
        }
    }
    bail!("no datagram reaches {target} and is answered")
}

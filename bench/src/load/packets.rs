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

/// Datagrams sent between two looks at the clock.
const BATCH: usize = 16;

/// Datagrams that arrived.
pub(super) fn measure(ends: &Ends<'_>, timing: Timing) -> Result<f64> {
    let (client, server) = introduce(ends)?;
    let window = timing.begin();
    let packets = thread::scope(|scope| {
        let sender = scope.spawn(|| {
            cpu::pin(End::Client)?;
            let payload = [0; PAYLOAD];
            while !window.is_over() {
                for _ in 0..BATCH {
                    client.send(&payload).context("send a datagram")?;
                }
            }
            anyhow::Ok(())
        });
        let receiver = scope.spawn(|| {
            cpu::pin(End::Server)?;
            server
                .set_nonblocking(true)
                .context("set up the receiver")?;
            let mut payload = [0; PAYLOAD];
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
    let target = ends.target();
    let server = ends
        .server
        .run(|| UdpSocket::bind(target))
        .with_context(|| format!("receive datagrams at {target}"))?;
    setsockopt(&server, RcvBufForce, &BUFFER).context("enlarge the receiver's buffer")?;
    let any = SocketAddr::new(Family::of(ends.target).any(), 0);
    let client = ends
        .client
        .run(|| UdpSocket::bind(any))
        .context("make a sender")?;
    client
        .connect(target)
        .with_context(|| format!("find the way to {target}"))?;
    let patience = Some(Duration::from_millis(200));
    for socket in [&client, &server] {
        socket
            .set_read_timeout(patience)
            .context("set up a socket")?;
    }
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
            return Ok((client, server));
        }
    }
    bail!("no datagram reaches {target} and is answered")
}

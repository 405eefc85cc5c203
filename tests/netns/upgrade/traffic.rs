//! Traffic on every path while programs are exchanged: numbered datagrams of which none may be missing, transfers, and new
//! connections all the time.

use std::{
    collections::BTreeSet,
    io,
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use underpass_tests::{netns::Netns, patience, prelude::*, traffic::SILENCE};

/// How long an answer may take.
const LIMIT: Duration = Duration::from_secs(3);
/// Datagrams on their way at the same time: fewer than any buffer has room for.
const WINDOW: usize = 32;

/// A path through the node, and where its server listens.
pub(crate) struct Path<'a> {
    pub(crate) name: &'static str,
    pub(crate) client: &'a Netns,
    pub(crate) server: &'a Netns,
    pub(crate) listens: SocketAddr,
    pub(crate) asked: SocketAddr,
}

/// What came through.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) datagrams: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) connections: AtomicU64,
}

impl Path<'_> {
    /// Sends numbered datagrams until `stop`, as fast as they are answered. Each must be answered, and once.
    pub(crate) fn number(&self, tally: &Tally, stop: &AtomicBool) -> Result<()> {
        let server = self.server.run(|| UdpSocket::bind(self.listens))?;
        let any = Family::of(self.asked.ip()).port(0);
        let client = self.client.run(|| UdpSocket::bind(any))?;
        client.connect(self.asked)?;
        client.set_read_timeout(Some(patience::here(LIMIT)))?;
        server.set_read_timeout(Some(SILENCE))?;
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let answering = scope.spawn(|| answer(&server, &over));
            let sent = self.send(&client, tally, stop);
            over.store(true, Ordering::Relaxed);
            let answered = answering.join().expect("it does not panic");
            sent.and(answered.context("answer numbered datagrams"))
                .with_context(|| format!("numbered datagrams, {}", self.name))
        })
    }

    fn send(&self, client: &UdpSocket, tally: &Tally, stop: &AtomicBool) -> Result<()> {
        let mut next = 0_u64;
        let mut waiting = BTreeSet::new();
        let mut buffer = [0; 8];
        loop {
            let stopped = stop.load(Ordering::Relaxed);
            if stopped && waiting.is_empty() {
                return Ok(());
            }
            while !stopped && waiting.len() < WINDOW {
                client.send(&next.to_be_bytes()).context("send")?;
                waiting.insert(next);
                next += 1;
            }
            let length = client.recv(&mut buffer).with_context(|| {
                let oldest = waiting.first().copied().unwrap_or_default();
                format!("number {oldest} of {next} to {} is missing", self.asked)
            })?;
            let number = u64::from_be_bytes(buffer);
            ensure!(
                length == buffer.len() && waiting.remove(&number),
                "number {number} came twice, or never was sent"
            );
            tally.datagrams.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Transfers checked bytes by one connection until `stop`.
    pub(crate) fn transfer(&self, tally: &Tally, stop: &AtomicBool) -> Result<()> {
        const EACH: u64 = 1_000_000;
        let mut client = tcp::Client::connect(self.client, self.asked)?;
        while !stop.load(Ordering::Relaxed) {
            client
                .exchange(EACH, EACH)
                .with_context(|| format!("a transfer, {}", self.name))?;
            tally.bytes.fetch_add(2 * EACH, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Opens connections until `stop`, one after the other, of which each says something.
    pub(crate) fn connect(&self, tally: &Tally, stop: &AtomicBool) -> Result<()> {
        while !stop.load(Ordering::Relaxed) {
            tcp::visit(self.client, self.asked)
                .with_context(|| format!("a new connection, {}", self.name))?;
            tally.connections.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

fn answer(server: &UdpSocket, over: &AtomicBool) -> Result<()> {
    let mut buffer = [0; 8];
    while !over.load(Ordering::Relaxed) {
        match server.recv_from(&mut buffer) {
            Ok((length, from)) => {
                server.send_to(&buffer[..length], from)?;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

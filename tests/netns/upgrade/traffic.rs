//! Traffic on every path while programs are exchanged: numbered datagrams of which none may be missing, transfers, and new
//! connections all the time.

use std::{
    collections::BTreeSet,
    io,
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
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
struct Tally {
    datagrams: AtomicU64,
    bytes: AtomicU64,
    connections: AtomicU64,
}

/// Where numbered datagrams go, and where connections do.
pub(crate) type Pair<'a> = (Path<'a>, Path<'a>);

/// What somebody does until he is told to stop.
type Other<'a> = &'a (dyn Fn(&AtomicBool) -> Result<()> + Sync);

/// Acts while all these paths are full, and `others` do what they do until they are told to stop. Nothing may be missing anywhere.
pub(crate) fn while_talking(
    paths: &[Pair<'_>],
    others: &[Other<'_>],
    act: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let (tally, stop) = (&Tally::default(), &AtomicBool::new(false));
    thread::scope(|scope| {
        let mut talking = Vec::new();
        for (numbered, connected) in paths {
            talking.push(scope.spawn(|| numbered.number(tally, stop)));
            talking.push(scope.spawn(|| connected.transfer(tally, stop)));
            talking.push(scope.spawn(|| connected.connect(tally, stop)));
        }
        talking.extend(others.iter().map(|other| scope.spawn(|| other(stop))));
        let acted = act();
        stop.store(true, Ordering::Relaxed);
        let ends: Vec<_> = talking
            .into_iter()
            .map(|thread| thread.join().expect("it does not panic"))
            .collect();
        ends.into_iter().try_for_each(|end| end).and(acted)
    })?;
    let [datagrams, bytes, connections] = [&tally.datagrams, &tally.bytes, &tally.connections]
        .map(|number| number.load(Ordering::Relaxed));
    eprintln!(
        "{datagrams} datagrams, {} MB, {connections} connections",
        bytes / 1_000_000
    );
    ensure!(datagrams > 1_000 && connections > 50);
    Ok(())
}

impl Path<'_> {
    /// Sends numbered datagrams until `stop`, as fast as they are answered. Each must be answered, and once.
    fn number(&self, tally: &Tally, stop: &AtomicBool) -> Result<()> {
        let server = self.server.run(|| UdpSocket::bind(self.listens))?;
        let any = Family::of(self.asked.ip()).port(0);
        let client = self.client.run(|| UdpSocket::bind(any))?;
        client.connect(self.asked)?;
        client.set_read_timeout(Some(patience::here(LIMIT)))?;
        server.set_read_timeout(Some(SILENCE))?;
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
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
    fn transfer(&self, tally: &Tally, stop: &AtomicBool) -> Result<()> {
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
    fn connect(&self, tally: &Tally, stop: &AtomicBool) -> Result<()> {
        while !stop.load(Ordering::Relaxed) {
            tcp::visit(self.client, self.asked)
                .with_context(|| format!("a new connection, {}", self.name))?;
            tally.connections.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(2));
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

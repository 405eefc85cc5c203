//! Both ends of an exchange: a server that knows its own name, and clients that notice every foreign word.

use std::{
    io::{self, BufReader, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsRawFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::sys::socket::{Shutdown, shutdown};
use underpass_tests::{
    netns::Netns,
    patience,
    traffic::{content::Content, tcp},
};

use super::book::{Book, Heading, Place};

/// How long one datagram is waited for.
const PATIENCE: Duration = Duration::from_millis(1500);
/// How often it is sent before nobody is believed to answer.
const TRIES: usize = 3;
/// How long a connection may stand still.
const STANDSTILL: Duration = Duration::from_secs(5);
/// Bytes of a transfer in each direction.
const TRANSFER: u64 = 150_000;

static SESSIONS: AtomicU64 = AtomicU64::new(1);

/// A server at one port by TCP and UDP, until dropped: it judges what it gets, and answers with whom it saw.
#[derive(Debug)]
pub(super) struct Server {
    stop: Arc<AtomicBool>,
    listener: Arc<TcpListener>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Listens at an address; at `::` for both families.
    pub(super) fn start(
        netns: &Netns,
        name: &str,
        at: SocketAddr,
        book: &Arc<Book>,
    ) -> Result<Self> {
        let (socket, listener) = netns
            .run(|| io::Result::Ok((UdpSocket::bind(at)?, TcpListener::bind(at)?)))
            .with_context(|| format!("listen at {at} in {name}"))?;
        socket.set_read_timeout(Some(Duration::from_millis(20)))?;
        let (listener, stop) = (Arc::new(listener), Arc::new(AtomicBool::new(false)));
        let (accepting, stopped) = (Arc::clone(&listener), Arc::clone(&stop));
        let [by_udp, by_tcp] = [(); 2].map(|()| (name.to_owned(), Arc::clone(book)));
        let threads = vec![
            thread::spawn(move || {
                let (name, book) = by_udp;
                let mut buffer = vec![0; 1 << 16];
                while !stopped.load(Ordering::Relaxed) {
                    // A timeout, or an ICMP error of an earlier answer.
                    let Ok((len, from)) = socket.recv_from(&mut buffer) else {
                        continue;
                    };
                    let from = SocketAddr::new(from.ip().to_canonical(), from.port());
                    judge(&book, &name, &buffer[..len]);
                    let mut answer = format!("{from}\n").into_bytes();
                    answer.extend_from_slice(&buffer[..len]);
                    let to = if socket.local_addr().is_ok_and(|at| at.is_ipv6()) {
                        mapped(from)
                    } else {
                        from
                    };
                    let _ = socket.send_to(&answer, to);
                }
            }),
            thread::spawn(move || {
                while let Ok((stream, peer)) = accepting.accept() {
                    let (name, book) = by_tcp.clone();
                    // The client notices a broken conversation.
                    thread::spawn(move || serve(stream, peer, &name, &book));
                }
            }),
        ];
        Ok(Self {
            stop,
            listener,
            threads,
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Ends the accept of its thread.
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// An address as a socket for both families takes it.
fn mapped(at: SocketAddr) -> SocketAddr {
    match at.ip() {
        IpAddr::V4(ip) => SocketAddr::new(ip.to_ipv6_mapped().into(), at.port()),
        IpAddr::V6(_) => at,
    }
}

fn judge(book: &Book, name: &str, request: &[u8]) -> Option<Heading> {
    let line = request.split(|&byte| byte == b'\n').next().unwrap_or(&[]);
    match String::from_utf8_lossy(line).parse::<Heading>() {
        Ok(heading) => {
            book.judge(heading.place, name, Duration::from_nanos(heading.since));
            Some(heading)
        }
        Err(error) => {
            book.accuse(format!("{name} got what nobody sends: {error:#}"));
            None
        }
    }
}

fn serve(mut stream: TcpStream, peer: SocketAddr, name: &str, book: &Book) -> io::Result<()> {
    stream.set_read_timeout(Some(patience::here(STANDSTILL)))?;
    stream.set_write_timeout(Some(patience::here(STANDSTILL)))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let line = read_line(&mut reader)?;
    let Some(heading) = judge(book, name, line.as_bytes()) else {
        return Ok(());
    };
    let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
    if heading.number > 0 {
        return talk(stream, reader, peer, heading, name, book);
    }
    writeln!(stream, "{peer}")?;
    let received = Content::new(heading.session).check(&mut reader, TRANSFER);
    if let Err(error) = &received
        && error.kind() == io::ErrorKind::InvalidData
    {
        book.accuse(format!("{name} got other bytes than were sent: {error}"));
    }
    received?;
    Content::new(!heading.session).send(&mut stream, TRANSFER)
}

/// Answers one word after the other, however long the next one takes.
fn talk(
    mut stream: TcpStream,
    mut reader: BufReader<TcpStream>,
    peer: SocketAddr,
    mut heading: Heading,
    name: &str,
    book: &Book,
) -> io::Result<()> {
    stream.set_read_timeout(None)?;
    loop {
        stream.write_all(format!("{peer} {heading}\n").as_bytes())?;
        let line = read_line(&mut reader)?;
        match judge(book, name, line.as_bytes()) {
            Some(next) => heading = next,
            None => return Ok(()),
        }
    }
}

/// How an exchange ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// Well, and the server saw this client; so many datagrams were sent again.
    Answered(SocketAddr, u64),
    /// With no answer, or only the beginning of one.
    Silence,
}

/// A UDP socket that asks again and again: one long flow for each server.
#[derive(Debug)]
pub(super) struct Asker {
    socket: UdpSocket,
    session: u64,
    number: u64,
}

impl Asker {
    /// A socket of a namespace at an address, at any port, not connected.
    pub(super) fn open(netns: &Netns, own: IpAddr) -> Result<Self> {
        let socket = netns
            .run(|| UdpSocket::bind(SocketAddr::new(own, 0)))
            .with_context(|| format!("open a UDP socket in {}", netns.name()))?;
        socket.set_read_timeout(Some(patience::here(PATIENCE)))?;
        Ok(Self {
            socket,
            session: new_session(),
            number: 0,
        })
    }

    /// Asks with about `len` bytes.
    pub(super) fn ask(&mut self, book: &Book, place: Place, to: SocketAddr, len: usize) -> Outcome {
        self.number += 1;
        for again in 0..TRIES {
            let heading = Heading::new(book, self.session, self.number, place);
            let mut request = format!("{heading}\n").into_bytes();
            let start = request.len();
            request.extend((start..len).map(|at| at.to_le_bytes()[0]));
            if self.socket.send_to(&request, to).is_err() {
                return Outcome::Silence;
            }
            if let Some(seen) = self.hear(book, to, &heading, &request) {
                return Outcome::Answered(seen, again as u64);
            }
        }
        Outcome::Silence
    }

    fn hear(
        &self,
        book: &Book,
        to: SocketAddr,
        heading: &Heading,
        request: &[u8],
    ) -> Option<SocketAddr> {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let (len, from) = self.socket.recv_from(&mut buffer).ok()?;
            let answer = &buffer[..len];
            let at = answer.iter().position(|&byte| byte == b'\n')?;
            let (seen, echo) = (&answer[..at], &answer[at + 1..]);
            let line = echo.split(|&byte| byte == b'\n').next().unwrap_or(&[]);
            let text = String::from_utf8_lossy(line);
            let Ok(answered) = text.parse::<Heading>() else {
                book.accuse(format!("an answer from {from} that nobody sends: {text:?}"));
                return None;
            };
            if answered.session != heading.session {
                book.accuse(format!(
                    "the answer to {answered} of another client, for {heading}"
                ));
                return None;
            }
            // An answer to a question that was given up.
            if answered != *heading {
                continue;
            }
            let since = Duration::from_nanos(heading.since);
            // What a server answered while it lost the port goes out as its own.
            if from != to && !book.is_steady(heading.place, since) {
                continue;
            }
            if echo != request || from != to {
                book.accuse(format!(
                    "{to} was asked by {heading}, and {from} answered with {} bytes",
                    echo.len()
                ));
                return None;
            }
            return String::from_utf8_lossy(seen).parse().ok();
        }
    }
}

/// One connection from an address and port of a namespace, with a transfer in each direction.
pub(super) fn transfer(
    netns: &Netns,
    own: SocketAddr,
    book: &Book,
    place: Place,
    to: SocketAddr,
) -> Outcome {
    let heading = Heading::new(book, new_session(), 0, place);
    match converse(netns, own, &heading, to) {
        Ok(seen) => Outcome::Answered(seen, 0),
        Err(error) => {
            if error.kind() == io::ErrorKind::InvalidData {
                book.accuse(format!("{to} was asked by {heading}: {error}"));
            }
            Outcome::Silence
        }
    }
}

/// A connection from an address and port of a namespace, on which nothing may stand still.
pub(super) fn connect(netns: &Netns, own: SocketAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let stream = netns
        .run(|| tcp::dial(Some(own), to, &[], patience::here(STANDSTILL)))
        .map_err(io::Error::other)?;
    stream.set_read_timeout(Some(patience::here(STANDSTILL)))?;
    stream.set_write_timeout(Some(patience::here(STANDSTILL)))?;
    Ok(stream)
}

fn converse(
    netns: &Netns,
    own: SocketAddr,
    heading: &Heading,
    to: SocketAddr,
) -> io::Result<SocketAddr> {
    let mut stream = connect(netns, own, to)?;
    writeln!(stream, "{heading}")?;
    let mut reader = BufReader::new(stream.try_clone()?);
    Content::new(heading.session).send(&mut stream, TRANSFER)?;
    let line = read_line(&mut reader)?;
    Content::new(!heading.session).check(&mut reader, TRANSFER)?;
    if reader.read(&mut [0])? != 0 {
        return Err(invalid("more came than was sent"));
    }
    line.parse()
        .map_err(|_| invalid(&format!("{line:?} is no address")))
}

/// A number that no other client has.
pub(super) fn new_session() -> u64 {
    SESSIONS.fetch_add(1, Ordering::Relaxed)
}

/// A whole line, without its end.
pub(super) fn read_line(reader: &mut impl io::BufRead) -> io::Result<String> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    match line.pop() {
        Some('\n') => Ok(line),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

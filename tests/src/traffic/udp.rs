//! UDP: a server that says who asked, and clients with sockets that are connected or not.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::socket::{setsockopt, sockopt};

use super::{
    SILENCE,
    option::{self, Setting},
    patience,
};
use crate::{Family, netns::Netns};

const LARGEST: usize = 65_536;

/// How soon a server notices that it shall stop.
const HEARTBEAT: Duration = Duration::from_millis(20);

/// A server in a namespace, until dropped: its answer is the asker's address, a line feed, and the request.
#[derive(Debug)]
pub struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens.
    pub fn start(netns: &Netns, at: SocketAddr) -> Result<Self> {
        Self::start_with(netns, at, &[])
    }

    /// Listens with a socket that has these options.
    pub fn start_with(netns: &Netns, at: SocketAddr, options: &[Setting]) -> Result<Self> {
        let socket = netns
            .run(|| UdpSocket::bind(at))
            .with_context(|| format!("listen at {at} in {}", netns.name()))?;
        option::set(&socket, options)?;
        socket.set_read_timeout(Some(HEARTBEAT))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut buffer = vec![0; LARGEST];
            while !stopped.load(Ordering::Relaxed) {
                // A timeout, or an ICMP error of an earlier answer.
                let Ok((len, from)) = socket.recv_from(&mut buffer) else {
                    continue;
                };
                let mut answer = format!("{from}\n").into_bytes();
                answer.extend_from_slice(&buffer[..len]);
                let _ = socket.send_to(&answer, from);
            }
        });
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// An answer to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    /// Who the server saw.
    pub seen: SocketAddr,
    /// Who the client saw.
    pub from: SocketAddr,
}

/// A socket in a namespace.
#[derive(Debug)]
pub struct Client {
    socket: UdpSocket,
    asked: u32,
}

impl Client {
    /// A socket that is not connected, at any port.
    pub fn open(netns: &Netns, family: Family) -> Result<Self> {
        Self::open_at(netns, family, 0)
    }

    /// A socket that is not connected, at a given port.
    pub fn open_at(netns: &Netns, family: Family, port: u16) -> Result<Self> {
        Self::open_bound(netns, family.port(port))
    }

    /// A socket that is not connected, at a given address and port.
    pub fn open_bound(netns: &Netns, at: SocketAddr) -> Result<Self> {
        let socket = netns
            .run(|| UdpSocket::bind(at))
            .with_context(|| format!("bind {at} by UDP in {}", netns.name()))?;
        socket.set_read_timeout(Some(patience()))?;
        Ok(Self { socket, asked: 0 })
    }

    /// Connects it: the kernel then gives it nothing but answers of `to`.
    pub fn connect(&self, to: SocketAddr) -> Result<()> {
        self.socket
            .connect(to)
            .with_context(|| format!("connect a UDP socket to {to}"))
    }

    /// Sets options of its socket.
    pub fn set(&self, options: &[Setting]) -> Result<()> {
        option::set(&self.socket, options)
    }

    /// Its own end.
    pub fn local(&self) -> Result<SocketAddr> {
        Ok(self.socket.local_addr()?)
    }

    /// Asks with `len` bytes of payload and waits for the answer, which must come from whom was asked.
    pub fn ask(&mut self, to: SocketAddr, len: usize) -> Result<Answer> {
        self.ask_once(to, len)?
            .with_context(|| format!("asked {to} by UDP with {len} bytes, and no answer came"))
    }

    /// The same, but that no answer comes in time is none.
    pub fn ask_once(&mut self, to: SocketAddr, len: usize) -> Result<Option<Answer>> {
        let answer = match self.converse(to, len, patience()) {
            Ok(answer) => answer,
            Err(error) if is_late(&error) => return Ok(None),
            Err(error) => {
                return Err(error).with_context(|| format!("ask {to} by UDP with {len} bytes"));
            }
        };
        ensure!(
            answer.from == to,
            "asked {to} by UDP, and {} answered",
            answer.from
        );
        Ok(Some(answer))
    }

    /// Asks some times in a row.
    pub fn chat(&mut self, to: SocketAddr, times: usize) -> Result<Answer> {
        let mut answer = self.ask(to, 100)?;
        for _ in 1..times {
            answer = self.ask(to, 100)?;
        }
        Ok(answer)
    }

    /// Fails if an answer comes.
    pub fn hears_nothing(&mut self, to: SocketAddr) -> Result<()> {
        match self.converse(to, 100, SILENCE) {
            Err(_) => Ok(()),
            Ok(answer) => bail!(
                "asked {to} by UDP, which must not be answered, and {} did",
                answer.from
            ),
        }
    }

    /// Fails unless `to`, which this socket is connected to, refuses a datagram.
    pub fn is_refused(&self, to: SocketAddr) -> Result<()> {
        self.connect(to)?;
        self.socket.send(b"anybody?")?;
        let answer = self.socket.recv(&mut [0; 64]);
        let kind = answer.as_ref().err().map(io::Error::kind);
        ensure!(
            kind == Some(io::ErrorKind::ConnectionRefused),
            "{to} must refuse: {answer:?}"
        );
        Ok(())
    }

    /// Makes the kernel note when datagrams arrive.
    pub fn take_timestamps(&self) -> Result<()> {
        setsockopt(&self.socket, sockopt::ReceiveTimestampns, &true)?;
        Ok(())
    }

    /// Sends and waits for nothing.
    pub fn send(&self, to: SocketAddr, payload: &[u8]) -> Result<()> {
        self.socket
            .send_to(payload, to)
            .with_context(|| format!("send to {to} by UDP"))?;
        Ok(())
    }

    fn converse(&mut self, to: SocketAddr, len: usize, patience: Duration) -> io::Result<Answer> {
        self.asked += 1;
        let mut request: Vec<u8> = (0..len).map(|at| at.to_le_bytes()[0]).collect();
        let number = self.asked.to_be_bytes();
        let marked = len.min(number.len());
        request[..marked].copy_from_slice(&number[..marked]);
        if self.socket.peer_addr().is_ok() {
            self.socket.send(&request)?;
        } else {
            self.socket.send_to(&request, to)?;
        }
        let end = Instant::now() + patience;
        let mut buffer = vec![0; LARGEST];
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.socket.set_read_timeout(Some(left))?;
            let (len, from) = self.socket.recv_from(&mut buffer)?;
            let answer = &buffer[..len];
            // Late answers of earlier requests are passed over.
            let Some(at) = answer.iter().position(|&byte| byte == b'\n') else {
                continue;
            };
            let (seen, echo) = (&answer[..at], &answer[at + 1..]);
            let seen = std::str::from_utf8(seen)
                .ok()
                .and_then(|text| text.parse().ok());
            if let (Some(seen), true) = (seen, echo == request) {
                return Ok(Answer { seen, from });
            }
        }
    }
}

/// Whether nothing came in time, as a socket with a time limit or its user says it.
fn is_late(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

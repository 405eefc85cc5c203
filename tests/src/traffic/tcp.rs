//! TCP: a server that takes and sends checked content, and a client that asks for it.

use std::{
    io::{self, BufReader, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsRawFd as _, OwnedFd},
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::{
    socket::{
        AddressFamily, Shutdown, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt,
        shutdown, socket, sockopt,
    },
    time::{TimeVal, TimeValLike as _},
};

use super::{
    content::Content,
    option::{self, Setting},
    patience,
};
use crate::{netns::Netns, patience::here};

const UPLOAD: u64 = 0x5eed_0001;
const DOWNLOAD: u64 = 0x5eed_0002;
/// How much longer a server waits for a request than for its parts: some connections are idle while a table is filled.
const IDLE: u32 = 12;

/// A server in a namespace, until dropped.
#[derive(Debug)]
pub struct Server {
    listener: Arc<TcpListener>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens.
    pub fn start(netns: &Netns, at: SocketAddr) -> Result<Self> {
        let listener = netns
            .run(|| TcpListener::bind(at))
            .with_context(|| format!("listen at {at} in {}", netns.name()))?;
        let listener = Arc::new(listener);
        let accepting = Arc::clone(&listener);
        let thread = thread::spawn(move || {
            while let Ok((stream, peer)) = accepting.accept() {
                // The client notices a broken conversation, and fails the test.
                thread::spawn(move || serve(stream, peer));
            }
        });
        Ok(Self {
            listener,
            thread: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ends the accept of the thread.
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Requests until the end: two lengths, the upload, then who asked, and the download.
fn serve(mut stream: TcpStream, peer: SocketAddr) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut request = [0; 16];
    loop {
        stream.set_read_timeout(Some(IDLE * patience()))?;
        stream.read_exact(&mut request)?;
        stream.set_read_timeout(Some(patience()))?;
        stream.set_write_timeout(Some(patience()))?;
        let (upload, download) = request.split_at(8);
        let [upload, download] = [upload, download]
            .map(|bytes| bytes.iter().fold(0, |n, &byte| n << 8 | u64::from(byte)));
        Content::new(UPLOAD).check(&mut stream, upload)?;
        let seen = peer.to_string();
        stream.write_all(&[u8::try_from(seen.len()).unwrap_or(u8::MAX)])?;
        stream.write_all(seen.as_bytes())?;
        Content::new(DOWNLOAD).send(&mut stream, download)?;
    }
}

/// A connection to a [`Server`].
#[derive(Debug)]
pub struct Client {
    stream: BufReader<TcpStream>,
    to: SocketAddr,
}

/// What one exchange was like.
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    /// The client's address and port, as the server saw them.
    pub seen: SocketAddr,
    /// How long all of it took.
    pub elapsed: Duration,
}

impl Client {
    /// Connects from a namespace, from any port.
    pub fn connect(netns: &Netns, to: SocketAddr) -> Result<Self> {
        Self::open(netns, None, to, &[], patience())
    }

    /// Connects from a given port.
    pub fn connect_from(netns: &Netns, port: u16, to: SocketAddr) -> Result<Self> {
        Self::connect_between(netns, crate::Family::of(to.ip()).port(port), to)
    }

    /// Connects from a given address and port.
    pub fn connect_between(netns: &Netns, from: SocketAddr, to: SocketAddr) -> Result<Self> {
        Self::connect_with(netns, from, to, &[])
    }

    /// Connects from a given address and port, by a socket that has these options from the first packet on.
    pub fn connect_with(
        netns: &Netns,
        from: SocketAddr,
        to: SocketAddr,
        options: &[Setting],
    ) -> Result<Self> {
        Self::open(netns, Some(from), to, options, patience())
    }

    /// Connects from any port, waiting no longer than `patience`.
    pub fn try_connect(netns: &Netns, to: SocketAddr, patience: Duration) -> Result<Self> {
        Self::open(netns, None, to, &[], patience)
    }

    fn open(
        netns: &Netns,
        from: Option<SocketAddr>,
        to: SocketAddr,
        options: &[Setting],
        limit: Duration,
    ) -> Result<Self> {
        let stream = netns
            .run(|| dial(from, to, options, limit))
            .with_context(|| format!("connect from {} to {to}", netns.name()))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(patience()))?;
        stream.set_write_timeout(Some(patience()))?;
        Ok(Self {
            stream: BufReader::new(stream),
            to,
        })
    }

    /// Its own end.
    pub fn local(&self) -> Result<SocketAddr> {
        Ok(self.stream.get_ref().local_addr()?)
    }

    /// Sets options of its socket.
    pub fn set(&self, options: &[Setting]) -> Result<()> {
        option::set(self.stream.get_ref(), options)
    }

    /// Ends it at once, by an RST.
    pub fn reset(self) -> Result<()> {
        self.set(&[Setting::no_linger()])
    }

    /// Sends `upload` bytes, then receives `download` bytes; both ends check what comes.
    pub fn exchange(&mut self, upload: u64, download: u64) -> Result<Exchange> {
        self.exchange_by(0, upload, download)
    }

    /// As [`Self::exchange`], but the first segment is as long as can be: nothing small goes before it, of which the server would say that it
    /// came.
    pub fn exchange_at_once(&mut self, upload: u64, download: u64) -> Result<Exchange> {
        self.exchange_by(1 << 16, upload, download)
    }

    fn exchange_by(&mut self, buffer: usize, upload: u64, download: u64) -> Result<Exchange> {
        let start = Instant::now();
        let seen = self
            .converse(buffer, upload, download)
            .with_context(|| format!("{upload} bytes to {} and {download} back", self.to))?;
        Ok(Exchange {
            seen: seen
                .parse()
                .with_context(|| format!("the server saw {seen:?}"))?,
            elapsed: start.elapsed(),
        })
    }

    /// As [`Self::exchange`], both ways and three times. Each has to be done before `limit` (here): a connection that goes on waits for no
    /// timer of its own.
    pub fn goes_on(&mut self, bytes: u64, limit: Duration) -> Result<()> {
        for _ in 0..3 {
            let elapsed = self.exchange(bytes, bytes)?.elapsed;
            ensure!(elapsed < here(limit), "an exchange took {elapsed:?}");
        }
        Ok(())
    }

    fn converse(&mut self, buffer: usize, upload: u64, download: u64) -> io::Result<String> {
        let mut stream = io::BufWriter::with_capacity(buffer, self.stream.get_mut());
        let mut request = [0; 16];
        request[..8].copy_from_slice(&upload.to_be_bytes());
        request[8..].copy_from_slice(&download.to_be_bytes());
        stream.write_all(&request)?;
        Content::new(UPLOAD).send(&mut stream, upload)?;
        stream.flush()?;
        drop(stream);
        let mut len = [0];
        self.stream.read_exact(&mut len)?;
        let mut seen = vec![0; usize::from(len[0])];
        self.stream.read_exact(&mut seen)?;
        Content::new(DOWNLOAD).check(&mut self.stream, download)?;
        String::from_utf8(seen).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Some small exchanges in a row, each a packet in each direction at least: who the server saw.
    pub fn chat(&mut self, times: usize) -> Result<SocketAddr> {
        let mut seen = self.exchange(100, 100)?.seen;
        for _ in 1..times {
            seen = self.exchange(100, 100)?.seen;
        }
        Ok(seen)
    }
}

/// Fails unless `to` refuses a connection at once.
pub fn is_refused(netns: &Netns, to: SocketAddr) -> Result<()> {
    is_refused_at(netns, None, to)
}

/// As [`is_refused`], from a given address and port.
pub fn is_refused_at(netns: &Netns, from: Option<SocketAddr>, to: SocketAddr) -> Result<()> {
    let answer = netns.run(|| dial(from, to, &[], patience()));
    let kind = answer.as_ref().err().and_then(|error| {
        let error = error.downcast_ref::<io::Error>();
        error.map(io::Error::kind)
    });
    ensure!(
        kind == Some(io::ErrorKind::ConnectionRefused),
        "{to} must refuse: {answer:?}"
    );
    Ok(())
}

/// Connects once, with one exchange, and checks nothing but that it works: who the server saw.
pub fn visit(netns: &Netns, to: SocketAddr) -> Result<IpAddr> {
    Ok(Client::connect(netns, to)?.chat(3)?.ip())
}

/// Fails if a connection to `to` can be opened.
pub fn refuses(netns: &Netns, to: SocketAddr) -> Result<()> {
    let opened = Client::try_connect(netns, to, super::SILENCE);
    ensure!(
        opened.is_err(),
        "{} must not reach {to}, but it does",
        netns.name()
    );
    Ok(())
}

/// Connects from where this thread is, waiting no longer than `patience`.
pub fn dial(
    from: Option<SocketAddr>,
    to: SocketAddr,
    options: &[Setting],
    patience: Duration,
) -> Result<TcpStream> {
    let family = match to.ip() {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    let fd: OwnedFd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    if let Some(from) = from {
        setsockopt(&fd, sockopt::ReuseAddr, &true)?;
        bind(fd.as_raw_fd(), &SockaddrStorage::from(from))?;
    }
    option::set(&fd, options)?;
    // A timeout for sending holds for connecting as well.
    let patience = TimeVal::milliseconds(i64::try_from(patience.as_millis()).unwrap_or(i64::MAX));
    setsockopt(&fd, sockopt::SendTimeout, &patience)?;
    connect(fd.as_raw_fd(), &SockaddrStorage::from(to)).map_err(io::Error::from)?;
    Ok(TcpStream::from(fd))
}

//! SCTP, where the kernel speaks it: a server that says who called, and a caller.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::socket::{Backlog, SockaddrStorage, bind, connect, listen};

use super::patience;
use crate::netns::Netns;

/// How soon a server notices that it shall stop.
const HEARTBEAT: Duration = Duration::from_millis(20);

/// True if the kernel has no SCTP; the reason is printed, as `cargo xtask test vm` looks for it.
#[must_use]
pub fn is_missing(netns: &Netns) -> bool {
    let refused = netns.run(|| open(libc::AF_INET).err());
    if let Some(error) = &refused {
        anstream::println!("not on this kernel: no SCTP sockets, {error} (module sctp)");
    }
    refused.is_some()
}

/// A server in a namespace, until dropped: it tells each caller the address that it saw, then sends back what comes.
#[derive(Debug)]
pub struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens.
    pub fn start(netns: &Netns, at: SocketAddr) -> Result<Self> {
        let listener = netns
            .run(|| {
                let socket = open_at(at)?;
                listen(&socket, Backlog::new(8)?)?;
                io::Result::Ok(TcpListener::from(socket))
            })
            .with_context(|| format!("listen for SCTP at {at} in {}", netns.name()))?;
        listener.set_nonblocking(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((stream, peer)) => drop(thread::spawn(move || serve(stream, peer))),
                    Err(_) => thread::sleep(HEARTBEAT),
                }
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

/// The caller notices a broken conversation, and fails the test.
fn serve(mut stream: TcpStream, peer: SocketAddr) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(patience()))?;
    stream.write_all(peer.to_string().as_bytes())?;
    let mut message = vec![0; 1 << 16];
    loop {
        let len = stream.read(&mut message)?;
        if len == 0 {
            return Ok(());
        }
        stream.write_all(&message[..len])?;
    }
}

/// Calls a server from an address and port of a namespace, sends messages of several sizes, and returns whom the server saw.
pub fn call(netns: &Netns, from: SocketAddr, to: SocketAddr) -> Result<SocketAddr> {
    let mut stream = netns
        .run(|| {
            let socket = open_at(from)?;
            connect(socket.as_raw_fd(), &SockaddrStorage::from(to))?;
            io::Result::Ok(TcpStream::from(socket))
        })
        .with_context(|| format!("call {to} by SCTP from {from} in {}", netns.name()))?;
    stream.set_read_timeout(Some(patience()))?;
    let mut buffer = vec![0; 1 << 16];
    let len = stream
        .read(&mut buffer)
        .context("read whom the server saw")?;
    let seen = String::from_utf8_lossy(&buffer[..len]).into_owned();
    for len in [1usize, 100, 1401, 20_000] {
        let message = vec![len.to_le_bytes()[0]; len];
        stream.write_all(&message)?;
        let mut answer = vec![0; len];
        stream
            .read_exact(&mut answer)
            .with_context(|| format!("read {len} bytes back"))?;
        ensure!(answer == message, "{len} bytes came back changed");
    }
    seen.parse()
        .with_context(|| format!("the server saw {seen:?}"))
}

fn open_at(at: SocketAddr) -> io::Result<OwnedFd> {
    let family = if at.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    let socket = open(family)?;
    let limit = libc::timeval {
        tv_sec: patience().as_secs().cast_signed(),
        tv_usec: 0,
    };
    let len = libc::socklen_t::try_from(size_of_val(&limit)).map_err(io::Error::other)?;
    // A call that nobody answers ends. SAFETY: the option is a timeval of the length given, which the kernel only reads.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_SNDTIMEO,
            (&raw const limit).cast(),
            len,
        )
    };
    if set != 0 {
        return Err(io::Error::last_os_error());
    }
    bind(socket.as_raw_fd(), &SockaddrStorage::from(at))?;
    Ok(socket)
}

fn open(family: libc::c_int) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::socket(family, kind, libc::IPPROTO_SCTP) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave it to us, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
